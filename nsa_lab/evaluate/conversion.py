"""Loss of a converted model compared with its dense attention, by position, and the attention mass that its blocks have.

All rows of a result use the same windows and, except for a control, the weights of one model. They differ in the tokens
that are attended to:

* dense: all tokens
* selected: the forced blocks (`sink_blocks`, `local_blocks`), and the blocks with the highest scores of the indexer
* mean_key: the same number of blocks, by the mean key of a block
* nearest: the first blocks and the latest ones, the same number
* oracle: the same number, those with the most dense attention mass
* window: only the forced blocks
* control: all tokens, with the weights of another run, which was trained alike with dense attention

`evaluate_conversion` writes `conversion.json`. With a frozen trunk, the row dense is the loss of the pretrained model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RunConfig
from nsa_lab.data import DataError, Dataset, EvalBatches, TokenStore, load_tokenizer, prepare
from nsa_lab.evaluate.ablations import ABLATIONS, forward_with_ablation
from nsa_lab.evaluate.block_selectors import measure_selection_quality
from nsa_lab.evaluate.heldout import iterate_inner_windows, read_text
from nsa_lab.evaluate.loss_by_position import split_into_ranges
from nsa_lab.inference import load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.evaluation import CONVERSION, VERSION, write_evaluation
from nsa_lab.runs.model_files import find_checkpoint, make_evaluation_folder

VALIDATION = "validation"
# Windows whose attention mass is measured: it takes as long as several forward passes of dense attention.
MAX_MASS_WINDOWS = 4

Attention = Literal["dense", "selected", "mean_key", "nearest", "oracle", "window", "control"]
Log = Callable[[str], object]


@dataclass(frozen=True)
class AttentionLoss:
    """Losses in nats per token with one attention. `blocks`: number of blocks per query; None: all tokens.

    `windows`: the loss of each window in each position range.
    """

    attention: Attention
    blocks: int | None
    windows: list[list[float]]


@dataclass(frozen=True)
class AttentionMass:
    """Dense attention mass in `blocks` blocks as a fraction of the oracle's, by layer, mean over `windows` windows.

    `fractions`: as `measure_selection_quality` returns them, for `chosen` (selected), `nearest` and `random` blocks. Empty
    if all blocks are selected.
    """

    blocks: int
    windows: int
    fractions: dict[str, list[float]]


@dataclass(frozen=True)
class ConversionResult:
    """Losses and attention mass on the windows of one text. `identity`: digest of their tokens."""

    identity: str
    length: int
    ranges: list[tuple[int, int]]
    losses: list[AttentionLoss]
    mass: list[AttentionMass]

    def average(self, attention: Attention, blocks: int | None = None) -> list[float]:
        """Return the mean loss over windows in each position range. Raises KeyError for a row that was not measured."""
        return np.mean(self._find_row(attention, blocks).windows, axis=0).tolist()

    def compare(
        self, attention: Attention, blocks: int | None, reference: Literal["dense", "control"] = "dense"
    ) -> list[tuple[float, float]]:
        """Return the loss minus that of `reference`, paired by window: mean and half of the 95% interval of each range.

        The half interval is NaN for one window. Raises KeyError for a row that was not measured.
        """
        rows = self._find_row(attention, blocks), self._find_row(reference, None)
        difference = np.array(rows[0].windows) - np.array(rows[1].windows)
        n = len(difference)
        error = difference.std(axis=0, ddof=1) / n**0.5 if n > 1 else np.full(difference.shape[1], np.nan)
        return list(zip(difference.mean(axis=0).tolist(), (1.96 * error).tolist(), strict=True))

    def _find_row(self, attention: Attention, blocks: int | None) -> AttentionLoss:
        for row in self.losses:
            if row.attention == attention and (blocks is None or row.blocks == blocks):
                return row
        raise KeyError(f"{attention} with {blocks} blocks: not measured")


def share_weights(model: NSATransformer, n_sel: int, scores: Literal["mean_key"] | None = None) -> NSATransformer:
    """Return a model with the weights of `model` (not a copy) that selects `n_sel` blocks, by its scores or by mean keys.

    Raises ConfigError for fewer blocks than are always selected.
    """
    c, weights = model.config, model.state_dict()
    nsa: dict[str, Any] = c.nsa.model_dump() | {"n_sel": n_sel}
    changes: dict[str, Any] = {}
    if scores == "mean_key":
        nsa, changes = nsa | {"scores": scores}, {"indexer_block": 0, "selection_loss": 0.0}
        weights = {name: value for name, value in weights.items() if ".indexer." not in name}
    config = ModelConfig(**{**c.model_dump(), **changes, "nsa": NSAConfig(**nsa)})
    with torch.device("meta"):
        shared = NSATransformer(config, device=model.head.weight.device, dtype=model.head.weight.dtype)
    shared.load_state_dict(weights, assign=True)
    return shared.eval()


@torch.no_grad()
def measure_conversion(
    model: NSATransformer,
    windows: Sequence[Tensor],
    blocks: Sequence[int],
    *,
    mass_windows: int = MAX_MASS_WINDOWS,
    control: NSATransformer | None = None,
) -> ConversionResult:
    """Measure a model with the selected branch only on windows int64 [T + 1] of equal length, with numbers of blocks.

    mass_windows: number of windows whose attention mass is measured, evenly spaced. control: a dense model.
    Raises ConfigError for a model with other branches or without an indexer, for a control that is not dense, and for
    fewer blocks than are always selected.
    """
    c, device = model.config, model.head.weight.device
    if c.branches != ("sel",) or not c.has_indexer:
        raise ConfigError(
            f"model.branches = {list(c.branches)}, model.indexer_block = {c.indexer_block}: expected the selected branch "
            "and an indexer; evaluate a converted model"
        )
    if control is not None and control.config.attention != "dense":
        raise ConfigError(
            "control: expected a run with model.attention: dense, got a sparse one; give a dense run with the same training"
        )
    length = len(windows[0]) - 1
    ranges, rows = split_into_ranges(length), list(_make_rows(model, blocks))
    if control is not None:
        rows.append(("control", None, control))
    losses: list[list[list[float]]] = [[] for _ in rows]
    for window in windows:
        tokens, targets = window[None, :-1].to(device), window[1:].to(device)
        for row, (_, _, forward) in zip(losses, rows, strict=True):
            loss = functional.cross_entropy(forward(tokens)[0].float(), targets, reduction="none").double()
            row.append([loss[first:last].mean().item() for first, last in ranges])
    n_mass = min(mass_windows, len(windows))
    sample = [windows[index * len(windows) // n_mass] for index in range(n_mass)]
    identity = hashlib.sha256(np.stack([window.numpy() for window in windows]).astype("<i8").tobytes()).hexdigest()[:16]
    return ConversionResult(
        identity,
        length,
        ranges,
        [AttentionLoss(name, n, values) for (name, n, _), values in zip(rows, losses, strict=True)],
        [_measure_mass(share_weights(model, n), [w[None, :-1].to(device) for w in sample]) for n in blocks],
    )


@dataclass(frozen=True)
class ConversionProgress:
    """Comparison during training. `loss`: nats per token with dense attention, selected blocks and nearest blocks.

    `attention_mass`, `attention_mass_nearest`: dense attention mass in these blocks, as a fraction of the oracle's, by
    layer.
    """

    length: int
    windows: int
    loss: dict[str, float]
    attention_mass: list[float]
    attention_mass_nearest: list[float]


@torch.no_grad()
def measure_progress(model: NSATransformer, windows: Sequence[Tensor]) -> ConversionProgress | str:
    """Compare the model's selection with dense attention and the nearest blocks on windows int64 [T + 1] of equal length.

    Under autocast as well. Returns a string with the reason if all blocks are selected at this length.
    """
    device, length, nsa = model.head.weight.device, len(windows[0]) - 1, model.config.nsa
    if length <= nsa.n_sel * nsa.l_sel:
        return f"{length} tokens are at most nsa.n_sel * nsa.l_sel = {nsa.n_sel * nsa.l_sel}: all blocks are selected"
    losses: dict[str, list[float]] = {"dense": [], "selected": [], "nearest": []}
    qualities: list[dict[str, list[float]]] = []
    for window in windows:
        tokens, targets = window[None, :-1].to(device), window[1:].to(device)
        for row, ablation in zip(losses.values(), ("all", "chosen", "nearest"), strict=True):
            logits = forward_with_ablation(model, tokens, ABLATIONS[ablation])[0].float()
            row.append(functional.cross_entropy(logits, targets).item())
        quality = measure_selection_quality(model, tokens)
        assert quality is not None, "shorter windows return above"
        qualities.append(quality)
    means = {name: float(np.mean(row)) for name, row in losses.items()}
    chosen, nearest = (np.mean([q[name] for q in qualities], axis=0).tolist() for name in ("chosen", "nearest"))
    return ConversionProgress(length, len(windows), means, chosen, nearest)


def _make_rows(
    model: NSATransformer, blocks: Sequence[int]
) -> Iterator[tuple[Attention, int | None, Callable[[Tensor], Tensor]]]:
    """Yield name, number of blocks and forward pass of each row."""
    n_forced = model.config.nsa.n_forced
    yield "dense", None, lambda tokens: forward_with_ablation(model, tokens, ABLATIONS["all"])
    yield "window", n_forced, share_weights(model, n_forced)
    for n in blocks:
        sparse = share_weights(model, n)
        yield "selected", n, sparse
        yield "mean_key", n, share_weights(model, n, "mean_key")
        for name in ("nearest", "oracle"):
            ablation = ABLATIONS[name]
            yield name, n, lambda tokens, s=sparse, a=ablation: forward_with_ablation(s, tokens, a)


def _measure_mass(model: NSATransformer, windows: Sequence[Tensor]) -> AttentionMass:
    found = [quality for tokens in windows if (quality := measure_selection_quality(model, tokens)) is not None]
    names = found[0] if found else ()
    fractions = {name: np.mean([quality[name] for quality in found], axis=0).tolist() for name in names}
    return AttentionMass(model.config.nsa.n_sel, len(found), fractions)


def evaluate_conversion(
    run_dir: str | Path,
    *,
    out: str | Path | None = None,
    step: int | None = None,
    blocks: Sequence[int] = (),
    texts: Mapping[str, str] = MappingProxyType({}),
    windows: int = 16,
    control: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    prepare_data: Callable[..., Dataset] = prepare,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a conversion run, write conversion.json and return its contents.

    The windows have the run's longest length: of its validation text, as training reads it, and of `texts` inside single
    documents, at most `windows` of each, evenly spaced.

    out, step, dtype, prepare_data, log: as in `evaluate_run`. blocks: numbers of blocks; default: the run's `nsa.n_sel`.
    texts: paths by name. control: a dense run with the same tokenizer, whose newest checkpoint is a further row. Raises the
    errors of `load_model` and `measure_conversion`, ConfigError for a control with another tokenizer, and DataError for a
    text without a document of that length.
    """
    folder = directory.check_run_dir(run_dir)
    config, checkpoint = RunConfig.from_yaml(folder / directory.CONFIG), find_checkpoint(folder, step)
    output_folder = make_evaluation_folder(folder, out, CONVERSION)
    target_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    start, length = time.monotonic(), config.train.longest_stage.seq_len
    model = load_model(checkpoint, device=target_device, dtype=dtype)
    control_facts, control_model = {}, None
    if control is not None:
        control_checkpoint = find_checkpoint(_check_control(control, config))
        control_model = load_model(control_checkpoint, device=target_device, dtype=dtype)
        control_facts = {"control": {"run": Path(control).name, "step": parse_step(control_checkpoint)}}
    dataset = prepare_data(config.data, config.model.vocab_size, length)
    windows_by_text = {VALIDATION: read_windows(dataset.validation, length, windows)}
    windows_by_text |= {name: _read_document_windows(path, config, length, windows) for name, path in texts.items()}
    results: dict[str, Any] = {}
    for name, text_windows in windows_by_text.items():
        log(f"evaluating {name}: {len(text_windows)} windows of {length:,} tokens")  # may take minutes
        result = measure_conversion(model, text_windows, blocks or [config.model.nsa.n_sel], control=control_model)
        results[name] = asdict(result)
        for line in format_result(result):
            log(f"{name}: {line}")
    record = {
        "v": VERSION,
        "run": folder.name,
        "step": parse_step(checkpoint),
        **control_facts,
        "config_hash": config.hash(),
        "data_identity": dataset.identity,
        "code": get_code_identity(),
        "versions": get_versions(),
        "device": torch.cuda.get_device_name(target_device) if target_device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "texts": results,
        "seconds": round(time.monotonic() - start, 3),
    }
    return write_evaluation(output_folder, record, CONVERSION)


def format_result(result: ConversionResult) -> list[str]:
    """Return one line per row and per number of blocks: losses in the last position range, and attention mass."""
    first, last = result.ranges[-1]
    dense = result.average("dense")[-1]
    lines = [f"dense: {dense:.4f} nats per token at positions {first:,} to {last - 1:,}"]
    has_control = any(row.attention == "control" for row in result.losses)
    for row in result.losses[1:]:
        name = row.attention if row.blocks is None else f"{row.attention}, {row.blocks} blocks"
        difference = _format_difference(*result.compare(row.attention, row.blocks)[-1])
        if has_control and row.attention == "selected":
            to_control = _format_difference(*result.compare("selected", row.blocks, "control")[-1])
            difference = f"{difference}; from control: {to_control}"
        lines.append(f"{name}: {difference}")
    for mass in result.mass:
        if mass.fractions:
            share = np.mean(mass.fractions["chosen"])
            lines.append(f"attention mass in {mass.blocks} selected blocks: {share:.3f} of the oracle's, mean over layers")
    return lines


def _format_difference(mean: float, half_interval: float) -> str:
    return f"{mean:+.4f}" if np.isnan(half_interval) else f"{mean:+.4f} ± {half_interval:.4f}"


def _check_control(control: str | Path, config: RunConfig) -> Path:
    """Return the folder of a control. Raises ConfigError unless it is a run with the tokenizer of `config`."""
    folder = directory.check_run_dir(control)
    own, other = (c.data.tokenizer for c in (config, RunConfig.from_yaml(folder / directory.CONFIG)))
    if load_tokenizer(own).identity != load_tokenizer(other).identity:
        raise ConfigError(f"control = {control}: expected the tokenizer {own}, got {other}; give a run with the same one")
    return folder


def read_windows(text: TokenStore, length: int, count: int) -> list[Tensor]:
    """Return at most `count` windows int64 [length + 1], evenly spaced over `text`, across documents."""
    batches = EvalBatches(text, length, count, 1)
    return [torch.cat([inputs[0], targets[0, -1:]]) for inputs, targets in batches]


def _read_document_windows(path: str, config: RunConfig, length: int, count: int) -> list[Tensor]:
    tokenizer = load_tokenizer(config.data.tokenizer)
    text = read_text(path, tokenizer)
    found = [window for _, window in iterate_inner_windows(text, tokenizer.separator, length)]
    if not found:
        raise DataError(f"{path}: expected a document of at least {length:,} tokens, got none; give longer documents")
    return [found[index * len(found) // min(count, len(found))] for index in range(min(count, len(found)))]
