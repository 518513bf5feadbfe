"""How runs stand, for `nsa-lab status`: one run, all runs, as text or as JSON.

The verdict is the one that a report wrote last; a run that went on since counts as not judged.
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

MIN_TABLE_WIDTH = 120  # names of runs are to be copied whole; a narrower terminal wraps the line
READ_ERRORS = (RunDirectoryError, ConfigError, OSError)


def summarize_run(run_dir: Path) -> dict[str, Any]:
    """`history.Facts` of a run, its state and why, what to do about it, its folder, and its verdict or None.

    Seconds, bytes, bits per byte.
    """
    history = History.read(run_dir)
    verdict = read_verdict(history)
    judged = verdict and {"ok": verdict.get("ok"), "headline": verdict.get("headline")}
    stands = {"state": lifecycle.get_state(run_dir), "reason": history.status.get("reason"), "advice": list_advice(history)}
    return {**asdict(collect_facts(history)), **stands, "verdict": judged, "folder": str(run_dir)}


def summarize_runs(folder: Path) -> list[dict[str, Any]]:
    """`told` of each run in the folder, oldest first; of one that cannot be read its folder and the problem."""
    found = []
    for run_dir in resolve.list_run_dirs(folder):
        try:
            found.append(summarize_run(run_dir))
        except READ_ERRORS as error:
            found.append({"run": run_dir.name, "folder": str(run_dir), "problem": str(error)})
    return found


def build_run_table(run_dir: Path) -> tuple[Table, list[str]]:
    """One run: its verdict, its facts and its folder; of one that is not done and does not go on, why, and what to do, in
    lines of their own."""
    lifecycle.get_state(run_dir)  # refuses a status that belongs to another run
    history = History.read(run_dir)
    table = Table("", history.run, show_header=True, box=None)
    told = list_advice(history)
    why = [("why", history.status.get("reason") or "its status does not say")] if told else []
    rows = [("verdict", format_verdict(history)), *why, *format_facts(history), ("folder", str(run_dir))]
    for name, value in rows:
        table.add_row(name, Text(value, overflow="fold"))
    return table, told


def render_runs(folder: Path) -> Iterator[Any]:
    """A line for each run, then what is wrong with those that cannot be read."""
    table, problems = Table("run", "state", "step", "bits per byte", "tokens/s", "verdict", box=None), []
    for run_dir in resolve.list_run_dirs(folder):
        try:
            table.add_row(run_dir.name, *_format_row(run_dir))
        except READ_ERRORS as error:
            table.add_row(run_dir.name, "?")
            problems.append(Text(str(error), style="yellow", overflow="fold"))
    yield table if table.row_count else f"no runs in {folder}; nsa-lab run smoke makes one"
    yield from problems


def _format_row(run_dir: Path) -> list[str]:
    state, history = lifecycle.get_state(run_dir), History.read(run_dir)
    bpb = collect_facts(history).last_validation_bpb
    loss = "–" if bpb is None else f"{bpb:.3f}"
    short = format_verdict(history).partition(":")[0]
    return [state, f"{history.last_step:,}", loss, format_speed(history) or "–", short]


def format_verdict(history: History) -> str:
    """The headline of the verdict, or what to do for one."""
    verdict = read_verdict(history)
    return verdict["headline"] if verdict else f"not judged yet: nsa-lab report {history.run}"
