"""Tables and JSON of `nsa-lab status`, for one run or all runs.

The verdict is the one recorded by the last report. A run that continued after that report has no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from nsa_lab.config import ConfigError
from nsa_lab.health import read_verdict
from nsa_lab.health.next_actions import list_advice
from nsa_lab.runs import lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_facts, format_speed

MIN_TABLE_WIDTH = 120  # do not truncate run names; a narrower terminal wraps the line
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


def summarize_runs(folder: Path) -> list[dict[str, Any]]:
    """Return `summarize_run` of each run in `folder`, oldest first; name, directory and problem if unreadable."""
    summaries = []
    for run_dir in resolve.list_run_dirs(folder):
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
    table = Table("", history.run, show_header=True, box=None)
    advice = list_advice(history)
    reason_rows = [("reason", history.status.get("reason") or "not recorded in its status")] if advice else []
    rows = [("verdict", format_verdict(history)), *reason_rows, *format_facts(history), ("folder", str(run_dir))]
    for name, value in rows:
        table.add_row(name, Text(value, overflow="fold"))
    return table, advice


def render_runs(folder: Path) -> Iterator[Any]:
    """Yield a table with one row per run, then the problem of each unreadable run."""
    table, problems = Table("run", "state", "step", "bits per byte", "tokens/s", "verdict", box=None), []
    for run_dir in resolve.list_run_dirs(folder):
        try:
            table.add_row(run_dir.name, *_format_row(run_dir))
        except READ_ERRORS as error:
            table.add_row(run_dir.name, "?")
            problems.append(Text(str(error), style="yellow", overflow="fold"))
    yield table if table.row_count else f"no runs in {folder}; start one with nsa-lab run smoke"
    yield from problems


def _format_row(run_dir: Path) -> list[str]:
    state, history = lifecycle.get_state(run_dir), History.read(run_dir)
    bpb = collect_facts(history).last_validation_bpb
    loss = "–" if bpb is None else f"{bpb:.3f}"
    verdict = format_verdict(history).partition(":")[0]
    return [state, f"{history.last_step:,}", loss, format_speed(history) or "–", verdict]


def format_verdict(history: History) -> str:
    """Return the headline of the verdict, or the command that produces one."""
    verdict = read_verdict(history)
    return verdict["headline"] if verdict else f"not checked yet: nsa-lab report {history.run}"
