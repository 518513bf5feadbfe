"""Compare several models with one of them: cost, needle retrieval, RULER, text losses and ablations.

All data is from the records of runs, their `evaluation.json` and `ruler.json`. `not_compared` lists omitted comparisons
with reasons. The quality of block selection and the loss of packed documents are in the reports of single runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsa_lab.config import NSAConfig
from nsa_lab.health.model_runs import AddNote, EvaluatedRun, ModelRuns
from nsa_lab.health.paired_difference import PairedDifference, compute_paired_difference
from nsa_lab.health.paired_text_loss import TextDifference, compare_texts
from nsa_lab.health.sweep_results import SeedMean
from nsa_lab.runs.evaluation import compute_wilson_interval, get_depth_counts
from nsa_lab.runs.history import collect_facts, compute_median_speeds, compute_step_time

ABLATIONS = "ablations"


@dataclass(frozen=True)
class Proportion:
    """`right` correct of `total` answers, their ratio `share`, and its 95% Wilson interval [`low`, `high`]."""

    right: int
    total: int
    share: float
    low: float
    high: float

    @classmethod
    def from_counts(cls, right: int, total: int) -> Proportion | None:
        """Return the proportion right / total; None if `total` is 0."""
        return cls(right, total, right / total, *compute_wilson_interval(right, total)) if total else None

    @classmethod
    def pool(cls, proportions: Iterable[Proportion | None]) -> Proportion | None:
        """Return the proportion over the answers of all given proportions; None if there are none."""
        known = [proportion for proportion in proportions if proportion]
        return cls.from_counts(sum(proportion.right for proportion in known), sum(proportion.total for proportion in known))


@dataclass(frozen=True)
class RunCost:
    """Cost of one run. None if the record does not contain the value.

    `seconds`: step time. `wall_s`: also evaluation, saving and startup. `tokens_per_s`: median speed of each stage.
    """

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
    """Cost of a model. `seconds_share`, `wall_share`: relative to the baseline, over the seeds of both; None if unknown."""

    model: str
    attention: str
    runs: list[RunCost]
    seconds_share: float | None
    wall_share: float | None


@dataclass(frozen=True)
class NeedleResult:
    """Proportion of correct answers, teacher-forced by seed and over all seeds (`every`), and generated (`written`).

    `far`: facts beyond the window and after the first selection block. It is computed from the depth, so it is exact up to
    the length of a question. None if there are no such answers or they were not recorded.
    """

    model: str
    task: str
    length: int
    by_seed: dict[int, Proportion | None]
    every: Proportion | None
    far: Proportion | None
    written: Proportion | None


@dataclass(frozen=True)
class RulerScore:
    """Scores of one of RULER's tasks at a length, 0 to 100, by seed and as the mean over seeds.

    `questions`: of all seeds. `low`, `high`: 95% Wilson interval of the mean over questions. `difference`: to the baseline
    with the same questions and seeds, paired, and the half-width of its 95% interval over questions; None for the baseline,
    for different questions, and for a single question.
    """

    model: str
    task: str
    length: int
    by_seed: dict[int, float | None]
    score: float
    questions: int
    low: float
    high: float
    difference: tuple[float, float] | None


@dataclass(frozen=True)
class AblationSummary:
    """Needles found under an ablation. `d_text`: its text loss minus that with selected blocks, bits per byte."""

    model: str
    length: int
    name: str
    by_seed: dict[int, Proportion | None]
    every: Proportion | None
    far: Proportion | None
    d_text: SeedMean | None


@dataclass(frozen=True)
class ModelComparison:
    """All results. `baseline`: name of the model with which the others are compared."""

    baseline: str
    costs: list[ModelCost]
    needles: list[NeedleResult]
    ruler: list[RulerScore]
    texts: list[TextDifference]
    interventions: list[AblationSummary]
    not_compared: list[str]


def compare_models(models: Sequence[ModelRuns], baseline: ModelRuns, known_notes: Iterable[str] = ()) -> ModelComparison:
    """Compare each model with `baseline`. `known_notes`: earlier notes on omitted comparisons."""
    notes = list(known_notes)
    others = [model for model in models if model is not baseline]
    for model in others:
        _note_unpaired(model, baseline, notes.append)
    for kind, records in (("evaluations", _list_evaluations(models)), ("RULER evaluations", _list_rulers(models))):
        _note_condition_differences(kind, records, notes.append)
        _note_not_evaluated(records, notes.append)
        _note_copies(kind, records, notes.append)
    texts = [text for model in others for text in compare_texts(model, baseline, notes.append)]
    return ModelComparison(
        baseline=baseline.name,
        costs=[_compute_model_cost(model, baseline) for model in models],
        needles=[needles for model in models for needles in collect_needle_results(model)],
        ruler=[score for model in models for score in collect_ruler_scores(model, baseline)],
        texts=texts,
        interventions=[ablation for model in models for ablation in collect_ablation_results(model)],
        not_compared=notes,
    )


def _compute_model_cost(model: ModelRuns, baseline: ModelRuns) -> ModelCost:
    costs, baseline_costs = (
        {seed: _compute_run_cost(seed, run) for seed, run in group.runs.items()} for group in (model, baseline)
    )
    return ModelCost(
        model.name,
        model.attention,
        list(costs.values()),
        _compute_time_ratio(costs, baseline_costs, lambda cost: cost.seconds),
        _compute_time_ratio(costs, baseline_costs, lambda cost: cost.wall_s),
    )


def _compute_run_cost(seed: int, run: EvaluatedRun) -> RunCost:
    facts, history = collect_facts(run.history), run.history
    speeds = compute_median_speeds(history)
    seconds = compute_step_time(history)
    return RunCost(run.name, seed, facts.step, facts.tokens, facts.parameters, seconds, facts.wall_s, speeds)


def _compute_time_ratio(
    costs: dict[int, RunCost], baseline_costs: dict[int, RunCost], get_time: Callable[[RunCost], float | None]
) -> float | None:
    """Return the total time over the seeds of both relative to the baseline; None if a time is unknown."""
    pairs = [(get_time(costs[seed]), get_time(baseline_costs[seed])) for seed in costs if seed in baseline_costs]
    known = [(time, baseline_time) for time, baseline_time in pairs if time is not None and baseline_time is not None]
    return sum(time for time, _ in known) / sum(time for _, time in known) if known and len(known) == len(pairs) else None


def collect_needle_results(model: ModelRuns) -> list[NeedleResult]:
    """Return the results of every task and length that a run of the model was evaluated on, in order."""
    cells = {seed: evaluation.get("retrieval", []) for seed, evaluation in model.evaluated.items()}
    tasks = dict.fromkeys((cell["task"], cell["length"]) for row in cells.values() for cell in row)
    return [_build_needle_result(model, task, length, cells) for task, length in tasks]


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
        Proportion.from_counts(sum(n_found for n_found, _ in known), sum(n_facts for _, n_facts in known))
        if len(known) == len(counts)
        else None
    )


def collect_ruler_scores(model: ModelRuns, baseline: ModelRuns) -> list[RulerScore]:
    """Return the scores of every RULER task and length that a run of the model was evaluated on, in order."""
    keys = dict.fromkeys(
        (cell["task"], cell["length"]) for record in model.with_ruler.values() for cell in record["results"]
    )
    return [_build_ruler_score(model, baseline, task, length) for task, length in keys]


def _build_ruler_score(model: ModelRuns, baseline: ModelRuns, task: str, length: int) -> RulerScore:
    own, other = (_get_ruler_cells(group, task, length) for group in (model, baseline))
    known = [cell for cell in own.values() if cell is not None]
    n_questions = sum(cell["questions"] for cell in known)
    share = sum(sum(cell["found"]) / cell["references"] for cell in known) / n_questions
    low, high = compute_wilson_interval(share * n_questions, n_questions)
    by_seed = {seed: None if cell is None else cell["score"] for seed, cell in own.items()}
    pairs = [(cell, other.get(seed)) for seed, cell in own.items() if model is not baseline]
    difference = _compare_questions([(first, second) for first, second in pairs if first and second])
    return RulerScore(model.name, task, length, by_seed, 100 * share, n_questions, 100 * low, 100 * high, difference)


def _get_ruler_cells(model: ModelRuns, task: str, length: int) -> dict[int, dict[str, Any] | None]:
    """Return the result of each seed, with the conditions that determine its questions; None if it was not evaluated."""
    cells: dict[int, dict[str, Any] | None] = dict.fromkeys(model.with_ruler)
    for seed, record in model.with_ruler.items():
        for cell in record["results"]:
            if (cell["task"], cell["length"]) == (task, length):
                cells[seed] = cell | {key: record.get(key) for key in ("seed", "data_identity", "tokenizer")}
    return cells


def _compare_questions(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, float] | None:
    """Return the mean difference in score over the questions of pairs of results, and the half-width of its interval."""
    keys = ("questions", "references", "seed", "data_identity", "tokenizer")
    if not pairs or len({tuple(cell[key] for key in keys) for pair in pairs for cell in pair}) > 1:
        return None
    scores = [
        np.mean([100 * np.array(cell["found"]) / cell["references"] for cell in side], axis=0)
        for side in zip(*pairs, strict=True)
    ]
    paired = compute_paired_difference("", *scores)
    return (paired.mean, paired.half_width) if isinstance(paired, PairedDifference) else None


def is_far(depth: float, length: int, nsa: NSAConfig) -> bool:
    """Return True if a fact at `depth` of `length` bytes is beyond the answer's window and after the first block."""
    return depth * length >= nsa.l_sel and (1 - depth) * length > nsa.w


def _get_nsa_config(model: ModelRuns, seed: int) -> NSAConfig:
    return model.runs[seed].history.config.nsa


def _compute_proportion(cells: Iterable[dict[str, Any]], correct_key: str, total_key: str) -> Proportion | None:
    counts = [(cell[correct_key], cell[total_key]) for cell in cells]
    return Proportion.from_counts(sum(n_correct for n_correct, _ in counts), sum(n_total for _, n_total in counts))


def collect_ablation_results(model: ModelRuns) -> list[AblationSummary]:
    """Return the results of every length and ablation that a run of the model was evaluated with, in order."""
    parts = {
        (seed, part["length"], effect["name"]): (part, effect)
        for seed, evaluation in model.evaluated.items()
        for part in evaluation.get("selection", [])
        for effect in part["interventions"]
    }
    return [
        _build_ablation_result(model, *key, parts) for key in dict.fromkeys((length, name) for _, length, name in parts)
    ]


def _build_ablation_result(model: ModelRuns, length: int, name: str, parts: dict[Any, Any]) -> AblationSummary:
    own = {seed: parts[seed, length, name] for seed in model.evaluated if (seed, length, name) in parts}
    # One answer per sequence.
    by_seed = {
        seed: Proportion.from_counts(round(e["accuracy"] * p["sequences"]), p["sequences"]) for seed, (p, e) in own.items()
    }
    far = [right for seed, (p, e) in own.items() for right in _list_far_results(p, e, _get_nsa_config(model, seed))]
    text = SeedMean.from_values([effect["d_loss"] / math.log(2) for _, effect in own.values()])
    return AblationSummary(
        model.name,
        length,
        name,
        by_seed,
        Proportion.pool(by_seed.values()),
        Proportion.from_counts(round(sum(far)), len(far)),
        text,
    )


def _list_far_results(part: dict[str, Any], effect: dict[str, Any], nsa: NSAConfig) -> list[float]:
    """Return for each far needle whether it was found; empty if the evaluation did not record it."""
    pairs = zip(part.get("depths", []), effect.get("right", []), strict=True)
    return [right for depth, right in pairs if is_far(depth, part["length"], nsa)]


def _note_unpaired(model: ModelRuns, baseline: ModelRuns, add_note: AddNote) -> None:
    for first, second in ((model, baseline), (baseline, model)):
        if unpaired := [str(seed) for seed in first.runs if seed not in second.runs]:
            add_note(f"{second.name} has no run with seed {', '.join(unpaired)} of {first.name}: not paired")
    common_seeds = model.evaluated.keys() & baseline.evaluated.keys()
    if len(common_seeds) < 2:
        reason = (
            "only one common seed, so no interval over seeds"
            if common_seeds
            else "no common evaluated seed, so no text is compared"
        )
        add_note(f"{model.name} and {baseline.name} have {reason}")


def _note_condition_differences(kind: str, evaluations: dict[str, dict[str, Any]], add_note: AddNote) -> None:
    conditions = {run: _get_conditions(evaluation) for run, evaluation in evaluations.items()}
    for name in dict.fromkeys(name for own in conditions.values() for name in own):
        _note_if_different(
            f"the {kind} differ in {name}", {run: str(own.get(name)) for run, own in conditions.items()}, add_note
        )


def _get_conditions(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return the conditions, by name, that compared evaluations should share. The last ones determine the questions."""
    return {
        "dtype": evaluation.get("dtype"),
        "device": evaluation.get("device"),
        "code": evaluation.get("code", {}).get("source"),
        "the seed of the questions": evaluation.get("seed"),
        "the text of the questions": evaluation.get("data_identity"),
        **({"tokenizer": evaluation["tokenizer"]} if "tokenizer" in evaluation else {}),
        **{f"data.{key} of the questions": value for key, value in evaluation.get("recall", {}).items()},
    }


def _note_not_evaluated(evaluations: dict[str, dict[str, Any]], add_note: AddNote) -> None:
    """Note tasks and ablations that a run was not evaluated on, or with another number of sequences than others."""
    counts = {run: _get_evaluated_counts(evaluation) for run, evaluation in evaluations.items()}
    reasons = {run: _get_skip_reasons(evaluation) for run, evaluation in evaluations.items()}
    lines: list[tuple[str, str]] = []
    for part in dict.fromkeys(part for group in (counts, reasons) for parts in group.values() for part in parts):
        missing = [run for run in evaluations if part not in counts[run]]
        lines += [(f"{part}: {reasons[run].get(part) or _explain_missing(part, evaluations[run])}", run) for run in missing]
        _note_if_different(
            f"{part}: different counts", {run: own[part] for run, own in counts.items() if part in own}, add_note
        )
    for line, runs in _group_values(lines).items():
        add_note(f"{line} ({runs})")


def _note_copies(kind: str, evaluations: dict[str, dict[str, Any]], add_note: AddNote) -> None:
    """Add a note on runs whose evaluations have the same losses and answers, to the last bit."""
    by_content: dict[str, list[str]] = {}
    for run, record in evaluations.items():
        parts = {name: record.get(name) for name in ("retrieval", "positions", "texts", "results")}
        if any(parts.values()):
            by_content.setdefault(json.dumps(parts, sort_keys=True), []).append(run)
    for runs in by_content.values():
        if len(runs) > 1:
            add_note(f"{kind} have the same losses and answers: all but one are copies ({', '.join(runs)})")


def _explain_missing(part: str, evaluation: dict[str, Any]) -> str:
    is_dense = evaluation.get("attention") == "dense" and part.startswith(ABLATIONS)
    return "dense attention has neither blocks nor branches" if is_dense else "not requested"


def _get_evaluated_counts(evaluation: dict[str, Any]) -> dict[str, str]:
    """Return how much was evaluated: of needles and RULER by task and length, of ablations by length."""
    cells: dict[str, list[tuple[str, str]]] = {}
    for cell in evaluation.get("retrieval", []):
        cells.setdefault(_format_task(cell), []).append((str(cell["sequences"]), f"{cell['depth']:g}"))
    needles = {
        task: ", ".join(f"{count} at depths {depths}" for count, depths in _group_values(own).items())
        for task, own in cells.items()
    }
    parts = [part for part in evaluation.get("selection", []) if part["interventions"]]
    ruler = {_format_task(cell): f"{cell['questions']} questions" for cell in evaluation.get("results", [])}
    return needles | ruler | {_format_ablations(part): f"{part['sequences']} sequences" for part in parts}


def _get_skip_reasons(evaluation: dict[str, Any]) -> dict[str, str]:
    """Return the parts that an evaluation skipped, with its reasons."""
    needles = {_format_task(row): f"skipped: {row['why']}" for row in evaluation.get("not_asked", [])}
    parts = [part for part in evaluation.get("selection", []) if not part["interventions"]]
    return needles | {_format_ablations(part): str(part.get("why_not")) for part in parts}


def _format_task(cell: dict[str, Any]) -> str:
    return f"{cell['task']} at {cell['length']:,}"


def _format_ablations(part: dict[str, Any]) -> str:
    return f"{ABLATIONS} at {part['length']:,}"


def _list_evaluations(models: Sequence[ModelRuns]) -> dict[str, dict[str, Any]]:
    """Return the evaluations by run name."""
    return {model.runs[seed].name: evaluation for model in models for seed, evaluation in model.evaluated.items()}


def _list_rulers(models: Sequence[ModelRuns]) -> dict[str, dict[str, Any]]:
    """Return the results of RULER's tasks by run name."""
    return {model.runs[seed].name: record for model in models for seed, record in model.with_ruler.items()}


def _note_if_different(subject: str, value_by_run: dict[str, str], add_note: AddNote) -> None:
    values = _group_values((value, run) for run, value in value_by_run.items())
    if len(values) > 1:
        add_note(f"{subject}: " + "; ".join(f"{value} ({runs})" for value, runs in values.items()))


def _group_values(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Group pairs by their first element: (a, x), (a, y) becomes {a: "x, y"}. Order is preserved."""
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return {key: ", ".join(values) for key, values in groups.items()}
