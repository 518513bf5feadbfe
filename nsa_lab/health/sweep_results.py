"""Results of a sweep per variant: the last validation, its confidence interval, and the difference to the baseline.

Confidence intervals are over seeds. Runs with the same seed are averaged first; their standard deviation is reported
separately. Evaluations on different texts or at different lengths are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsa_lab.health.paired_difference import PairedDifference, compute_paired_difference
from nsa_lab.runs.directory import DONE
from nsa_lab.runs.history import History, collect_facts, compute_cumulative_step_time, compute_step_time
from nsa_lab.runs.sweep_runner import Sweep, SweepRunState


@dataclass(frozen=True)
class SeedMean:
    """Mean over seeds in bits per byte and the half-width of its 95% confidence interval; None for a single seed."""

    mean: float
    half: float | None
    seeds: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> SeedMean | None:
        """Compute the mean of one value per seed; None without values."""
        if not values:
            return None
        difference = compute_paired_difference("", np.array(values), np.zeros(len(values)))
        return cls(
            float(np.mean(values)), difference.half_width if isinstance(difference, PairedDifference) else None, len(values)
        )


@dataclass(frozen=True)
class RunResult:
    """A run of a sweep with the validation at its last step. `bpb` and `text` are None if that step was not evaluated.

    `text`: identifier of the evaluated text. `seconds`: step time (`compute_step_time`).
    """

    run: str
    seed: int
    repeat: int
    state: str | None
    bpb: float | None = None
    text: str | None = None
    seconds: float | None = None
    parameters: int | None = None

    @classmethod
    def from_run(cls, run: SweepRunState, history: History | None) -> RunResult:
        """Read the results of a run; without `history` only its name, seed and state are known."""
        identity = run.name, run.requested.seed, run.requested.repeat, run.state
        if history is None:
            return cls(*identity)
        last = history.evaluations[-1] if history.evaluations else None
        bpb = last.get("bpb") if last and last["step"] == history.config.train.steps else None
        return cls(
            *identity,
            bpb=bpb,
            text=history.describe_eval_text(last) if last and bpb is not None else None,
            seconds=compute_step_time(history),
            parameters=collect_facts(history).parameters,
        )


@dataclass(frozen=True)
class Curve:
    """Validation curve of a variant's finished runs: mean, lowest and highest bpb against tokens and seconds."""

    variant: str
    seeds: int
    tokens: list[int]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class VariantResult:
    """Results of the finished runs of a variant.

    `repeat_std`: standard deviation of runs with the same seed, pooled over seeds. `less_baseline`: variant minus baseline,
    paired by seed. `seconds`: mean over runs. `notes`: values that could not be computed, with the reasons.
    """

    name: str
    overrides: dict[str, Any]
    runs: list[RunResult]
    parameters: int | None
    tokens: int
    seconds: float | None
    bpb: SeedMean | None
    repeat_std: float | None
    less_baseline: SeedMean | None
    notes: list[str]
    curve: Curve | None

    @property
    def n_done(self) -> int:
        return sum(run.state == DONE for run in self.runs)


def collect_results(sweep: Sweep) -> list[VariantResult]:
    """Return one result per variant, the baseline first."""
    results: list[VariantResult] = []
    states = sweep.get_run_states()
    for variant, overrides in sweep.config.variants.items():
        own = [run for run in states if run.requested.variant == variant]
        histories = {run.name: History.read(run.run_dir) for run in own if run.run_dir and run.state == DONE}
        runs = [RunResult.from_run(run, histories.get(run.name)) for run in own]
        tokens = own[0].requested.config.train.tokens
        results.append(_build_result(variant, overrides, runs, tokens, histories, results[0].runs if results else None))
    return results


def _build_result(
    variant: str,
    overrides: dict[str, Any],
    runs: list[RunResult],
    tokens: int,
    histories: Mapping[str, History],
    baseline: list[RunResult] | None,
) -> VariantResult:
    bpb_by_seed, texts = _group_by_seed(runs), _get_texts(runs)
    has_mean = len(texts) == 1
    # A baseline without evaluations does not prevent the curve.
    is_comparable = has_mean and (not baseline or not _get_texts(baseline) or texts == _get_texts(baseline))
    difference = _compute_difference(bpb_by_seed, _group_by_seed(baseline)) if is_comparable and baseline else None
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return VariantResult(
        name=variant,
        overrides=overrides,
        runs=runs,
        parameters=next((run.parameters for run in runs if run.parameters), None),
        tokens=tokens,
        seconds=float(np.mean(seconds)) if seconds else None,
        bpb=SeedMean.from_values([float(np.mean(values)) for values in bpb_by_seed.values()]) if has_mean else None,
        repeat_std=_compute_seed_std(bpb_by_seed) if has_mean else None,
        less_baseline=difference,
        notes=_make_notes(runs, texts, is_comparable, difference),
        curve=compute_curve(variant, [histories[run.run] for run in runs if run.bpb is not None])
        if is_comparable
        else None,
    )


def _group_by_seed(runs: Sequence[RunResult]) -> dict[int, list[float]]:
    bpb_by_seed: dict[int, list[float]] = {}
    for run in runs:
        if run.bpb is not None:
            bpb_by_seed.setdefault(run.seed, []).append(run.bpb)
    return bpb_by_seed


def _get_texts(runs: Sequence[RunResult]) -> set[str]:
    return {run.text for run in runs if run.text is not None}


def _compute_difference(variant: dict[int, list[float]], baseline: dict[int, list[float]]) -> SeedMean | None:
    return SeedMean.from_values(
        [float(np.mean(variant[seed]) - np.mean(baseline[seed])) for seed in variant if seed in baseline]
    )


def _compute_seed_std(bpb_by_seed: dict[int, list[float]]) -> float | None:
    """Return the pooled standard deviation within seeds; None if no seed has two runs."""
    n_free = sum(len(values) - 1 for values in bpb_by_seed.values())
    squares = sum(float(((np.array(values) - np.mean(values)) ** 2).sum()) for values in bpb_by_seed.values())
    return (squares / n_free) ** 0.5 if n_free else None


def _make_notes(runs: list[RunResult], texts: set[str], is_comparable: bool, difference: SeedMean | None) -> list[str]:
    notes = []
    if len(texts) > 1:
        notes.append("runs evaluated on different texts: no mean")
    elif texts and not is_comparable:
        notes.append("evaluated on another text or at another length than the baseline: not compared")
    if len(texts) == 1 and len(_group_by_seed(runs)) == 1:
        notes.append("single seed: no interval")
    if difference and difference.half is not None and abs(difference.mean) <= difference.half:
        notes.append("difference to the baseline not significant")
    if unevaluated := [run.run for run in runs if run.state == DONE and run.bpb is None]:
        notes.append(f"not evaluated at the end and omitted: {', '.join(unevaluated)}")
    return notes


def compute_curve(variant: str, runs: list[History]) -> Curve:
    """Compute the validation curve of evaluated runs at the steps that all runs evaluated on the text of their last one.

    Step 0 is omitted, because its loss is far above all others.
    """
    bpb_by_step = [_get_bpb_by_step(run) for run in runs]
    steps = sorted(set.intersection(*map(set, bpb_by_step)) - {0})
    values = np.array([[bpb[step] for step in steps] for bpb in bpb_by_step])
    seeds = np.array([run.config.train.seed for run in runs])
    seed_means = np.array([values[seeds == seed].mean(axis=0) for seed in np.unique(seeds)])
    times = np.array([np.interp(steps, *compute_cumulative_step_time(run)) for run in runs])
    return Curve(
        variant,
        seeds=len(seed_means),
        tokens=[runs[0].config.train.tokens_until(step) for step in steps],
        seconds=times.mean(axis=0).tolist(),
        mean=seed_means.mean(axis=0).tolist(),
        low=values.min(axis=0).tolist(),
        high=values.max(axis=0).tolist(),
    )


def _get_bpb_by_step(run: History) -> dict[int, float]:
    text = run.describe_eval_text(run.evaluations[-1])
    events = [event for event in run.evaluations if run.describe_eval_text(event) == text]
    return {event["step"]: bpb for event in events if (bpb := event.get("bpb")) is not None}
