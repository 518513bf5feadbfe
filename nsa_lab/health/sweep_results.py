"""What a sweep found, variant by variant: the last validation over seeds, with its noise, and beside the baseline.

A seed is what is drawn anew, so intervals are over seeds; runs of one seed are averaged first, and how far they lie apart
is told by itself. What was evaluated on different texts, or at different lengths, is compared nowhere.
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
    """A mean over seeds, bits per byte, and half of its 95 % interval; None of a single seed, which tells no noise."""

    mean: float
    half: float | None
    seeds: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> SeedMean | None:
        if not values:
            return None
        found = compute_paired_difference("", np.array(values), np.zeros(len(values)))
        return cls(float(np.mean(values)), found.half_width if isinstance(found, PairedDifference) else None, len(values))


@dataclass(frozen=True)
class RunResult:
    """A run of a sweep: its validation at its last step, and the text that was read. Both None where there is none.

    `seconds` are those of optimiser steps (`seconds_of_steps`).
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
        known = run.name, run.requested.seed, run.requested.repeat, run.state
        if history is None:
            return cls(*known)
        last = history.evaluations[-1] if history.evaluations else {}
        at_its_end = last.get("bpb") is not None and last["step"] == history.config.train.steps
        return cls(
            *known,
            bpb=last["bpb"] if at_its_end else None,
            text=history.describe_eval_text(last) if at_its_end else None,
            seconds=compute_step_time(history),
            parameters=collect_facts(history).parameters,
        )


@dataclass(frozen=True)
class Curve:
    """Validation at every evaluation of a variant's finished runs: mean, lowest and highest; over tokens, over seconds."""

    variant: str
    seeds: int
    tokens: list[int]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class VariantResult:
    """What the finished runs of a variant say. `apart` is the standard deviation of runs of one seed, pooled over seeds.

    `less_baseline` is paired seed by seed; `seconds` is a mean over runs; `notes` say what could not be told, and why.
    """

    name: str
    overrides: dict[str, Any]
    runs: list[RunResult]
    parameters: int | None
    tokens: int
    seconds: float | None
    bpb: SeedMean | None
    apart: float | None
    less_baseline: SeedMean | None
    notes: list[str]
    curve: Curve | None

    @property
    def n_done(self) -> int:
        return sum(run.state == DONE for run in self.runs)


def collect_results(sweep: Sweep) -> list[VariantResult]:
    """One for each variant, the baseline first."""
    found: list[VariantResult] = []
    standing = sweep.get_run_states()
    for variant, overrides in sweep.config.variants.items():
        own = [run for run in standing if run.requested.variant == variant]
        histories = {run.name: History.read(run.run_dir) for run in own if run.run_dir and run.state == DONE}
        runs = [RunResult.from_run(run, histories.get(run.name)) for run in own]
        tokens = own[0].requested.config.train.tokens
        found.append(_build_result(variant, overrides, runs, tokens, histories, found[0].runs if found else None))
    return found


def _build_result(
    variant: str,
    overrides: dict[str, Any],
    runs: list[RunResult],
    tokens: int,
    histories: Mapping[str, History],
    baseline: list[RunResult] | None,
) -> VariantResult:
    read, texts = _group_by_seed(runs), _get_texts(runs)
    has_mean = len(texts) == 1
    # A baseline that has not been read yet contradicts nobody.
    comparable = has_mean and (not baseline or not _get_texts(baseline) or texts == _get_texts(baseline))
    less = _compute_difference(read, _group_by_seed(baseline)) if comparable and baseline else None
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return VariantResult(
        name=variant,
        overrides=overrides,
        runs=runs,
        parameters=next((run.parameters for run in runs if run.parameters), None),
        tokens=tokens,
        seconds=float(np.mean(seconds)) if seconds else None,
        bpb=SeedMean.from_values([float(np.mean(values)) for values in read.values()]) if has_mean else None,
        apart=_compute_seed_std(read) if has_mean else None,
        less_baseline=less,
        notes=_make_notes(runs, texts, comparable, less),
        curve=compute_curve(variant, [histories[run.run] for run in runs if run.bpb is not None]) if comparable else None,
    )


def _group_by_seed(runs: Sequence[RunResult]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        if run.bpb is not None:
            found.setdefault(run.seed, []).append(run.bpb)
    return found


def _get_texts(runs: Sequence[RunResult]) -> set[str]:
    return {run.text for run in runs if run.text is not None}


def _compute_difference(ours: dict[int, list[float]], theirs: dict[int, list[float]]) -> SeedMean | None:
    return SeedMean.from_values([float(np.mean(ours[seed]) - np.mean(theirs[seed])) for seed in ours if seed in theirs])


def _compute_seed_std(by_seed: dict[int, list[float]]) -> float | None:
    """Within seeds, pooled; None where no seed has two runs."""
    freedom = sum(len(values) - 1 for values in by_seed.values())
    squares = sum(float(((np.array(values) - np.mean(values)) ** 2).sum()) for values in by_seed.values())
    return (squares / freedom) ** 0.5 if freedom else None


def _make_notes(runs: list[RunResult], texts: set[str], comparable: bool, less: SeedMean | None) -> list[str]:
    notes = []
    if len(texts) > 1:
        notes.append("its runs were evaluated on different texts, which have no mean")
    elif texts and not comparable:
        notes.append("evaluated on another text than the baseline, or at another length: not compared")
    if len(texts) == 1 and len(_group_by_seed(runs)) == 1:
        notes.append("a single seed has no interval")
    if less and less.half is not None and abs(less.mean) <= less.half:
        notes.append("no difference to the baseline can be told")
    if unread := [run.run for run in runs if run.state == DONE and run.bpb is None]:
        notes.append(f"not evaluated at their end, and left out: {', '.join(unread)}")
    return notes


def compute_curve(variant: str, runs: list[History]) -> Curve:
    """Of runs that were evaluated: at the steps that all of them read the text that they read last.

    Without step 0, far above all others.
    """
    told = [_get_bpb_by_step(run) for run in runs]
    steps = sorted(set.intersection(*map(set, told)) - {0})
    values = np.array([[of_run[step] for step in steps] for of_run in told])
    seeds = np.array([run.config.train.seed for run in runs])
    over_seeds = np.array([values[seeds == seed].mean(axis=0) for seed in np.unique(seeds)])
    times = np.array([np.interp(steps, *compute_cumulative_step_time(run)) for run in runs])
    return Curve(
        variant,
        seeds=len(over_seeds),
        tokens=[runs[0].config.train.tokens_until(step) for step in steps],
        seconds=times.mean(axis=0).tolist(),
        mean=over_seeds.mean(axis=0).tolist(),
        low=values.min(axis=0).tolist(),
        high=values.max(axis=0).tolist(),
    )


def _get_bpb_by_step(run: History) -> dict[int, float]:
    text = run.describe_eval_text(run.evaluations[-1])
    known = [event for event in run.evaluations if run.describe_eval_text(event) == text and event.get("bpb") is not None]
    return {event["step"]: event["bpb"] for event in known}
