"""Tables and JSON of `nsa-lab status`, for one run or all runs.

The verdict is the one recorded by the last report. A run that continued after that report has no verdict.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from nsa_lab.config import ConfigError
from nsa_lab.health import read_verdict
from nsa_lab.health.next_actions import list_advice
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_facts, format_speed
from nsa_lab.runs.tables import Column, Table

COLUMNS_WIDTH = 38  # of the columns after the run's id, without the speed
SPEED_WIDTH = 11
READ_ERRORS = (RunDirectoryError, ConfigError, OSError)


def summarize_run(run_dir: Path) -> dict[str, Any]:
    """Return the facts of a run (`history.Facts`), its state, reason, advice, directory, and verdict or None.

    Units: seconds, bytes, bits per byte.
    """
    history = History.read(run_dir)
    verdict = read_verdict(history)
    verdict_summary = verdict and {"ok": verdict.get("ok"), "headline": verdict.get("headline")}
    state = {"state": lifecycle.get_state(run_dir), "reason": history.status.get("reason"), "advice": list_advice(history)}
    return {**asdict(collect_facts(history)), **state, "verdict": verdict_summary, "folder": str(run_dir)}


def list_runs(folder: Path, recorded: bool) -> list[Path]:
    """Return the user's runs or the recorded ones, newest first."""
    return [path for path in reversed(resolve.list_run_dirs(folder)) if directory.is_recorded(path) == recorded]


def summarize_runs(folder: Path, *, recorded: bool = False) -> list[dict[str, Any]]:
    """Return `summarize_run` of the user's or the recorded runs in `folder`, newest first; of an unreadable run its name,
    directory and problem."""
    summaries = []
    for run_dir in list_runs(folder, recorded):
        try:
            summaries.append(summarize_run(run_dir))
        except READ_ERRORS as error:
            summaries.append({"run": run_dir.name, "folder": str(run_dir), "problem": str(error)})
    return summaries


def build_run_table(run_dir: Path) -> tuple[Table, list[str]]:
    """Return the table of one run and its advice: verdict, facts, directory.

    A run that ended early also has the reason in the table; its advice is a list of lines, otherwise empty.
    """
    lifecycle.get_state(run_dir)  # raises if the status belongs to another run
    history = History.read(run_dir)
    advice = list_advice(history)
    reason_rows = [("reason", history.status.get("reason") or "not recorded in its status")] if advice else []
    rows = [("verdict", format_verdict(history)), *reason_rows, *format_facts(history), ("folder", str(run_dir))]
    return Table(("", history.run), rows), advice


def render_runs(folder: Path, width: int, *, recorded: bool = False) -> tuple[list[Any], int]:
    """Return what `nsa-lab status` prints of the user's or the recorded runs, newest first, and the width that it needs.

    One line per run; ids are never truncated. The speed is left out if it does not fit into `width` columns.
    """
    run_dirs = list_runs(folder, recorded)
    needed = max((len(run_dir.name) for run_dir in run_dirs), default=0) + COLUMNS_WIDTH
    show_speed = needed + SPEED_WIDTH <= width
    names = ("run", "state", "step", "bpb", *(("tokens/s",) if show_speed else ()), "verdict")
    columns = [Column(name, "right" if name in ("step", "bpb", "tokens/s") else "left", is_whole=True) for name in names]
    rows, problems = [], []
    for run_dir in run_dirs:
        try:
            rows.append([run_dir.name, *_format_row(run_dir, show_speed)])
        except READ_ERRORS as error:
            rows.append([run_dir.name, "?"])
            problems.append(Text(f"{run_dir.name}: {error}", style="yellow", overflow="fold"))
    lines: list[Any] = [Table(columns, rows)] if run_dirs else [f"no runs in {folder}; start one with nsa-lab run smoke"]
    if not recorded and (count := len(list_runs(folder, recorded=True))):
        lines.append(f"{count} recorded runs; list them with nsa-lab status --recorded")
    return [*lines, *problems], max(needed, width)


def _format_row(run_dir: Path, show_speed: bool) -> list[str]:
    state, history = lifecycle.get_state(run_dir), History.read(run_dir)
    bpb = collect_facts(history).last_validation_bpb
    loss = "–" if bpb is None else f"{bpb:.3f}"
    verdict = format_verdict(history).partition(":")[0]
    speed = [(format_speed(history) or "–").split(",  then")[0]] if show_speed else []
    return [state, f"{history.last_step:,}", loss, *speed, verdict]


def format_verdict(history: History) -> str:
    """Return the headline of the verdict, or the command that produces one."""
    verdict = read_verdict(history)
    return verdict["headline"] if verdict else f"not checked yet: nsa-lab report {history.run}"
