"""Several models beside one of them: what they cost, what they find, how well they read, and which part of them does it.

Everything is from the records of runs and from what `nsa-lab evaluate` wrote into them. What is not compared stands in
`not_compared`, with its reason. The quality of the choice and the loss of packed documents are told run by run, in reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nsa_lab.config import NSAConfig
from nsa_lab.health.models import EvaluatedRun, ModelRuns, Say
from nsa_lab.health.shares import Share
from nsa_lab.health.sweep import OverSeeds
from nsa_lab.health.text_pairs import TextDifference, text_differences
from nsa_lab.runs.evaluation import found_at_depth
from nsa_lab.runs.history import facts, median_speeds, seconds_of_steps

INTERVENTIONS = "interventions"


@dataclass(frozen=True)
class RunCost:
    """`seconds` are those of optimiser steps, `wall_s` with evaluations, saves and the start; speeds are tokens per second,
    one of each stage. None where the record does not say."""

    run: str
    seed: int
    step: int
    tokens: int
    parameters: int | None
    seconds: float | None
    wall_s: float | None
    tokens_per_s: list[float]


@dataclass(frozen=True)
class ModelCost:
    """`seconds_share` and `wall_share`: of the baseline's time at the seeds that both have; None where one is not known."""

    model: str
    attention: str
    runs: list[RunCost]
    seconds_share: float | None
    wall_share: float | None


@dataclass(frozen=True)
class NeedlesFound:
    """Answers that are right, teacher-forced, by seed and of all seeds; and those that a model wrote by itself.

    `far` counts those whose fact lies beyond the window and behind the first selection block, by its depth; so it is right
    to within the length of a question. None where there are none such, or they were not recorded.
    """

    model: str
    task: str
    length: int
    by_seed: dict[int, Share | None]
    every: Share | None
    far: Share | None
    written: Share | None


@dataclass(frozen=True)
class InterventionFound:
    """Needles found under an intervention, and what it costs in text: bits per byte, less those of the chosen blocks."""

    model: str
    length: int
    name: str
    by_seed: dict[int, Share | None]
    every: Share | None
    far: Share | None
    d_text: OverSeeds | None


@dataclass(frozen=True)
class Compared:
    """All tables. `baseline` is the name of the model that the others are compared with."""

    baseline: str
    costs: list[ModelCost]
    needles: list[NeedlesFound]
    texts: list[TextDifference]
    interventions: list[InterventionFound]
    not_compared: list[str]


def compare_models(models: Sequence[ModelRuns], baseline: ModelRuns, noted: Iterable[str] = ()) -> Compared:
    """The models in their order, each beside `baseline`; `noted` is what is known by now not to be compared."""
    notes = list(noted)
    others = [model for model in models if model is not baseline]
    for model in others:
        _say_unpaired(model, baseline, notes.append)
    _say_conditions(models, notes.append)
    _say_not_asked(models, notes.append)
    texts = [found for model in others for found in text_differences(model, baseline, notes.append)]
    return Compared(
        baseline=baseline.name,
        costs=[_cost(model, baseline) for model in models],
        needles=[found for model in models for found in needles_found(model)],
        texts=texts,
        interventions=[found for model in models for found in interventions_found(model)],
        not_compared=notes,
    )


def _cost(model: ModelRuns, baseline: ModelRuns) -> ModelCost:
    ours, theirs = ({seed: _run_cost(seed, run) for seed, run in one.runs.items()} for one in (model, baseline))
    return ModelCost(
        model.name,
        model.attention,
        list(ours.values()),
        _time_share(ours, theirs, lambda cost: cost.seconds),
        _time_share(ours, theirs, lambda cost: cost.wall_s),
    )


def _run_cost(seed: int, run: EvaluatedRun) -> RunCost:
    known, history = facts(run.history), run.history
    speeds = median_speeds(history)
    seconds = seconds_of_steps(history)
    return RunCost(run.name, seed, known.step, known.tokens, known.parameters, seconds, known.wall_s, speeds)


def _time_share(
    ours: dict[int, RunCost], theirs: dict[int, RunCost], of: Callable[[RunCost], float | None]
) -> float | None:
    both = [(of(ours[seed]), of(theirs[seed])) for seed in ours if seed in theirs]
    told = [(one, other) for one, other in both if one is not None and other is not None]
    return sum(one for one, _ in told) / sum(other for _, other in told) if told and len(told) == len(both) else None


def needles_found(model: ModelRuns) -> list[NeedlesFound]:
    """Of every task and length that a run of the model was asked, in their order."""
    cells = {seed: found.get("retrieval", []) for seed, found in model.evaluated.items()}
    asked = dict.fromkeys((cell["task"], cell["length"]) for row in cells.values() for cell in row)
    return [_needles(model, task, length, cells) for task, length in asked]


def _needles(model: ModelRuns, task: str, length: int, cells: dict[int, list[dict[str, Any]]]) -> NeedlesFound:
    own = {seed: [c for c in row if (c["task"], c["length"]) == (task, length)] for seed, row in cells.items()}
    by_seed = {seed: _share(row, "right", "answers") for seed, row in own.items()}
    far = [c for seed, row in own.items() for c in row if is_far(c["depth"], length, _geometry(model, seed))]
    every = [cell for row in own.values() for cell in row]
    return NeedlesFound(
        model.name,
        task,
        length,
        by_seed,
        Share.together(by_seed.values()),
        _far_share(far),
        _share(every, "written_right", "written"),
    )


def _far_share(cells: Iterable[dict[str, Any]]) -> Share | None:
    counts = [found_at_depth(cell) for cell in cells]
    known = [count for count in counts if count is not None]
    return (
        Share.of(sum(right for right, _ in known), sum(every for _, every in known)) if len(known) == len(counts) else None
    )


def is_far(depth: float, length: int, nsa: NSAConfig) -> bool:
    """Whether a fact at `depth` of `length` bytes lies beyond the window of the answer, and behind the first block."""
    return depth * length >= nsa.l_sel and (1 - depth) * length > nsa.w


def _geometry(model: ModelRuns, seed: int) -> NSAConfig:
    return model.runs[seed].history.config.nsa


def _share(cells: Iterable[dict[str, Any]], right: str, asked: str) -> Share | None:
    counted = [(cell[right], cell[asked]) for cell in cells]
    return Share.of(sum(one for one, _ in counted), sum(every for _, every in counted))


def interventions_found(model: ModelRuns) -> list[InterventionFound]:
    """Of every length and intervention that a run of the model was measured with, in their order."""
    parts = {
        (seed, part["length"], effect["name"]): (part, effect)
        for seed, found in model.evaluated.items()
        for part in found.get("selection", [])
        for effect in part["interventions"]
    }
    return [_intervention(model, *key, parts) for key in dict.fromkeys((length, name) for _, length, name in parts)]


def _intervention(model: ModelRuns, length: int, name: str, parts: dict[Any, Any]) -> InterventionFound:
    own = {seed: parts[seed, length, name] for seed in model.evaluated if (seed, length, name) in parts}
    # One answer in each sequence.
    by_seed = {seed: Share.of(round(e["accuracy"] * p["sequences"]), p["sequences"]) for seed, (p, e) in own.items()}
    far = [right for seed, (p, e) in own.items() for right in _far_right(p, e, _geometry(model, seed))]
    text = OverSeeds.of([effect["d_loss"] / math.log(2) for _, effect in own.values()])
    return InterventionFound(
        model.name, length, name, by_seed, Share.together(by_seed.values()), Share.of(round(sum(far)), len(far)), text
    )


def _far_right(part: dict[str, Any], effect: dict[str, Any], nsa: NSAConfig) -> list[float]:
    """Of the far needles whether each was found; none of an evaluation that did not record it."""
    pairs = zip(part.get("depths", []), effect.get("right", []), strict=True)
    return [right for depth, right in pairs if is_far(depth, part["length"], nsa)]


def _say_unpaired(model: ModelRuns, baseline: ModelRuns, say: Say) -> None:
    for one, other in ((model, baseline), (baseline, model)):
        if alone := [str(seed) for seed in one.runs if seed not in other.runs]:
            say(f"{other.name} has no run at seed {', '.join(alone)} of {one.name}: no pairs of those")
    both = model.evaluated.keys() & baseline.evaluated.keys()
    if len(both) < 2:
        why = (
            "one seed alone, so no interval over seeds"
            if both
            else "no seed at which both were evaluated: no text is compared"
        )
        say(f"{model.name} and {baseline.name} have {why}")


def _say_conditions(models: Sequence[ModelRuns], say: Say) -> None:
    told = {run: _conditions(found) for run, found in _evaluations(models)}
    for name in dict.fromkeys(name for conditions in told.values() for name in conditions):
        _say_if_several(f"the evaluations differ in {name}", {run: str(own.get(name)) for run, own in told.items()}, say)


def _conditions(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What evaluations that are compared should have in common, by what it is called; the last make the questions."""
    return {
        "dtype": evaluation.get("dtype"),
        "device": evaluation.get("device"),
        "code": evaluation.get("code", {}).get("source"),
        "the seed of their questions": evaluation.get("seed"),
        "the text of their questions": evaluation.get("data_identity"),
        **{f"the data.{key} of their questions": value for key, value in evaluation.get("recall", {}).items()},
    }


def _say_not_asked(models: Sequence[ModelRuns], say: Say) -> None:
    """Needles and interventions that a run was not asked, or not as often as others."""
    found = dict(_evaluations(models))
    asked = {run: _asked(one) for run, one in found.items()}
    why = {run: _why_not(one) for run, one in found.items()}
    lines: list[tuple[str, str]] = []
    for what in dict.fromkeys(what for parts in (asked, why) for part in parts.values() for what in part):
        lacking = [run for run in found if what not in asked[run]]
        lines += [(f"{what}: {why[run].get(what) or _not_wanted(what, found[run])}", run) for run in lacking]
        _say_if_several(f"{what}: not asked alike", {run: own[what] for run, own in asked.items() if what in own}, say)
    for line, runs in _grouped(lines).items():
        say(f"{line} ({runs})")


def _not_wanted(what: str, evaluation: dict[str, Any]) -> str:
    is_dense = evaluation.get("attention") == "dense" and what.startswith(INTERVENTIONS)
    return "dense attention has neither blocks nor branches" if is_dense else "the evaluation was not to ask it"


def _asked(evaluation: dict[str, Any]) -> dict[str, str]:
    """Of needles by task and length, and of interventions by length, how much was asked."""
    cells: dict[str, list[tuple[str, str]]] = {}
    for cell in evaluation.get("retrieval", []):
        cells.setdefault(_task(cell), []).append((str(cell["sequences"]), f"{cell['depth']:g}"))
    needles = {
        task: ", ".join(f"{count} at depths {depths}" for count, depths in _grouped(own).items())
        for task, own in cells.items()
    }
    parts = [part for part in evaluation.get("selection", []) if part["interventions"]]
    return needles | {_interventions(part): f"{part['sequences']} sequences" for part in parts}


def _why_not(evaluation: dict[str, Any]) -> dict[str, str]:
    """What an evaluation says that it did not ask, and why."""
    needles = {_task(row): f"not asked: {row['why']}" for row in evaluation.get("not_asked", [])}
    parts = [part for part in evaluation.get("selection", []) if not part["interventions"]]
    return needles | {_interventions(part): str(part.get("why_not")) for part in parts}


def _task(cell: dict[str, Any]) -> str:
    return f"{cell['task']} at {cell['length']:,}"


def _interventions(part: dict[str, Any]) -> str:
    return f"{INTERVENTIONS} at {part['length']:,}"


def _evaluations(models: Sequence[ModelRuns]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every run that was evaluated, by name."""
    yield from ((model.runs[seed].name, found) for model in models for seed, found in model.evaluated.items())


def _say_if_several(what: str, of_runs: dict[str, str], say: Say) -> None:
    values = _grouped((value, run) for run, value in of_runs.items())
    if len(values) > 1:
        say(f"{what}: " + "; ".join(f"{value} ({runs})" for value, runs in values.items()))


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """`a` -> `x, y` of pairs (a, x) and (a, y), in their order."""
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: ", ".join(values) for key, values in found.items()}
