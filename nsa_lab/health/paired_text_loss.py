"""Compare the text losses of two models, paired by window and by seed: bits per byte by position range.

Position ranges double in length. Invariant: only losses measured under equal conditions are compared, so that part i of one
run is part i of every other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsa_lab.health.model_runs import AddNote, ModelRuns
from nsa_lab.health.paired_difference import PairedDifference, compute_paired_difference

WHOLE_DOCUMENTS, HELDOUT_TEXT = "whole documents", "held-out text"
# The slope uses the ranges from this position on. Before it, attention has only a window and a few blocks.
SLOPE_START = 4096
SLOPE_LABEL = f"slope per doubling from {SLOPE_START:,} on"


@dataclass(frozen=True)
class RangeLoss:
    """Bits per byte of one run in a position range of a text.

    `parts`: float64 [n], per window; for whole documents per row. `weights`: [n], tokens of each part. None if an older
    evaluation did not record them.
    """

    mean: float
    parts: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class RunTextLoss:
    """Losses of one run on a text. `conditions`: by name, what two runs must share to be comparable."""

    conditions: dict[str, Any]
    ranges: dict[str, RangeLoss]

    @property
    def is_finite(self) -> bool:
        parts = [loss.parts for loss in self.ranges.values() if loss.parts is not None]
        return all(bool(np.isfinite(values).all()) for values in (*parts, [loss.mean for loss in self.ranges.values()]))


@dataclass(frozen=True)
class RangeDifference:
    """Bits per byte of a model and the baseline in a position range, means over seeds; their difference with 95% intervals.

    `over_windows`: interval over the `windows` windows, after averaging their differences over seeds. `over_seeds`:
    interval over the means of the seeds. None if undefined.
    """

    place: str
    bits: float
    baseline_bits: float
    difference: float
    windows: int | None
    over_windows: tuple[float, float] | None
    over_seeds: tuple[float, float] | None


@dataclass(frozen=True)
class TextDifference:
    """Comparison of a model and the baseline on one text, over the seeds of both."""

    text: str
    model: str
    baseline: str
    seeds: list[int]
    places: list[RangeDifference]


def compare_texts(model: ModelRuns, baseline: ModelRuns, add_note: AddNote) -> list[TextDifference]:
    """Compare all texts that either model was evaluated on. `add_note` receives the reasons of omitted comparisons."""
    seeds = sorted(model.evaluated.keys() & baseline.evaluated.keys())
    model_losses, baseline_losses = (
        {group.runs[seed].name: collect_text_losses(group.evaluated[seed]) for seed in seeds} for group in (model, baseline)
    )
    differences = []
    for text in dict.fromkeys(name for texts in [*model_losses.values(), *baseline_losses.values()] for name in texts):
        label = f"{text}, {model.name} minus {baseline.name}"
        if reason := _explain_mismatch(text, model_losses | baseline_losses):
            add_note(f"{label}: not compared: {reason}")
            continue
        sides = ([texts[text].ranges for texts in side.values()] for side in (model_losses, baseline_losses))
        ranges = _compare_ranges(*sides)
        if any(position_range.windows is None for position_range in ranges):
            add_note(f"{label}: no intervals over windows; evaluate again to record the loss of each window")
        differences.append(TextDifference(text, model.name, baseline.name, seeds, ranges))
    return differences


def collect_text_losses(evaluation: dict[str, Any]) -> dict[str, RunTextLoss]:
    """Return the losses of an evaluation by text: the texts given to it by name, and the run's held-out text."""
    losses = {name: _read_text(text) for name, text in evaluation.get("texts", {}).items()}
    heldout = evaluation.get("positions")
    return {**losses, HELDOUT_TEXT: _read_heldout_text(evaluation, heldout)} if heldout else losses


def _read_text(text: dict[str, Any]) -> RunTextLoss:
    rows = np.array(text["rows"], dtype=np.float64).reshape(-1, 2)
    windows = np.array(text["windows"], dtype=np.float64).reshape(-1, len(text["octaves"]))
    conditions = {
        "bytes": text["identity"],
        "length": text["length"],
        "rows": [int(tokens) for tokens in rows[:, 0]],
        "position ranges": text["octaves"],
        "windows": text["window_documents"],
    }
    whole = RangeLoss(_to_bits(text["loss"]), _to_bits(rows[:, 1]), rows[:, 0])
    return RunTextLoss(
        conditions, {WHOLE_DOCUMENTS: whole, **(_split_by_range(text["octaves"], windows) if len(windows) else {})}
    )


def _read_heldout_text(evaluation: dict[str, Any], heldout: dict[str, Any]) -> RunTextLoss:
    edges = [(row["first"], row["last"]) for row in heldout["octaves"]]
    conditions = {
        "bytes": evaluation["data_identity"],
        "length": heldout["length"],
        "position ranges": edges,
        "windows": heldout["windows"],
    }
    if all("windows" in row for row in heldout["octaves"]):
        return RunTextLoss(conditions, _split_by_range(edges, np.array([row["windows"] for row in heldout["octaves"]]).T))
    means = _split_by_range(edges, np.array([[row["loss"] for row in heldout["octaves"]]]))
    return RunTextLoss(conditions, {label: RangeLoss(loss.mean) for label, loss in means.items()})


def _split_by_range(edges: Sequence[Sequence[int]], windows: np.ndarray) -> dict[str, RangeLoss]:
    """Split losses [windows, ranges] in nats by position range, and add the least-squares slope over the far ranges."""
    bits = _to_bits(windows)
    ranges = {f"{first:,} to {last - 1:,}": bits[:, column] for column, (first, last) in enumerate(edges)}
    far = [column for column, (first, _) in enumerate(edges) if first >= SLOPE_START]
    if len(far) > 1:
        steps = np.arange(len(far)) - (len(far) - 1) / 2
        ranges[SLOPE_LABEL] = bits[:, far] @ steps / (steps @ steps)
    return {label: RangeLoss(float(parts.mean()), parts, np.ones(len(parts))) for label, parts in ranges.items()}


def _to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _explain_mismatch(text: str, losses_by_run: dict[str, dict[str, RunTextLoss]]) -> str | None:
    """Return why the losses of these runs on a text cannot be paired; None if they can."""
    if missing := [name for name, texts in losses_by_run.items() if text not in texts]:
        return (
            f"{', '.join(missing)} has no losses on it; evaluate all runs on the same texts "
            "(nsa-lab evaluate RUN --text NAME=PATH)"
        )
    (first, expected), *others = [(name, texts[text]) for name, texts in losses_by_run.items()]
    for name, loss in others:
        if different := [key for key in expected.conditions if expected.conditions[key] != loss.conditions.get(key)]:
            return f"{first} and {name} differ in {' and '.join(different)} under this name"
    if nonfinite := [name for name, texts in losses_by_run.items() if not texts[text].is_finite]:
        return f"{', '.join(nonfinite)} has non-finite losses"
    return None


def _compare_ranges(model: list[dict[str, RangeLoss]], baseline: list[dict[str, RangeLoss]]) -> list[RangeDifference]:
    """Compare all position ranges of the runs of a model and the baseline, paired by seed."""
    return [_compare_range(label, [run[label] for run in model], [run[label] for run in baseline]) for label in model[0]]


def _compare_range(label: str, model: list[RangeLoss], baseline: list[RangeLoss]) -> RangeDifference:
    means = [np.array([loss.mean for loss in side]) for side in (model, baseline)]
    bits, baseline_bits = (float(side.mean()) for side in means)
    windows, over_windows = _compare_windows(model, baseline)
    over_seeds = _to_interval(compute_paired_difference(label, *means))
    return RangeDifference(label, bits, baseline_bits, bits - baseline_bits, windows, over_windows, over_seeds)


def _compare_windows(model: list[RangeLoss], baseline: list[RangeLoss]) -> tuple[int | None, tuple[float, float] | None]:
    """Return the number of windows and the interval over them; None if a run did not record them."""
    parts = [[loss.parts for loss in side if loss.parts is not None] for side in (model, baseline)]
    if (len(parts[0]), len(parts[1])) != (len(model), len(baseline)):
        return None, None
    first, second = (np.mean(side, axis=0) for side in parts)
    return len(first), _to_interval(compute_paired_difference("", first, second, model[0].weights))


def _to_interval(difference: PairedDifference | str) -> tuple[float, float] | None:
    return (
        (difference.mean - difference.half_width, difference.mean + difference.half_width)
        if isinstance(difference, PairedDifference)
        else None
    )
