"""Evaluation of a run: all measurements of `nsa_lab.evaluate` on one checkpoint, in one file.

Invariants
* `evaluation.json` is replaced atomically and records its origin: checkpoint, data, seeds, counts, code, device, dtype.
* Each part is saved when it is complete, so an interrupted evaluation continues with the next part.
* A part that cannot be evaluated is recorded with the reason.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from nsa_lab.config import ConfigError, ModelConfig, RecallConfig, RunConfig
from nsa_lab.config.run_config import DEFAULTS_OF_ADDED_KEYS
from nsa_lab.data import Dataset, TokenStore, prepare
from nsa_lab.evaluate.ablations import list_ablations, run_ablations
from nsa_lab.evaluate.block_selectors import measure_selection_quality
from nsa_lab.evaluate.document_loss import measure_document_loss
from nsa_lab.evaluate.heldout import compute_text_digest, measure_text_loss, read_text
from nsa_lab.evaluate.loss_by_position import measure_loss_by_position
from nsa_lab.evaluate.retrieval import (
    ALL_TASKS,
    DEPTHS,
    TASKS,
    RetrievalCell,
    evaluate_retrieval,
    explain_misfit,
    make_needles,
    spread_depths,
)
from nsa_lab.evaluate.scoring import stack_samples
from nsa_lab.inference import load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.evaluation import VERSION, PartialEvaluation, write_evaluation
from nsa_lab.runs.model_files import check_byte_model, check_evaluable
from nsa_lab.runs.summary import format_duration

Log = Callable[[str], object]
SPEED_TOKENS = 2048


@dataclass(frozen=True)
class _RetrievalSettings:
    """Model, held-out text (int64 bytes) and sample counts of the retrieval tasks."""

    model: NSATransformer
    text: np.ndarray
    recall: RecallConfig
    depths: tuple[float, ...]
    per_depth: int
    per_depth_at: Mapping[int, int]
    generated_per_depth: int
    seed: int

    def run_task(self, task: str, length: int) -> list[RetrievalCell]:
        """Evaluate one task at one length; one cell per depth."""
        return list(
            evaluate_retrieval(
                self.model,
                self.text,
                [length],
                tasks=[task],
                depths=self.depths,
                per_depth=self.per_depth_at.get(length, self.per_depth),
                generated_per_depth=self.generated_per_depth,
                recall=self.recall,
                seed=self.seed,
            )
        )


def evaluate_run(
    run_dir: str | Path,
    *,
    out: str | Path | None = None,
    step: int | None = None,
    lengths: Sequence[int] = (),
    tasks: Sequence[str] = tuple(TASKS),
    texts: Mapping[str, str] = MappingProxyType({}),
    depths: Sequence[float] = DEPTHS,
    per_depth: int = 20,
    per_depth_at: Mapping[int, int] = MappingProxyType({}),
    generated_per_depth: int = 1,
    windows: int = 16,
    ablation_sequences: int = 10,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    prepare_data: Callable[..., Dataset] = prepare,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run on the run's held-out text, write evaluation.json and return its contents.

    out: folder of evaluation.json; default: the run directory. Required for a bundled model, whose evaluation is fixed.
    step: checkpoint; default: the newest.
    lengths: of the retrieval sequences; default: the lengths of the run's stages, and twice the longest.
    tasks: names in `TASKS` and `NEEDLE_FORMS`.
    texts: paths by name, for `measure_text_loss` at the run's longest length.
        An interrupted evaluation can be continued with other lengths, tasks and texts; all other arguments must be equal.
    depths, per_depth, generated_per_depth: as in `evaluate_retrieval`. per_depth_at: replaces per_depth at these lengths.
    windows: of `measure_loss_by_position`, and rows of `measure_document_loss`, at the run's longest length.
    ablation_sequences: number of sequences per length for the ablations; 0 skips them.
    dtype: of weights and attention; float32 is best for ablations.
    prepare_data: creates the data set, as `nsa_lab.data.prepare`.
    log: called with an estimate of the duration, then with a line for each completed part.

    Raises `NoCheckpoint`; `DataError` for missing text; `ConfigError` for a model that is not a byte model, for an unknown
    task, and for a bundled model without `out`.
    """
    folder = directory.check_run_dir(run_dir)
    if unknown := [task for task in tasks if task not in ALL_TASKS]:
        raise ConfigError(f"task = {unknown[0]}: unknown task; available: {', '.join(ALL_TASKS)}")
    check_byte_model(folder)
    config, checkpoint, output_folder = check_evaluable(folder, out, step)
    text_by_name = {name: read_text(path) for name, path in texts.items()}
    target_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    start, model = time.monotonic(), load_model(checkpoint, device=target_device, dtype=dtype)
    dataset = prepare_data(config.data, config.model.vocab_size, config.train.longest_stage.seq_len)
    text = dataset.validation.read(0, len(dataset.validation))
    requested_lengths = sorted(set(lengths or _get_default_lengths(config)))
    settings = _RetrievalSettings(
        model, text, config.data, tuple(depths), per_depth, per_depth_at, generated_per_depth, seed
    )
    identity = {
        "v": VERSION,
        "run": folder.name,
        "step": parse_step(checkpoint),
        "seed": seed,
        "config_hash": config.hash(),
        "data_identity": dataset.identity,
        "text_tokens": len(text),
        "recall": _describe_facts(config),
        "code": get_code_identity(),
        "versions": get_versions(),
        "device": torch.cuda.get_device_name(target_device) if target_device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "attention": config.model.attention,
    }
    counts = [list(depths), per_depth, dict(per_depth_at), generated_per_depth, windows, ablation_sequences]
    parts = PartialEvaluation(output_folder, json.loads(json.dumps([identity, counts])))
    if parts.resumed_names:
        log(f"continuing an interrupted evaluation; already complete: {', '.join(sorted(parts.resumed_names))}")
    n_tokens = _count_tokens(settings, config, tasks, requested_lengths, text_by_name.values(), windows, ablation_sequences)
    log(_estimate_duration(model, n_tokens))
    results = {
        **identity,
        **_run_retrieval(settings, tasks, requested_lengths, parts, log),
        "positions": parts.get_or_compute("positions", lambda: _run_loss_by_position(model, dataset, config, windows, log)),
        "documents": parts.get_or_compute("documents", lambda: _run_document_loss(model, dataset, config, windows, log)),
        "texts": {
            name: parts.get_or_compute(
                f"text {name}, {compute_text_digest(text)}", lambda n=name, t=text: _run_text_loss(model, n, t, config, log)
            )
            for name, text in text_by_name.items()
        },
        "selection": [
            parts.get_or_compute(f"selection at {n:,}", lambda n=n: _run_ablations(settings, n, ablation_sequences, log))
            for n in ([] if config.model.attention == "dense" else requested_lengths)
        ],
        "seconds": round(time.monotonic() - start, 3),
    }
    results = write_evaluation(output_folder, results)
    parts.delete()
    return results


def _describe_facts(config: RunConfig) -> dict[str, Any]:
    """Return the settings of facts, without added keys at their defaults, so that older evaluations have equal settings."""
    added, values = DEFAULTS_OF_ADDED_KEYS["data"], {key: getattr(config.data, key) for key in RecallConfig.model_fields}
    return {key: value for key, value in values.items() if key not in added or value != added[key]}


def _count_tokens(
    settings: _RetrievalSettings,
    config: RunConfig,
    tasks: Sequence[str],
    lengths: Sequence[int],
    texts: Iterable[TokenStore],
    windows: int,
    ablation_sequences: int,
) -> int:
    """Return the number of tokens that all parts of an evaluation pass through the model, without those it generates."""
    longest = config.train.longest_stage.seq_len
    n_sequences = {n: len(settings.depths) * settings.per_depth_at.get(n, settings.per_depth) for n in lengths}
    retrieval = sum(
        n_sequences[length] * length
        for task, length in itertools.product(tasks, lengths)
        if not explain_misfit(task, length, settings.recall, settings.text)
    )
    ablated = [n for n in lengths if config.model.attention != "dense" and not _explain_no_ablation(config.model, n)]
    return (
        retrieval
        + 3 * windows * longest  # by position once; whole documents separately and packed
        + 2 * sum(map(len, texts))
        + (len(list_ablations(config.model)) + 1) * ablation_sequences * sum(ablated)
    )


@torch.no_grad()
def _estimate_duration(model: NSATransformer, n_tokens: int) -> str:
    """Return an estimate from the speed of one short forward pass. Long sequences of dense attention are slower."""
    tokens = torch.zeros(1, SPEED_TOKENS, dtype=torch.int64, device=model.head.weight.device)
    model(tokens)[0, 0, 0].item()  # warm-up
    start = time.perf_counter()
    model(tokens)[0, 0, 0].item()
    speed = SPEED_TOKENS / (time.perf_counter() - start)
    return (
        f"estimated duration: {format_duration(n_tokens / speed)} "
        f"({n_tokens:,} tokens at {speed:,.0f} tokens/s, measured on {SPEED_TOKENS:,} tokens)"
    )


def _get_default_lengths(config: RunConfig) -> list[int]:
    return [*(stage.seq_len for stage in config.train.plan), 2 * config.train.longest_stage.seq_len]


def _run_retrieval(
    settings: _RetrievalSettings, tasks: Sequence[str], lengths: Sequence[int], parts: PartialEvaluation, log: Log
) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for task, length in itertools.product(tasks, lengths):
        reason = explain_misfit(task, length, settings.recall, settings.text)
        if reason:
            skipped.append({"task": task, "length": length, "why": reason})
            log(f"{task} at {length:,}: skipped: {reason}")
            continue
        cells += parts.get_or_compute(
            f"{task} at {length:,}", lambda task=task, length=length: _run_task(settings, task, length, log)
        )
    return {**_index_wordings(cells), "not_asked": skipped}


def _index_wordings(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lists `statements` and `questions`, and `retrieval`: the cells with indices into these in `wordings`.

    `wordings` has for each answer the statement, the question, and 1 if all its tokens are correct, otherwise 0.
    """
    statements, questions = (sorted({answer[part] for cell in cells for answer in cell["wordings"]}) for part in (0, 1))
    places = [{template: place for place, template in enumerate(templates)} for templates in (statements, questions)]
    indexed = [
        {**cell, "wordings": [[places[0][s], places[1][q], int(right)] for s, q, right in cell["wordings"]]}
        for cell in cells
    ]
    return {"statements": statements, "questions": questions, "retrieval": indexed}


def _run_task(settings: _RetrievalSettings, task: str, length: int, log: Log) -> list[dict[str, Any]]:
    cells = settings.run_task(task, length)
    n_correct, n_answers = sum(cell.right for cell in cells), sum(cell.answers for cell in cells)
    log(f"{task} at {length:,}: {n_correct} of {n_answers} answers correct")
    return [asdict(cell) for cell in cells]


def _run_loss_by_position(
    model: NSATransformer, dataset: Dataset, config: RunConfig, windows: int, log: Log
) -> dict[str, Any]:
    length = config.train.longest_stage.seq_len
    ranges = measure_loss_by_position(model, dataset.validation, length, windows)
    log(f"loss in the last position range of {length:,}: {ranges[-1].loss:.4f} nats per token")
    n_windows = ranges[-1].tokens // (ranges[-1].last - ranges[-1].first)
    return {"length": length, "windows": n_windows, "octaves": [asdict(position_range) for position_range in ranges]}


def _run_document_loss(model: NSATransformer, dataset: Dataset, config: RunConfig, rows: int, log: Log) -> dict[str, Any]:
    length = config.train.longest_stage.seq_len
    result = measure_document_loss(model, dataset.validation, dataset.tokenizer.separator, length, rows)
    log(f"whole documents: {result.alone:.4f} nats per token separately, {result.across:.4f} packed after others")
    return asdict(result)


def _run_text_loss(model: NSATransformer, name: str, text: TokenStore, config: RunConfig, log: Log) -> dict[str, Any]:
    log(f"evaluating {name}: {len(text):,} bytes, including separators")  # may take minutes
    result = measure_text_loss(model, text, config.train.longest_stage.seq_len)
    log(f"{name}: {result.loss:.4f} nats per token over {result.documents:,} documents, each scored separately")
    return asdict(result)


def _run_ablations(settings: _RetrievalSettings, length: int, count: int, log: Log) -> dict[str, Any]:
    """Run the ablations and measure the selection quality on `count` needles of one length."""
    config = settings.model.config
    reason = _explain_no_ablation(config, length) or explain_misfit("needle", length, settings.recall, settings.text)
    if not count:
        reason = "not requested"
    if reason:
        return {"length": length, "sequences": 0, "why_not": reason, "interventions": [], "quality": None}
    samples = make_needles(length, count, settings.recall, settings.seed, settings.text)
    tokens, answer_positions = stack_samples(samples, settings.model.head.weight.device)
    results = run_ablations(settings.model, tokens, answer_positions, seed=settings.seed)
    for result in results:
        log(f"{result.name} at {length:,}: {result.accuracy:.0%} of the answers correct, text {result.d_loss:+.4f} nats")
    return {
        "length": length,
        "sequences": count,
        "depths": spread_depths(count),
        "why_not": None,
        "interventions": [asdict(result) for result in results],
        "quality": measure_selection_quality(settings.model, tokens[:1], settings.seed)
        if "sel" in config.branches
        else None,
    }


def _explain_no_ablation(model: ModelConfig, length: int) -> str | None:
    """Return why ablations of an NSA model have no effect at this length, or None."""
    n_selected = model.nsa.n_sel * model.nsa.l_sel
    if "sel" in model.branches and length <= n_selected:
        return f"not evaluated: {length} tokens <= nsa.n_sel * nsa.l_sel = {n_selected}, so all are selected"
    return None
