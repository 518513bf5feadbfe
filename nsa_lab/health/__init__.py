"""Was this run healthy? Verdicts on a run directory, each with a threshold that can fail. Reads files only.

A verdict is True, False, or None where the run does not say. A run is healthy if no verdict is False; the first line
names the first that is, causes before consequences. What should have been recorded and was not is False; None is what was
not due, or cannot be told from so short a run. `verdict.Limits` holds every threshold.
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
    """The verdicts on one run."""

    run: str
    state: str
    verdicts: list[Verdict]
    trial_reason: str | None = None  # why the run is too short to say what its model can do

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.ok is False]

    @property
    def counts(self) -> str:
        """`28 of 30 hold, 2 not judged`: what a verdict is worth."""
        held, failed, unknown = (sum(v.ok is answer for v in self.verdicts) for answer in (True, False, None))
        rest = [f"{failed} fail"] * bool(failed) + [f"{unknown} not judged"] * bool(unknown)
        return ", ".join([f"{held} of {len(self.verdicts)} hold", *rest])

    @property
    def headline(self) -> str:
        """One line: healthy, no fault found in a trial, healthy so far, or NOT healthy and the first thing that fails."""
        if self.failed:
            return f"NOT healthy: {self.failed[0].name}: {self.failed[0].text}"
        if self.state != directory.DONE:
            return f"healthy so far: {self.verdicts[0].text}"
        if self.trial_reason:
            return (
                f"a trial, and no fault in it: {self.counts}. Too short to say what the model can do: {self.trial_reason}"
            )
        return f"healthy: {self.counts}"


def examine(run_dir: str | Path | History, limits: Limits = LIMITS) -> Health:
    """All verdicts on a run directory. Raises `RunDirectoryError` if it is none."""
    history = History.read(run_dir)
    found = [_reject_nan(verdict) for check in CHECKS if (verdict := check(history, limits)) is not None]
    finished = next(verdict for verdict in found if verdict.name == "finished")
    # A run that ended badly says so first only if nothing else explains why.
    causes = [verdict for verdict in found if verdict is not finished]
    if finished.ok is False and any(verdict.ok is False for verdict in causes):
        found = [*causes, finished]
    return Health(history.run, history.status.get("status", "unknown"), found, explain_trial(history, limits))


def _reject_nan(verdict: Verdict) -> Verdict:
    """No comparison with what is no number is ever true, so that none finds a fault in it: it holds nothing, either."""
    if verdict.ok and verdict.value is not None and math.isnan(verdict.value):
        return replace(verdict, ok=None, text="not judged: a reading holds no number")
    return verdict


def to_record(health: Health) -> dict[str, Any]:
    """The verdicts as they stand in `verdict.json`; a number that is not finite is null."""

    def plain(verdict: Verdict) -> dict[str, Any]:
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
        "verdicts": [plain(verdict) for verdict in health.verdicts],
    }


def write_verdict(run_dir: str | Path | History) -> Path:
    """Write what `examine` says to `verdict.json` in the run directory."""
    history = History.read(run_dir)
    file = history.run_dir / directory.VERDICT
    write_text(file, json.dumps(to_record(examine(history)), indent=1, ensure_ascii=False) + "\n")
    return file


def read_verdict(run: str | Path | History) -> dict[str, Any] | None:
    """What `write_verdict` wrote of the run as it stands; None where it was never judged, or has gone on since."""
    history = History.read(run)
    told = read_json(history.run_dir / directory.VERDICT)
    finished = next((v for v in told.get("verdicts", []) if v.get("name") == "finished"), {})
    current = told.get("state") == history.status.get("status") and finished.get("value") == history.last_step
    return told if current else None


def list_verdicts(run_dir: str | Path | History, limits: Limits = LIMITS) -> list[Verdict]:
    """`examine(run_dir).verdicts`."""
    return examine(run_dir, limits).verdicts
