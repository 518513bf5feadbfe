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
from nsa_lab.health.model_runs import AddNote, EvaluatedRun, ModelRuns
from nsa_lab.health.paired_text_loss import TextDifference, compare_texts
from nsa_lab.health.proportions import Proportion
from nsa_lab.health.sweep_results import SeedMean
from nsa_lab.runs.evaluation import get_depth_counts
from nsa_lab.runs.history import collect_facts, compute_median_speeds, compute_step_time

ABLATIONS = "interventions"


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
class NeedleResult:
    """Answers that are right, teacher-forced, by seed and of all seeds; and those that a model wrote by itself.

    `far` counts those whose fact lies beyond the window and behind the first selection block, by its depth; so it is right
    to within the length of a question. None where there are none such, or they were not recorded.
    """

    model: str
    task: str
    length: int
    by_seed: dict[int, Proportion | None]
    every: Proportion | None
    far: Proportion | None
    written: Proportion | None


@dataclass(frozen=True)
class AblationResult:
    """Needles found under an intervention, and what it costs in text: bits per byte, less those of the chosen blocks."""

    model: str
    length: int
    name: str
    by_seed: dict[int, Proportion | None]
    every: Proportion | None
    far: Proportion | None
    d_text: SeedMean | None


@dataclass(frozen=True)
class ModelComparison:
    """All tables. `baseline` is the name of the model that the others are compared with."""

    baseline: str
    costs: list[ModelCost]
    needles: list[NeedleResult]
    texts: list[TextDifference]
    interventions: list[AblationResult]
    not_compared: list[str]


def compare_models(models: Sequence[ModelRuns], baseline: ModelRuns, noted: Iterable[str] = ()) -> ModelComparison:
    """The models in their order, each beside `baseline`; `noted` is what is known by now not to be compared."""
    notes = list(noted)
    others = [model for model in models if model is not baseline]
    for model in others:
        _note_unpaired(model, baseline, notes.append)
    _note_condition_differences(models, notes.append)
    _note_not_evaluated(models, notes.append)
    texts = [found for model in others for found in compare_texts(model, baseline, notes.append)]
    return ModelComparison(
        baseline=baseline.name,
        costs=[_compute_model_cost(model, baseline) for model in models],
        needles=[found for model in models for found in collect_needle_results(model)],
        texts=texts,
        interventions=[found for model in models for found in collect_ablation_results(model)],
        not_compared=notes,
    )


def _compute_model_cost(model: ModelRuns, baseline: ModelRuns) -> ModelCost:
    ours, theirs = ({seed: _compute_run_cost(seed, run) for seed, run in one.runs.items()} for one in (model, baseline))
    return ModelCost(
        model.name,
        model.attention,
        list(ours.values()),
        _compute_time_ratio(ours, theirs, lambda cost: cost.seconds),
        _compute_time_ratio(ours, theirs, lambda cost: cost.wall_s),
    )


def _compute_run_cost(seed: int, run: EvaluatedRun) -> RunCost:
    known, history = collect_facts(run.history), run.history
    speeds = compute_median_speeds(history)
    seconds = compute_step_time(history)
    return RunCost(run.name, seed, known.step, known.tokens, known.parameters, seconds, known.wall_s, speeds)


def _compute_time_ratio(
    ours: dict[int, RunCost], theirs: dict[int, RunCost], of: Callable[[RunCost], float | None]
) -> float | None:
    both = [(of(ours[seed]), of(theirs[seed])) for seed in ours if seed in theirs]
    told = [(one, other) for one, other in both if one is not None and other is not None]
    return sum(one for one, _ in told) / sum(other for _, other in told) if told and len(told) == len(both) else None


def collect_needle_results(model: ModelRuns) -> list[NeedleResult]:
    """Of every task and length that a run of the model was asked, in their order."""
    cells = {seed: found.get("retrieval", []) for seed, found in model.evaluated.items()}
    asked = dict.fromkeys((cell["task"], cell["length"]) for row in cells.values() for cell in row)
    return [_build_needle_result(model, task, length, cells) for task, length in asked]


def _build_needle_result(model: ModelRuns, task: str, length: int, cells: dict[int, list[dict[str, Any]]]) -> NeedleResult:
    own = {seed: [c for c in row if (c["task"], c["length"]) == (task, length)] for seed, row in cells.items()}
    by_seed = {seed: _compute_proportion(row, "right", "answers") for seed, row in own.items()}
    far = [c for seed, row in own.items() for c in row if is_far(c["depth"], length, _get_nsa_config(model, seed))]
    every = [cell for row in own.values() for cell in row]
    return NeedleResult(
        model.name,
        task,
        length,
        by_seed,
        Proportion.pool(by_seed.values()),
        _compute_far_proportion(far),
        _compute_proportion(every, "written_right", "written"),
    )


def _compute_far_proportion(cells: Iterable[dict[str, Any]]) -> Proportion | None:
    counts = [get_depth_counts(cell) for cell in cells]
    known = [count for count in counts if count is not None]
    return (
        Proportion.from_counts(sum(right for right, _ in known), sum(every for _, every in known))
        if len(known) == len(counts)
        else None
    )


def is_far(depth: float, length: int, nsa: NSAConfig) -> bool:
    """Whether a fact at `depth` of `length` bytes lies beyond the window of the answer, and behind the first block."""
    return depth * length >= nsa.l_sel and (1 - depth) * length > nsa.w


def _get_nsa_config(model: ModelRuns, seed: int) -> NSAConfig:
    return model.runs[seed].history.config.nsa


def _compute_proportion(cells: Iterable[dict[str, Any]], right: str, asked: str) -> Proportion | None:
    counted = [(cell[right], cell[asked]) for cell in cells]
    return Proportion.from_counts(sum(one for one, _ in counted), sum(every for _, every in counted))


def collect_ablation_results(model: ModelRuns) -> list[AblationResult]:
    """Of every length and intervention that a run of the model was measured with, in their order."""
    parts = {
        (seed, part["length"], effect["name"]): (part, effect)
        for seed, found in model.evaluated.items()
        for part in found.get("selection", [])
        for effect in part["interventions"]
    }
    return [
        _build_ablation_result(model, *key, parts) for key in dict.fromkeys((length, name) for _, length, name in parts)
    ]


def _build_ablation_result(model: ModelRuns, length: int, name: str, parts: dict[Any, Any]) -> AblationResult:
    own = {seed: parts[seed, length, name] for seed in model.evaluated if (seed, length, name) in parts}
    # One answer in each sequence.
    by_seed = {
        seed: Proportion.from_counts(round(e["accuracy"] * p["sequences"]), p["sequences"]) for seed, (p, e) in own.items()
    }
    far = [right for seed, (p, e) in own.items() for right in _list_far_results(p, e, _get_nsa_config(model, seed))]
    text = SeedMean.from_values([effect["d_loss"] / math.log(2) for _, effect in own.values()])
    return AblationResult(
        model.name,
        length,
        name,
        by_seed,
        Proportion.pool(by_seed.values()),
        Proportion.from_counts(round(sum(far)), len(far)),
        text,
    )


def _list_far_results(part: dict[str, Any], effect: dict[str, Any], nsa: NSAConfig) -> list[float]:
    """Of the far needles whether each was found; none of an evaluation that did not record it."""
    pairs = zip(part.get("depths", []), effect.get("right", []), strict=True)
    return [right for depth, right in pairs if is_far(depth, part["length"], nsa)]


def _note_unpaired(model: ModelRuns, baseline: ModelRuns, say: AddNote) -> None:
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


def _note_condition_differences(models: Sequence[ModelRuns], say: AddNote) -> None:
    told = {run: _get_conditions(found) for run, found in _iterate_evaluations(models)}
    for name in dict.fromkeys(name for conditions in told.values() for name in conditions):
        _note_if_different(f"the evaluations differ in {name}", {run: str(own.get(name)) for run, own in told.items()}, say)


def _get_conditions(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What evaluations that are compared should have in common, by what it is called; the last make the questions."""
    return {
        "dtype": evaluation.get("dtype"),
        "device": evaluation.get("device"),
        "code": evaluation.get("code", {}).get("source"),
        "the seed of their questions": evaluation.get("seed"),
        "the text of their questions": evaluation.get("data_identity"),
        **{f"the data.{key} of their questions": value for key, value in evaluation.get("recall", {}).items()},
    }


def _note_not_evaluated(models: Sequence[ModelRuns], say: AddNote) -> None:
    """Needles and interventions that a run was not asked, or not as often as others."""
    found = dict(_iterate_evaluations(models))
    asked = {run: _get_evaluated_counts(one) for run, one in found.items()}
    why = {run: _get_skip_reasons(one) for run, one in found.items()}
    lines: list[tuple[str, str]] = []
    for what in dict.fromkeys(what for parts in (asked, why) for part in parts.values() for what in part):
        lacking = [run for run in found if what not in asked[run]]
        lines += [(f"{what}: {why[run].get(what) or _explain_missing(what, found[run])}", run) for run in lacking]
        _note_if_different(f"{what}: not asked alike", {run: own[what] for run, own in asked.items() if what in own}, say)
    for line, runs in _group_values(lines).items():
        say(f"{line} ({runs})")


def _explain_missing(what: str, evaluation: dict[str, Any]) -> str:
    is_dense = evaluation.get("attention") == "dense" and what.startswith(ABLATIONS)
    return "dense attention has neither blocks nor branches" if is_dense else "the evaluation was not to ask it"


def _get_evaluated_counts(evaluation: dict[str, Any]) -> dict[str, str]:
    """Of needles by task and length, and of interventions by length, how much was asked."""
    cells: dict[str, list[tuple[str, str]]] = {}
    for cell in evaluation.get("retrieval", []):
        cells.setdefault(_format_task(cell), []).append((str(cell["sequences"]), f"{cell['depth']:g}"))
    needles = {
        task: ", ".join(f"{count} at depths {depths}" for count, depths in _group_values(own).items())
        for task, own in cells.items()
    }
    parts = [part for part in evaluation.get("selection", []) if part["interventions"]]
    return needles | {_format_ablations(part): f"{part['sequences']} sequences" for part in parts}


def _get_skip_reasons(evaluation: dict[str, Any]) -> dict[str, str]:
    """What an evaluation says that it did not ask, and why."""
    needles = {_format_task(row): f"not asked: {row['why']}" for row in evaluation.get("not_asked", [])}
    parts = [part for part in evaluation.get("selection", []) if not part["interventions"]]
    return needles | {_format_ablations(part): str(part.get("why_not")) for part in parts}


def _format_task(cell: dict[str, Any]) -> str:
    return f"{cell['task']} at {cell['length']:,}"


def _format_ablations(part: dict[str, Any]) -> str:
    return f"{ABLATIONS} at {part['length']:,}"


def _iterate_evaluations(models: Sequence[ModelRuns]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every run that was evaluated, by name."""
    yield from ((model.runs[seed].name, found) for model in models for seed, found in model.evaluated.items())


def _note_if_different(what: str, of_runs: dict[str, str], say: AddNote) -> None:
    values = _group_values((value, run) for run, value in of_runs.items())
    if len(values) > 1:
        say(f"{what}: " + "; ".join(f"{value} ({runs})" for value, runs in values.items()))


def _group_values(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """`a` -> `x, y` of pairs (a, x) and (a, y), in their order."""
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: ", ".join(values) for key, values in found.items()}
