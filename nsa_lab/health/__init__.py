"""Was this run healthy? Verdicts on a run directory, each with a threshold that can fail. Reads files only.

A verdict is True, False, or None where the run does not say. A run is healthy if no verdict is False; the first line
names the first that is, causes before consequences. What should have been recorded and was not is False; None is what was
not due, or cannot be told from so short a run. `verdict.Limits` holds every threshold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa_lab.health import branches, learning, pace, record, run, selection, steps
from nsa_lab.health.verdict import LIMITS, Limits, Verdict
from nsa_lab.runs import directory
from nsa_lab.runs.files import write_text
from nsa_lab.runs.history import History

__all__ = ["CHECKS", "LIMITS", "Health", "Limits", "Verdict", "as_record", "examine", "verdicts", "write_verdict"]

# In the order of the report: causes before consequences.
CHECKS: tuple[Callable[[History, Limits], Verdict | None], ...] = (
    run.finished,
    record.one_run,
    run.guards,
    run.finite,
    run.errors,
    run.stalls,
    run.preflight,
    record.heartbeats,
    record.clock,
    record.evaluations,
    record.statistics,
    learning.gradients,
    learning.loss_fell,
    learning.training_loss,
    learning.no_leak,
    learning.loss_kept,
    learning.generalises,
    steps.steps_counted_once,
    learning.learning_rate,
    steps.checkpoints,
    branches.gates_moved,
    branches.gates_alive,
    branches.branch_outputs,
    selection.selection_finds,
    selection.selection_chooses,
    selection.selection_reaches,
    selection.sink_share,
    pace.throughput,
    pace.data_wait,
    pace.memory,
)


@dataclass(frozen=True)
class Health:
    """The verdicts on one run."""

    run: str
    state: str
    verdicts: list[Verdict]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.ok is False]

    @property
    def headline(self) -> str:
        """One line: healthy, healthy so far, or NOT healthy and the first thing that fails."""
        if self.failed:
            return f"NOT healthy: {self.failed[0].name}: {self.failed[0].text}"
        return "healthy" if self.state == directory.DONE else f"healthy so far: {self.verdicts[0].text}"


def examine(run_dir: str | Path | History, limits: Limits = LIMITS) -> Health:
    """All verdicts on a run directory. Raises `RunDirectoryError` if it is none."""
    history = History.read(run_dir)
    found = [verdict for check in CHECKS if (verdict := check(history, limits)) is not None]
    finished = next(verdict for verdict in found if verdict.name == "finished")
    # A run that ended badly says so first only if nothing else explains why.
    causes = [verdict for verdict in found if verdict is not finished]
    if finished.ok is False and any(verdict.ok is False for verdict in causes):
        found = [*causes, finished]
    return Health(history.run, history.status.get("status", "unknown"), found)


def as_record(health: Health) -> dict[str, Any]:
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
        "verdicts": [plain(verdict) for verdict in health.verdicts],
    }


def write_verdict(run_dir: str | Path | History) -> Path:
    """Write what `examine` says to `verdict.json` in the run directory."""
    history = History.read(run_dir)
    file = history.run_dir / directory.VERDICT
    write_text(file, json.dumps(as_record(examine(history)), indent=1, ensure_ascii=False) + "\n")
    return file


def verdicts(run_dir: str | Path | History, limits: Limits = LIMITS) -> list[Verdict]:
    """`examine(run_dir).verdicts`."""
    return examine(run_dir, limits).verdicts
