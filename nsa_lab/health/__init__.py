"""Health checks of a run directory, each with a threshold that can fail. Only files are read.

The level of a result is failed, warning, passed or unknown. A run passes if no check failed. Causes are reported before
consequences. A missing record that was due fails. Unknown means that nothing was due, or that the run is too short to
decide. `verdict.Limits` has all thresholds, docs/decisions.md the level of each check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_lab.health import (
    attempt_checks,
    branch_checks,
    completeness_checks,
    consistency_checks,
    conversion_checks,
    digest_checks,
    ending_checks,
    loss_checks,
    loss_course,
    record_checks,
    repetition_checks,
    run_checks,
    selection_checks,
    step_accounting,
    throughput_checks,
)
from nsa_lab.health.references import explain_trial
from nsa_lab.health.verdict import FAILED, LIMITS, PASSED, UNKNOWN, WARNING, Limits, Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.history import History

__all__ = [
    "CHECKS",
    "LIMITS",
    "Health",
    "Limits",
    "Verdict",
    "examine",
    "list_verdicts",
]

# In the order of the report: causes before consequences.
CHECKS: tuple[Callable[[History, Limits], Verdict | None], ...] = (
    run_checks.check_finished,
    record_checks.check_record_format,
    digest_checks.check_unchanged,
    record_checks.check_one_run,
    ending_checks.check_status_agrees,
    attempt_checks.check_attempts_agree,
    run_checks.check_guards,
    run_checks.check_finite,
    consistency_checks.check_consistent,
    repetition_checks.check_repeated_values,
    repetition_checks.check_layers_differ,
    run_checks.check_errors,
    run_checks.check_stalls,
    run_checks.check_preflight,
    completeness_checks.check_heartbeats,
    record_checks.check_clock,
    completeness_checks.check_evaluations,
    attempt_checks.check_evaluated_text,
    completeness_checks.check_statistics,
    loss_checks.check_gradients,
    loss_checks.check_loss_fell,
    loss_checks.check_training_loss,
    loss_course.check_loss_course,
    loss_course.check_structure,
    loss_checks.check_no_leak,
    loss_checks.check_loss_kept,
    loss_checks.check_generalization,
    step_accounting.check_steps_counted_once,
    loss_checks.check_learning_rate,
    step_accounting.check_checkpoints,
    branch_checks.check_gates_moved,
    branch_checks.check_gates_alive,
    branch_checks.check_branch_outputs,
    selection_checks.check_selection_finds,
    selection_checks.check_selection_varies,
    selection_checks.check_selection_distance,
    selection_checks.check_sink_share,
    throughput_checks.check_throughput,
    throughput_checks.check_data_wait,
    throughput_checks.check_memory,
    conversion_checks.check_teacher,
)
# In addition, of runs that convert a pretrained model (`RunConfig.is_conversion`).
CONVERSION_CHECKS: tuple[Callable[[History, Limits], Verdict], ...] = (
    conversion_checks.check_indexer_learns,
    conversion_checks.check_attention_mass,
    conversion_checks.check_converted_loss,
)


@dataclass(frozen=True)
class Health:
    """Results of all checks of one run."""

    run: str
    state: str
    verdicts: list[Verdict]
    trial_reason: str | None = None  # why the run is too short to judge its model; None if it is not

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def level(self) -> str:
        """The worst level: failed, warning or passed."""
        return FAILED if self.failed else WARNING if self.warnings else PASSED

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.level == FAILED]

    @property
    def warnings(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.level == WARNING]

    @property
    def counts(self) -> str:
        """Number of passed checks and of the others by level: `28 of 30 checks passed, 1 warning, 1 unknown`."""
        n_passed, n_failed, n_warnings, n_unknown = (
            sum(verdict.level == level for verdict in self.verdicts) for level in (PASSED, FAILED, WARNING, UNKNOWN)
        )
        others = [f"{n_failed} failed"] * bool(n_failed) + [_format_warnings(n_warnings)] * bool(n_warnings)
        others += [f"{n_unknown} unknown"] * bool(n_unknown)
        return ", ".join([f"{n_passed} of {len(self.verdicts)} checks passed", *others])

    @property
    def headline(self) -> str:
        """Summary in one line: NOT healthy and the first failure, healthy so far, a trial, with warnings, or healthy."""
        if self.failed:
            return f"NOT healthy: {self.failed[0].name}: {self.failed[0].text}"
        if self.state != directory.DONE:
            return f"healthy so far: {self.verdicts[0].text}"
        if self.trial_reason:
            return f"trial run, no failures: {self.counts}. Too short to judge the model: {self.trial_reason}"
        if self.warnings:
            names = ", ".join(verdict.name for verdict in self.warnings)
            return f"passed with {_format_warnings(len(self.warnings))}: {names}; {self.counts}"
        return f"healthy: {self.counts}"


def _format_warnings(count: int) -> str:
    return f"{count} warning{'s' * (count != 1)}"


def examine(run_dir: str | Path | History, limits: Limits = LIMITS) -> Health:
    """Run all checks on a run directory. Raises `RunDirectoryError` if it is not a run directory."""
    history = History.read(run_dir)
    checks = (*CHECKS, *CONVERSION_CHECKS) if history.config.is_conversion else CHECKS
    verdicts = [_reject_nan(verdict) for check in checks if (verdict := check(history, limits)) is not None]
    finished = next(verdict for verdict in verdicts if verdict.name == "finished")
    # An unfinished run is reported first only if no other failed check explains it.
    causes = [verdict for verdict in verdicts if verdict is not finished]
    if finished.ok is False and any(verdict.ok is False for verdict in causes):
        verdicts = [*causes, finished]
    return Health(history.run, history.status.get("status", "unknown"), verdicts, explain_trial(history, limits))


def _reject_nan(verdict: Verdict) -> Verdict:
    """Turn a passed check of a NaN value into an unknown one: comparisons with NaN are False, so it would never fail."""
    if verdict.ok and verdict.value is not None and math.isnan(verdict.value):
        return replace(verdict, ok=None, text="unknown: a reading is NaN")
    return verdict


def list_verdicts(run_dir: str | Path | History, limits: Limits = LIMITS) -> list[Verdict]:
    """Return `examine(run_dir).verdicts`."""
    return examine(run_dir, limits).verdicts
