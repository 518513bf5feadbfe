"""Texts as two models read them, window by window and seed by seed: bits per byte by octave of the position.

Invariant: only what was read in the same cut is compared. Part i of one reading is part i of every other.
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
# The slope is over octaves from here on: before, a window and a few blocks are all there is.
SLOPE_START = 4096
SLOPE_LABEL = f"slope per octave from {SLOPE_START:,} on"


@dataclass(frozen=True)
class RangeLoss:
    """Bits per byte of one run at some positions of a text.

    `parts` float64 [n] are those of each window (of whole documents: of each row), and `weights` [n] their tokens; None
    where the evaluation is of a time when they were not recorded.
    """

    mean: float
    parts: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class TextLoss:
    """A text as one run read it: `cut` is what two readings must have in common to be compared, by what it is called."""

    conditions: dict[str, Any]
    ranges: dict[str, RangeLoss]

    @property
    def is_finite(self) -> bool:
        parts = [loss.parts for loss in self.ranges.values() if loss.parts is not None]
        return all(bool(np.isfinite(one).all()) for one in (*parts, [loss.mean for loss in self.ranges.values()]))


@dataclass(frozen=True)
class RangeDifference:
    """Bits per byte of two models at some positions, means over seeds; the first's less the second's, with 95 % intervals.

    `over_windows` is over the `windows` windows, whose differences are averaged over seeds first; `over_seeds` over the
    seeds' means. None where there is none.
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
    """One text as a model and the baseline read it, at the seeds that both have."""

    text: str
    model: str
    baseline: str
    seeds: list[int]
    places: list[RangeDifference]


def compare_texts(model: ModelRuns, baseline: ModelRuns, say: AddNote) -> list[TextDifference]:
    """Of every text that either read; `say` gets a line for each that cannot be compared, and why."""
    seeds = sorted(model.evaluated.keys() & baseline.evaluated.keys())
    ours, theirs = (
        {one.runs[seed].name: collect_text_losses(one.evaluated[seed]) for seed in seeds} for one in (model, baseline)
    )
    found = []
    for text in dict.fromkeys(name for read in [*ours.values(), *theirs.values()] for name in read):
        of = f"{text}, {model.name} less {baseline.name}"
        if why := _explain_mismatch(text, ours | theirs):
            say(f"{of}: not compared: {why}")
            continue
        sides = ([read[text].ranges for read in side.values()] for side in (ours, theirs))
        places = _compare_ranges(*sides)
        if any(place.windows is None for place in places):
            say(f"{of}: intervals over windows are not known; evaluations of today's code record the loss of each window")
        found.append(TextDifference(text, model.name, baseline.name, seeds, places))
    return found


def collect_text_losses(evaluation: dict[str, Any]) -> dict[str, TextLoss]:
    """Every text of an evaluation, by name: those that were named to it, and the run's own held-out text."""
    found = {name: _read_text(text) for name, text in evaluation.get("texts", {}).items()}
    own = evaluation.get("positions")
    return {**found, HELDOUT_TEXT: _read_heldout_text(evaluation, own)} if own else found


def _read_text(text: dict[str, Any]) -> TextLoss:
    rows = np.array(text["rows"], dtype=np.float64).reshape(-1, 2)
    windows = np.array(text["windows"], dtype=np.float64).reshape(-1, len(text["octaves"]))
    cut = {
        "bytes": text["identity"],
        "length": text["length"],
        "rows": [int(tokens) for tokens in rows[:, 0]],
        "octaves": text["octaves"],
        "windows": text["window_documents"],
    }
    whole = RangeLoss(_to_bits(text["loss"]), _to_bits(rows[:, 1]), rows[:, 0])
    return TextLoss(cut, {WHOLE_DOCUMENTS: whole, **(_split_by_range(text["octaves"], windows) if len(windows) else {})})


def _read_heldout_text(evaluation: dict[str, Any], own: dict[str, Any]) -> TextLoss:
    edges = [(octave["first"], octave["last"]) for octave in own["octaves"]]
    cut = {"bytes": evaluation["data_identity"], "length": own["length"], "octaves": edges, "windows": own["windows"]}
    if all("windows" in octave for octave in own["octaves"]):
        return TextLoss(cut, _split_by_range(edges, np.array([octave["windows"] for octave in own["octaves"]]).T))
    means = _split_by_range(edges, np.array([[octave["loss"] for octave in own["octaves"]]]))
    return TextLoss(cut, {place: RangeLoss(loss.mean) for place, loss in means.items()})


def _split_by_range(edges: Sequence[Sequence[int]], windows: np.ndarray) -> dict[str, RangeLoss]:
    """Of losses [windows, octaves] in nats: every octave, and the slope of the least squares over the far ones."""
    bits = _to_bits(windows)
    places = {f"{first:,} to {last - 1:,}": bits[:, column] for column, (first, last) in enumerate(edges)}
    far = [column for column, (first, _) in enumerate(edges) if first >= SLOPE_START]
    if len(far) > 1:
        steps = np.arange(len(far)) - (len(far) - 1) / 2
        places[SLOPE_LABEL] = bits[:, far] @ steps / (steps @ steps)
    return {place: RangeLoss(float(parts.mean()), parts, np.ones(len(parts))) for place, parts in places.items()}


def _to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _explain_mismatch(text: str, runs: dict[str, dict[str, TextLoss]]) -> str | None:
    """Why these runs' readings of a text make no pairs; None if they do."""
    if missing := [name for name, read in runs.items() if text not in read]:
        return (
            f"{', '.join(missing)} did not read it; ask every run of the same texts (nsa-lab evaluate RUN --text NAME=PATH)"
        )
    (first, ours), *others = [(name, read[text]) for name, read in runs.items()]
    for name, reading in others:
        if differ := [key for key in ours.conditions if ours.conditions[key] != reading.conditions.get(key)]:
            return f"{first} and {name} read other {' and '.join(differ)} under this name, which make no pairs"
    if wrong := [name for name, read in runs.items() if not read[text].is_finite]:
        return f"{', '.join(wrong)} has losses that are no numbers"
    return None


def _compare_ranges(ours: list[dict[str, RangeLoss]], theirs: list[dict[str, RangeLoss]]) -> list[RangeDifference]:
    """Of the places of the runs of both, seed by seed."""
    return [_compare_range(place, [run[place] for run in ours], [run[place] for run in theirs]) for place in ours[0]]


def _compare_range(place: str, ours: list[RangeLoss], theirs: list[RangeLoss]) -> RangeDifference:
    means = [np.array([loss.mean for loss in side]) for side in (ours, theirs)]
    bits, baseline = (float(side.mean()) for side in means)
    windows, over_windows = _compare_windows(ours, theirs)
    over_seeds = _to_interval(compute_paired_difference(place, *means))
    return RangeDifference(place, bits, baseline, bits - baseline, windows, over_windows, over_seeds)


def _compare_windows(ours: list[RangeLoss], theirs: list[RangeLoss]) -> tuple[int | None, tuple[float, float] | None]:
    """How many windows there are, and the interval over them; None where a run did not record them."""
    parts = [[loss.parts for loss in side if loss.parts is not None] for side in (ours, theirs)]
    if (len(parts[0]), len(parts[1])) != (len(ours), len(theirs)):
        return None, None
    first, second = (np.mean(side, axis=0) for side in parts)
    return len(first), _to_interval(compute_paired_difference("", first, second, ours[0].weights))


def _to_interval(found: PairedDifference | str) -> tuple[float, float] | None:
    return (found.mean - found.half_width, found.mean + found.half_width) if isinstance(found, PairedDifference) else None
