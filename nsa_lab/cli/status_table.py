"""Tables and JSON of `nsa-lab status`, for one run or all runs.

The verdict is the one that `nsa-lab health` or a report recorded. It is shown only if the record is still the same.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from nsa_lab.config import RunConfig
from nsa_lab.health.next_actions import list_advice
from nsa_lab.health.verdict_file import read_verdict
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import READ_ERRORS, RunDirectoryError, describe_read_error
from nsa_lab.runs.events import read_progress
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_facts
from nsa_lab.runs.tables import Table, TableColumn
from nsa_lab.runs.text_output import make_one_line

COLUMNS_WIDTH = 38  # of the columns after the run's id, without the speed
SPEED_WIDTH = 11
SPEED_READINGS = 8  # whose median is the speed of a run without a verdict


def summarize_run(run_dir: Path) -> dict[str, Any]:
    """Return the facts of a run (`history.Facts`), its state, reason, advice, directory, and verdict or None.

    Units: seconds, bytes, bits per byte.
    """
    history = History.read(run_dir)
    verdict = read_verdict(history)
    verdict_summary = _summarize_verdict(verdict)
    state = {"state": lifecycle.get_state(run_dir), "reason": history.status.get("reason"), "advice": list_advice(history)}
    return {**asdict(collect_facts(history)), **state, "verdict": verdict_summary, "folder": str(run_dir)}


def _summarize_verdict(verdict: dict[str, Any] | None) -> dict[str, Any] | None:
    return verdict and {key: verdict[key] for key in ("ok", "level", "headline")}


def list_runs(folder: Path, recorded: bool) -> list[Path]:
    """Return the user's runs or the recorded ones, newest first; runs that this user may not search are the last."""
    run_dirs = [path for path in reversed(resolve.list_run_dirs(folder)) if directory.is_recorded(path) == recorded]
    return run_dirs if recorded else [*run_dirs, *resolve.list_private_run_dirs(folder)]


def summarize_runs(folder: Path, *, recorded: bool = False) -> list[dict[str, Any]]:
    """Return the line of the table of each of the user's or the recorded runs in `folder` as an object, newest first.

    Keys: run, state, reason, step, steps, last_validation_bpb, tokens_per_s, verdict, folder, as in `summarize_run`, which
    reads the whole record. Of an unreadable run: its name, directory and problem.
    """
    summaries = []
    for run_dir in list_runs(folder, recorded):
        try:
            summaries.append(_summarize_briefly(run_dir))
        except READ_ERRORS as error:
            summaries.append({"run": run_dir.name, "folder": str(run_dir), "problem": describe_read_error(error)})
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

    One line per run; ids are never truncated. The speed is left out if it does not fit into `width` columns. Each run is
    read separately: one that cannot be read has a line with the reason below the table.
    """
    run_dirs = list_runs(folder, recorded)
    ids = [make_one_line(run_dir.name) for run_dir in run_dirs]
    longest = max(map(len, ids), default=0)
    show_speed = longest + COLUMNS_WIDTH + SPEED_WIDTH <= width
    names = ("run", "state", "step", "bpb", *(("tokens/s",) if show_speed else ()), "verdict")
    columns = [
        TableColumn(name, "right" if name in ("step", "bpb", "tokens/s") else "left", is_whole=True) for name in names
    ]
    rows, problems = [], []
    for run_id, run_dir in zip(ids, run_dirs, strict=True):
        try:
            rows.append([run_id, *_format_row(run_dir, show_speed)])
        except READ_ERRORS as error:
            rows.append([run_id, "?", *[""] * (len(names) - 2)])
            problems.append(Text(f"{run_id}: {describe_read_error(error)}", style="yellow", overflow="fold"))
    lines: list[Any] = [Table(columns, rows)] if rows else [Text(f"no runs in {folder}; start one with nsa-lab run smoke")]
    if not recorded and (count := len(list_runs(folder, recorded=True))):
        lines.append(f"{count} recorded runs; list them with nsa-lab status --recorded")
    needed = sum(max(map(len, column)) + 2 for column in zip(names, *rows, strict=True))
    return [*lines, *problems], max(needed, width)


def _summarize_briefly(run_dir: Path) -> dict[str, Any]:
    """Return a run's facts from its verdict, if that is of the present record, else from the end of its events."""
    status = directory.read_status(run_dir)
    state, verdict = lifecycle.get_state(run_dir, status), read_verdict(run_dir)
    facts = verdict["facts"] if verdict else _read_quick_facts(run_dir, status.get("step", 0))
    return {
        "run": run_dir.name,
        "state": state,
        "reason": status.get("reason"),
        "step": facts["step"],
        "steps": facts["steps"],
        "last_validation_bpb": facts["validation_bpb"],
        "tokens_per_s": facts["tokens_per_s"][-1] if facts["tokens_per_s"] else None,
        "verdict": _summarize_verdict(verdict),
        "folder": str(run_dir),
    }


def _format_row(run_dir: Path, show_speed: bool) -> list[str]:
    """Return a run's cells."""
    own = _summarize_briefly(run_dir)
    bpb, tokens_per_s, verdict = (own[key] for key in ("last_validation_bpb", "tokens_per_s", "verdict"))
    loss = "–" if bpb is None else f"{bpb:.3f}"
    speed = ["–" if tokens_per_s is None else f"{tokens_per_s:,.0f}"] if show_speed else []
    result = _shorten_headline(verdict["headline"]) if verdict else "not checked yet"
    return [own["state"], f"{own['step']:,}", loss, *speed, result]


def _shorten_headline(headline: str) -> str:
    """Return the beginning of a headline: `healthy`, `2 warnings`, `trial run, no failures` or `NOT healthy`."""
    return headline.partition(":")[0].removeprefix("passed with ")


def _read_quick_facts(run_dir: Path, recorded_step: int = 0) -> dict[str, Any]:
    """Return the steps, the last validation loss and the median of the last speeds of a run.

    `recorded_step`: the last one according to its status.
    """
    train = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG).train
    progress = read_progress(run_dir, train.steps, SPEED_READINGS)
    if max(recorded_step, progress.latest) > train.steps:
        raise RunDirectoryError(
            f"{directory.CONFIG} has {train.steps:,} steps, but a later step is recorded; restore the file that was changed"
        )
    by_stage: dict[int, list[float]] = {}
    for step, speed in sorted(progress.speeds.items()):
        by_stage.setdefault(train.locate_step(step)[0], []).append(speed)
    return {
        "step": progress.step,
        "steps": train.steps,
        "validation_bpb": progress.validation_bpb,
        "tokens_per_s": [statistics.median(speeds) for speeds in by_stage.values()],
    }


def format_verdict(history: History) -> str:
    """Return the headline of the verdict, or the command that produces one."""
    verdict = read_verdict(history)
    return verdict["headline"] if verdict else f"not checked yet: nsa-lab health {history.run}"
