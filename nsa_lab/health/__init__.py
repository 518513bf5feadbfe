"""Health checks of a run directory, each with a threshold that can fail. Only files are read.

The result of a check is True, False, or None (unknown). A run is healthy if no result is False. Failed checks are reported
with causes before consequences. A missing record that was due is False. None means that nothing was due, or that the run is
too short to decide. `verdict.Limits` has all thresholds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nsa_lab.health import (
    branch_checks,
    log_integrity,
    loss_checks,
    run_checks,
    selection_checks,
    step_accounting,
    throughput_checks,
)
from nsa_lab.health.references import explain_trial
from nsa_lab.health.verdict import LIMITS, Limits, Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import read_json, write_text
from nsa_lab.runs.history import History

__all__ = [
    "CHECKS",
    "LIMITS",
    "Health",
    "Limits",
    "Verdict",
    "examine",
    "list_verdicts",
    "read_verdict",
    "to_record",
    "write_verdict",
]

# In the order of the report: causes before consequences.
CHECKS: tuple[Callable[[History, Limits], Verdict | None], ...] = (
    run_checks.check_finished,
    log_integrity.check_one_run,
    run_checks.check_guards,
    run_checks.check_finite,
    run_checks.check_errors,
    run_checks.check_stalls,
    run_checks.check_preflight,
    log_integrity.check_heartbeats,
    log_integrity.check_clock,
    log_integrity.check_evaluations,
    log_integrity.check_statistics,
    loss_checks.check_gradients,
    loss_checks.check_loss_fell,
    loss_checks.check_training_loss,
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
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.ok is False]

    @property
    def counts(self) -> str:
        """Number of passed, failed and unknown checks: `28 of 30 checks passed, 2 unknown`."""
        n_passed, n_failed, n_unknown = (sum(v.ok is result for v in self.verdicts) for result in (True, False, None))
        others = [f"{n_failed} failed"] * bool(n_failed) + [f"{n_unknown} unknown"] * bool(n_unknown)
        return ", ".join([f"{n_passed} of {len(self.verdicts)} checks passed", *others])

    @property
    def headline(self) -> str:
        """Summary in one line: healthy, healthy so far, a trial without failures, or NOT healthy and the first failure."""
        if self.failed:
            return f"NOT healthy: {self.failed[0].name}: {self.failed[0].text}"
        if self.state != directory.DONE:
            return f"healthy so far: {self.verdicts[0].text}"
        if self.trial_reason:
            return f"trial run, no failures: {self.counts}. Too short to judge the model: {self.trial_reason}"
        return f"healthy: {self.counts}"


def examine(run_dir: str | Path | History, limits: Limits = LIMITS) -> Health:
    """Run all checks on a run directory. Raises `RunDirectoryError` if it is not a run directory."""
    history = History.read(run_dir)
    verdicts = [_reject_nan(verdict) for check in CHECKS if (verdict := check(history, limits)) is not None]
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


def to_record(health: Health) -> dict[str, Any]:
    """Return the content of `verdict.json`. Non-finite numbers are null."""

    def to_json(verdict: Verdict) -> dict[str, Any]:
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(verdict).items()
        }

    return {
        "run": health.run,
        "state": health.state,
        "ok": health.ok,
        "headline": health.headline,
        **({"trial": health.trial_reason} if health.trial_reason else {}),
        "verdicts": [to_json(verdict) for verdict in health.verdicts],
    }


def write_verdict(run_dir: str | Path | History) -> Path:
    """Write the results of `examine` to `verdict.json` in the run directory. Return its path."""
    history = History.read(run_dir)
    file = history.run_dir / directory.VERDICT
    write_text(file, json.dumps(to_record(examine(history)), indent=1, ensure_ascii=False) + "\n")
    return file


def read_verdict(run: str | Path | History) -> dict[str, Any] | None:
    """Return the content of `verdict.json`; None if it is missing or the run has continued since."""
    history = History.read(run)
    record = read_json(history.run_dir / directory.VERDICT)
    finished = next((v for v in record.get("verdicts", []) if v.get("name") == "finished"), {})
    is_current = record.get("state") == history.status.get("status") and finished.get("value") == history.last_step
    return record if is_current else None


def list_verdicts(run_dir: str | Path | History, limits: Limits = LIMITS) -> list[Verdict]:
    """Return `examine(run_dir).verdicts`."""
    return examine(run_dir, limits).verdicts
