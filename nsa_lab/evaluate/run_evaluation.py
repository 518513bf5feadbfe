"""The evaluation of a run: everything that `nsa_lab.evaluate` measures, of one checkpoint, in one file.

Invariants
* `evaluation.json` is replaced whole or not at all, and says what it was made from: checkpoint, data, seeds, counts, code,
  device, dtype.
* Each part is kept as soon as it is found, so that an evaluation that was broken off goes on with the next.
* What could not be asked stands there with its reason; nothing is left out in silence.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from nsa_lab.config import BYTE_VOCAB_SIZE, ConfigError, RecallConfig, RunConfig
from nsa_lab.data import Dataset, TokenStore, prepare
from nsa_lab.evaluate.ablations import run_ablations
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
from nsa_lab.inference import find_checkpoint, load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.evaluation import VERSION, PartialEvaluation, write_evaluation

Log = Callable[[str], object]


@dataclass(frozen=True)
class _RetrievalSettings:
    """What a model is asked about: held-out text, int64 bytes, and how often."""

    model: NSATransformer
    text: np.ndarray
    recall: RecallConfig
    depths: tuple[float, ...]
    per_depth: int
    per_depth_at: Mapping[int, int]
    generated_per_depth: int
    seed: int

    def run_task(self, task: str, length: int) -> list[RetrievalCell]:
        """One task at one length, a cell for each depth."""
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
    """Evaluate a run's checkpoint (of `step`; default: the newest) on its own held-out text; also written into a file.

    out: the folder of that file; by default the run. A model that ships with the package stays as it is, and needs one.
    lengths: of the sequences with facts; by default those of the run's stages, and twice the longest.
    tasks: of `TASKS` and `FORMS`. texts: by name, where documents lie that `text_loss` is asked of, at the longest of the
        run's lengths. Lengths, tasks and texts may differ from those of an evaluation that was broken off and is gone on
        with; nothing else may.
    depths, per_depth, written_per_depth: as `retrieval` has them; per_depth_at: in place of per_depth, at these lengths.
    windows: of `loss_by_position`, and rows of `document_loss`, at the longest of the run's lengths.
    intervened: sequences that the interventions are measured on, at each length; 0: on none.
    dtype: of weights and attention; what is shown of interventions is best in float32.
    builder: makes the data set, as `nsa_lab.data.prepare` does. say: gets a line as each part is done.

    Raises `NoCheckpoint`, `DataError` for missing text, `ConfigError` for a model whose tokens are not bytes, for a task
    that there is not, and for a model that ships without `out`.
    """
    folder = directory.check_run_dir(run_dir)
    config = RunConfig.from_yaml(folder / directory.CONFIG)
    if config.data.tokenizer != "byte" or config.model.vocab_size < BYTE_VOCAB_SIZE:
        raise ConfigError(
            f"{folder.name}: retrieval asks for bytes, and data.tokenizer = {config.data.tokenizer}; "
            "evaluate a run with data.tokenizer: byte"
        )
    if unknown := [task for task in tasks if task not in ALL_TASKS]:
        raise ConfigError(f"task = {unknown[0]}: there is no such task; there is {', '.join(ALL_TASKS)}")
    kept_in = _make_output_folder(folder, out)
    read = {name: read_text(path) for name, path in texts.items()}
    checkpoint = find_checkpoint(folder, step)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    begun, model = time.monotonic(), load_model(checkpoint, device=where, dtype=dtype)
    dataset = prepare_data(config.data, config.model.vocab_size, config.train.longest_stage.seq_len)
    text = dataset.validation.read(0, len(dataset.validation))
    asked = sorted(set(lengths or _get_default_lengths(config)))
    ask = _RetrievalSettings(model, text, config.data, tuple(depths), per_depth, per_depth_at, generated_per_depth, seed)
    asking = {
        "v": VERSION,
        "run": folder.name,
        "step": parse_step(checkpoint),
        "seed": seed,
        "config_hash": config.hash(),
        "data_identity": dataset.identity,
        "text_tokens": len(text),
        "recall": {key: getattr(config.data, key) for key in RecallConfig.model_fields},
        "code": get_code_identity(),
        "versions": get_versions(),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "attention": config.model.attention,
    }
    counts = [list(depths), per_depth, dict(per_depth_at), generated_per_depth, windows, ablation_sequences]
    parts = PartialEvaluation(kept_in, json.loads(json.dumps([asking, counts])))
    if parts.resumed_names:
        log(f"known from an evaluation that was broken off: {', '.join(sorted(parts.resumed_names))}")
    found = {
        **asking,
        **_run_retrieval(ask, tasks, asked, parts, log),
        "positions": parts.get_or_compute("positions", lambda: _run_loss_by_position(model, dataset, config, windows, log)),
        "documents": parts.get_or_compute("documents", lambda: _run_document_loss(model, dataset, config, windows, log)),
        "texts": {
            name: parts.get_or_compute(
                f"text {name}, {compute_text_digest(text)}", lambda n=name, t=text: _run_text_loss(model, n, t, config, log)
            )
            for name, text in read.items()
        },
        "selection": [
            parts.get_or_compute(f"selection at {n:,}", lambda n=n: _run_ablations(ask, n, ablation_sequences, log))
            for n in ([] if config.model.attention == "dense" else asked)
        ],
        "seconds": round(time.monotonic() - begun, 3),
    }
    write_evaluation(kept_in, found)
    parts.delete()
    return found


def _make_output_folder(run_dir: Path, out: str | Path | None) -> Path:
    """The folder of the evaluation's file."""
    if out is None and resolve.is_packaged_model(run_dir):
        raise ConfigError(
            f"{run_dir.name} ships with nsa-lab, and its own evaluation stays as it is; say where this one goes, for "
            f"example --out {resolve.get_outputs_dir() / run_dir.name}"
        )
    folder = Path(out or run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: it cannot hold an evaluation ({error.strerror}); name a folder") from None
    return folder


def _get_default_lengths(config: RunConfig) -> list[int]:
    return [*(stage.seq_len for stage in config.train.plan), 2 * config.train.longest_stage.seq_len]


def _run_retrieval(
    settings: _RetrievalSettings, tasks: Sequence[str], lengths: Sequence[int], parts: PartialEvaluation, log: Log
) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    not_asked: list[dict[str, Any]] = []
    for task, length in itertools.product(tasks, lengths):
        why = explain_misfit(task, length, settings.recall, settings.text)
        if why:
            not_asked.append({"task": task, "length": length, "why": why})
            log(f"{task} at {length:,}: not asked: {why}")
            continue
        cells += parts.get_or_compute(
            f"{task} at {length:,}", lambda task=task, length=length: _run_task(settings, task, length, log)
        )
    return {"retrieval": cells, "not_asked": not_asked}


def _run_task(settings: _RetrievalSettings, task: str, length: int, log: Log) -> list[dict[str, Any]]:
    row = settings.run_task(task, length)
    right, answers = sum(cell.right for cell in row), sum(cell.answers for cell in row)
    log(f"{task} at {length:,}: {right} of {answers} answers right")
    return [asdict(cell) for cell in row]


def _run_loss_by_position(
    model: NSATransformer, dataset: Dataset, config: RunConfig, windows: int, log: Log
) -> dict[str, Any]:
    length = config.train.longest_stage.seq_len
    octaves = measure_loss_by_position(model, dataset.validation, length, windows)
    log(f"loss at the last positions of {length:,}: {octaves[-1].loss:.4f} nats per token")
    found = octaves[-1].tokens // (octaves[-1].last - octaves[-1].first)
    return {"length": length, "windows": found, "octaves": [asdict(octave) for octave in octaves]}


def _run_document_loss(model: NSATransformer, dataset: Dataset, config: RunConfig, rows: int, log: Log) -> dict[str, Any]:
    length = config.train.longest_stage.seq_len
    found = measure_document_loss(model, dataset.validation, dataset.tokenizer.separator, length, rows)
    log(f"whole documents: {found.alone:.4f} nats per token alone, {found.across:.4f} behind others")
    return asdict(found)


def _run_text_loss(model: NSATransformer, name: str, text: TokenStore, config: RunConfig, log: Log) -> dict[str, Any]:
    log(f"reading {name}: {len(text):,} bytes, separators included")  # may take minutes
    found = measure_text_loss(model, text, config.train.longest_stage.seq_len)
    log(f"{name}: {found.loss:.4f} nats per token of {found.documents:,} documents, each by itself")
    return asdict(found)


def _run_ablations(settings: _RetrievalSettings, length: int, count: int, log: Log) -> dict[str, Any]:
    """Interventions, and the quality of the choice, on `count` needles of one length."""
    nsa = settings.model.config.nsa
    why = explain_misfit("needle", length, settings.recall, settings.text)
    if length <= nsa.n_sel * nsa.l_sel:
        why = f"not judged: {length} tokens are at most nsa.n_sel * nsa.l_sel = {nsa.n_sel * nsa.l_sel}, so all are read"
    if not count:
        why = "not asked"
    if why:
        return {"length": length, "sequences": 0, "why_not": why, "interventions": [], "quality": None}
    asked = make_needles(length, count, settings.recall, settings.seed, settings.text)
    tokens, places = stack_samples(asked, settings.model.head.weight.device)
    effects = run_ablations(settings.model, tokens, places, seed=settings.seed)
    for effect in effects:
        log(f"{effect.name} at {length:,}: {effect.accuracy:.0%} of the answers right, text {effect.d_loss:+.4f} nats")
    return {
        "length": length,
        "sequences": count,
        "depths": spread_depths(count),
        "why_not": None,
        "interventions": [asdict(effect) for effect in effects],
        "quality": measure_selection_quality(settings.model, tokens[:1], settings.seed),
    }
