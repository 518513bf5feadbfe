"""Samples of a model before and after training, held-out text to compare with, and the blocks selected in a real text."""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.config import RunConfig
from nsa_lab.data import BuildProgress, DataError, load_tokenizer, prepare
from nsa_lab.figures import plot_selection_by_layer
from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.inference import Decoder, NoCheckpoint, Sampling, complete_prompt, continue_text, find_checkpoint, load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs.history import History
from nsa_lab.workbook.examples import read_standard_library

TEMPERATURE = 0.8
MAX_PLOTTED_LAYERS = 4
N_DECODED_TOKENS = 32  # tokens that the decoding check decodes one by one
# Columns are next to each other if there is room, otherwise one below the other.
COLUMN_STYLE = "display: inline-block; vertical-align: top; width: 31%; min-width: 17em; margin-right: 1.5%"
TEXT_STYLE = "white-space: pre-wrap; overflow-wrap: anywhere; font-size: 85%; line-height: 1.35; margin-top: 0.3em"


class TextColumns:
    """Texts under their headings, in columns. In a terminal, one below the other."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def _repr_html_(self) -> str:
        return "".join(
            f'<div style="{COLUMN_STYLE}"><b>{html.escape(name)}</b>'
            f'<pre style="{TEXT_STYLE}">{html.escape(text)}</pre></div>'
            for name, text in self._texts.items()
        )

    def __repr__(self) -> str:
        return "\n\n".join(f"{name}\n{'-' * len(name)}\n{text}" for name, text in self._texts.items())


def build_untrained_model(config: RunConfig) -> NSATransformer:
    """Return the model with its initial weights, on the CPU."""
    return NSATransformer(config.model_at(0), seed=config.train.seed).eval()


def sample_model(config: RunConfig, model: NSATransformer, prompt: str, n_tokens: int) -> str:
    """Return the prompt and the continuation of a model that is not in a run directory."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return make_printable(prompt + "".join(continue_text(model, tokenizer, prompt, n_tokens, Sampling(TEMPERATURE))))


def sample_run(run: Path, prompt: str, n_tokens: int) -> str:
    """Return the prompt and the continuation of the run's newest checkpoint, or a line saying why there is none."""
    try:
        return make_printable(prompt + "".join(complete_prompt(run, prompt, n_tokens, Sampling(TEMPERATURE))))
    except NoCheckpoint as error:
        return f"no sample: {error}"


def check_decoding(run: Path, limits: Limits = LIMITS) -> Verdict:
    """Check that cached decoding equals the forward pass, in float64.

    The newest checkpoint decodes the last tokens of a text one by one, and the logits are compared with one forward pass
    over the whole text. The result is unknown if there is no checkpoint.
    """
    name, limit = "cached decoding is exact", limits.decode_error
    try:
        checkpoint = find_checkpoint(run)
        model = load_model(checkpoint, dtype=torch.float64)
    except NoCheckpoint as error:
        return Verdict(name, None, None, limit, str(error))
    tokens = _tokenize_library_text(RunConfig.from_yaml(Path(run) / "config.yaml"), None)
    n_prefilled = tokens.shape[1] - min(N_DECODED_TOKENS, tokens.shape[1] // 2)
    decoder = Decoder(model, capacity=tokens.shape[1])
    chunks = [tokens[:, :n_prefilled], *tokens[:, n_prefilled:].split(1, dim=1)]
    decoded = torch.cat([decoder.append(part) for part in chunks], dim=1)
    with torch.no_grad():
        full = model(tokens)
    error = ((decoded - full).abs().max() / full.abs().max()).item()
    return Verdict(
        name,
        error <= limit,
        error,
        limit,
        f"{checkpoint.name}: largest difference of the logits {error:.2g}, relative to the largest logit "
        f"({n_prefilled:,} tokens at once, {tokens.shape[1] - n_prefilled} one by one; limit {limit:g})",
    )


def make_printable(text: str) -> str:
    """Replace control characters by dots; an untrained model generates any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else "·" for c in text)


def plot_run_selection(run: Path, length: int | None = None, group: int = 0) -> Figure:
    """Plot the blocks that the run's newest checkpoint selects in several layers, on a standard-library text.

    `length` is in tokens and defaults to the training length. Raises `NoCheckpoint` if there is none.
    """
    config = RunConfig.from_yaml(Path(run) / "config.yaml")
    blocks = observe_blocks(run, length)
    layers = sorted({round(n * (len(blocks) - 1) / max(MAX_PLOTTED_LAYERS - 1, 1)) for n in range(MAX_PLOTTED_LAYERS)})
    return plot_selection_by_layer(
        {layer: blocks[layer][0, :, group] for layer in layers},
        config.nsa,
        f"{Path(run).name}, group {group}, on argparse.py",
    )


def observe_blocks(run: Path, length: int | None = None, step: int | None = None) -> list[Tensor]:
    """Return the selected blocks of each layer, int32 [1, T, G, n_sel], by the checkpoint of `step` (None: the newest).

    Raises ValueError for a model that selects no blocks.
    """
    return _observe_checkpoint(find_checkpoint(run, step), length)


@lru_cache(maxsize=8)
def _observe_checkpoint(checkpoint: Path, length: int | None) -> list[Tensor]:
    tokens = _tokenize_library_text(RunConfig.from_yaml(checkpoint.parents[1] / "config.yaml"), length)
    model = load_model(checkpoint)
    if "sel" not in model.config.branches:
        raise ValueError(f"model.branches = {list(model.config.branches)} has no selected branch: no blocks are selected")
    return [statistics["blocks"] for statistics in model.observe(tokens)]


def _tokenize_library_text(config: RunConfig, length: int | None) -> Tensor:
    """Return the start of a standard-library module as tokens, int64 [1, `length`]; default: the training length."""
    length = length or config.train.longest_stage.seq_len
    tokens = load_tokenizer(config.data.tokenizer).encode(read_standard_library(4 * length, "argparse.py"))[:length]
    return torch.as_tensor([list(map(int, tokens))])


def read_held_out_text(run: str | Path | History, n_tokens: int) -> str:
    """Return at most `n_tokens` characters from the middle of the run's validation text, starting at the start of a line.

    If the text is not in this machine's cache, return a line with this reason. Nothing is downloaded or built.
    """
    history = History.read(run)
    config = history.config
    start_event = next(iter(history.events_of_kind("start", "resume")), {})
    try:
        dataset = prepare(
            config.data, config.model.vocab_size, progress=_refuse_to_fill, identity=start_event.get("data_identity")
        )
    except DataError as error:
        return f"not shown: {error}"
    middle = len(dataset.validation) // 2
    tokens = dataset.validation.read(middle, min(2 * n_tokens, len(dataset.validation) - middle))
    partial_line, _, text = dataset.tokenizer.decode(tokens.tolist()).partition("\n")
    return make_printable(text or partial_line)[:n_tokens]


def _refuse_to_fill(_: BuildProgress) -> Any:
    raise DataError("the run's text is not in this machine's cache")
