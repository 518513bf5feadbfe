"""Texts as two models read them, window by window and seed by seed: bits per byte by octave of the position.

Invariant: only what was read in the same cut is compared. Part i of one reading is part i of every other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsa_lab.health.models import ModelRuns, Say
from nsa_lab.health.paired import Difference, difference

WHOLE, OWN_TEXT = "whole documents", "held-out text"
# The slope is over octaves from here on: before, a window and a few blocks are all there is.
SLOPE_FROM = 4096
SLOPE = f"slope per octave from {SLOPE_FROM:,} on"


@dataclass(frozen=True)
class PlaceLoss:
    """Bits per byte of one run at some positions of a text.

    `parts` float64 [n] are those of each window (of whole documents: of each row), and `weights` [n] their tokens; None
    where the evaluation is of a time when they were not recorded.
    """

    mean: float
    parts: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class TextReading:
    """A text as one run read it: `cut` is what two readings must have in common to be compared, by what it is called."""

    cut: dict[str, Any]
    places: dict[str, PlaceLoss]

    @property
    def is_finite(self) -> bool:
        parts = [loss.parts for loss in self.places.values() if loss.parts is not None]
        return all(bool(np.isfinite(one).all()) for one in (*parts, [loss.mean for loss in self.places.values()]))


@dataclass(frozen=True)
class PlaceDifference:
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
    places: list[PlaceDifference]


def text_differences(model: ModelRuns, baseline: ModelRuns, say: Say) -> list[TextDifference]:
    """Of every text that either read; `say` gets a line for each that cannot be compared, and why."""
    seeds = sorted(model.evaluated.keys() & baseline.evaluated.keys())
    ours, theirs = ({one.runs[seed].name: readings(one.evaluated[seed]) for seed in seeds} for one in (model, baseline))
    found = []
    for text in dict.fromkeys(name for read in [*ours.values(), *theirs.values()] for name in read):
        of = f"{text}, {model.name} less {baseline.name}"
        if why := _not_alike(text, ours | theirs):
            say(f"{of}: not compared: {why}")
            continue
        sides = ([read[text].places for read in side.values()] for side in (ours, theirs))
        places = _differences(*sides)
        if any(place.windows is None for place in places):
            say(f"{of}: intervals over windows are not known; evaluations of today's code record the loss of each window")
        found.append(TextDifference(text, model.name, baseline.name, seeds, places))
    return found


def readings(evaluation: dict[str, Any]) -> dict[str, TextReading]:
    """Every text of an evaluation, by name: those that were named to it, and the run's own held-out text."""
    found = {name: _of_text(text) for name, text in evaluation.get("texts", {}).items()}
    own = evaluation.get("positions")
    return {**found, OWN_TEXT: _of_own_text(evaluation, own)} if own else found


def _of_text(text: dict[str, Any]) -> TextReading:
    rows = np.array(text["rows"], dtype=np.float64).reshape(-1, 2)
    windows = np.array(text["windows"], dtype=np.float64).reshape(-1, len(text["octaves"]))
    cut = {
        "bytes": text["identity"],
        "length": text["length"],
        "rows": [int(tokens) for tokens in rows[:, 0]],
        "octaves": text["octaves"],
        "windows": text["window_documents"],
    }
    whole = PlaceLoss(_bits(text["loss"]), _bits(rows[:, 1]), rows[:, 0])
    return TextReading(cut, {WHOLE: whole, **(_by_octave(text["octaves"], windows) if len(windows) else {})})


def _of_own_text(evaluation: dict[str, Any], own: dict[str, Any]) -> TextReading:
    edges = [(octave["first"], octave["last"]) for octave in own["octaves"]]
    cut = {"bytes": evaluation["data_identity"], "length": own["length"], "octaves": edges, "windows": own["windows"]}
    if all("windows" in octave for octave in own["octaves"]):
        return TextReading(cut, _by_octave(edges, np.array([octave["windows"] for octave in own["octaves"]]).T))
    means = _by_octave(edges, np.array([[octave["loss"] for octave in own["octaves"]]]))
    return TextReading(cut, {place: PlaceLoss(loss.mean) for place, loss in means.items()})


def _by_octave(edges: Sequence[Sequence[int]], windows: np.ndarray) -> dict[str, PlaceLoss]:
    """Of losses [windows, octaves] in nats: every octave, and the slope of the least squares over the far ones."""
    bits = _bits(windows)
    places = {f"{first:,} to {last - 1:,}": bits[:, column] for column, (first, last) in enumerate(edges)}
    far = [column for column, (first, _) in enumerate(edges) if first >= SLOPE_FROM]
    if len(far) > 1:
        steps = np.arange(len(far)) - (len(far) - 1) / 2
        places[SLOPE] = bits[:, far] @ steps / (steps @ steps)
    return {place: PlaceLoss(float(parts.mean()), parts, np.ones(len(parts))) for place, parts in places.items()}


def _bits(nats: Any) -> Any:
    return nats / math.log(2)


def _not_alike(text: str, runs: dict[str, dict[str, TextReading]]) -> str | None:
    """Why these runs' readings of a text make no pairs; None if they do."""
    if missing := [name for name, read in runs.items() if text not in read]:
        return (
            f"{', '.join(missing)} did not read it; ask every run of the same texts (nsa-lab evaluate RUN --text NAME=PATH)"
        )
    (first, ours), *others = [(name, read[text]) for name, read in runs.items()]
    for name, reading in others:
        if differ := [key for key in ours.cut if ours.cut[key] != reading.cut.get(key)]:
            return f"{first} and {name} read other {' and '.join(differ)} under this name, which make no pairs"
    if wrong := [name for name, read in runs.items() if not read[text].is_finite]:
        return f"{', '.join(wrong)} has losses that are no numbers"
    return None


def _differences(ours: list[dict[str, PlaceLoss]], theirs: list[dict[str, PlaceLoss]]) -> list[PlaceDifference]:
    """Of the places of the runs of both, seed by seed."""
    return [_difference(place, [run[place] for run in ours], [run[place] for run in theirs]) for place in ours[0]]


def _difference(place: str, ours: list[PlaceLoss], theirs: list[PlaceLoss]) -> PlaceDifference:
    means = [np.array([loss.mean for loss in side]) for side in (ours, theirs)]
    bits, baseline = (float(side.mean()) for side in means)
    windows, over_windows = _over_windows(ours, theirs)
    over_seeds = _interval(difference(place, *means))
    return PlaceDifference(place, bits, baseline, bits - baseline, windows, over_windows, over_seeds)


def _over_windows(ours: list[PlaceLoss], theirs: list[PlaceLoss]) -> tuple[int | None, tuple[float, float] | None]:
    """How many windows there are, and the interval over them; None where a run did not record them."""
    parts = [[loss.parts for loss in side if loss.parts is not None] for side in (ours, theirs)]
    if (len(parts[0]), len(parts[1])) != (len(ours), len(theirs)):
        return None, None
    first, second = (np.mean(side, axis=0) for side in parts)
    return len(first), _interval(difference("", first, second, ours[0].weights))


def _interval(found: Difference | str) -> tuple[float, float] | None:
    return (found.mean - found.half, found.mean + found.half) if isinstance(found, Difference) else None
