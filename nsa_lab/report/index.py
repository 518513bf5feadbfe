"""Write `index.html` of an outputs folder: all runs, newest first, with links to their reports.

The page is one file and loads nothing. Verdicts come from the last report of each run. They are not computed again,
because that reads whole checkpoints.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from nsa_lab.health.verdict_file import read_verdict
from nsa_lab.report.sanitize import POLICY
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.atomic_io import write_text
from nsa_lab.runs.directory import READ_ERRORS, describe_read_error
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_duration, format_settings, format_speed

INDEX = "index.html"
TEMPLATES = Path(__file__).resolve().parent / "templates"
STATE_CLASSES = {directory.DONE: "ok", directory.HALTED: "bad", "DEAD": "bad"}


def write_index(outputs: str | Path) -> Path:
    """Write `index.html` into the folder and return its path. A run that cannot be read is listed with the reason."""
    folder = Path(outputs)
    templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    style = (TEMPLATES / "run" / "style.css").read_text(encoding="utf-8")
    rows = [_summarize_run(run) for run in reversed(resolve.list_own_run_dirs(folder))]
    page = folder / INDEX
    write_text(page, templates.get_template("runs.html.j2").render(rows=rows, style=style, policy=POLICY))
    return page


def _summarize_run(run_dir: Path) -> dict[str, Any]:
    page = run_dir / "report.html"
    row = {"run": run_dir.name, "link": f"{run_dir.name}/{page.name}" if page.is_file() else None}
    try:
        return row | _collect_columns(run_dir)
    except READ_ERRORS as error:
        return row | {"problem": describe_read_error(error)}


def _collect_columns(run_dir: Path) -> dict[str, Any]:
    history = History.read(run_dir)
    run_facts = collect_facts(history)
    first, last = run_facts.first_validation_bpb, run_facts.last_validation_bpb
    state = history.state
    verdict = read_verdict(history) or {}
    return {
        "state": state,
        "verdict": verdict.get("headline", "not checked yet").partition(":")[0],
        "verdict_class": "open"
        if verdict.get("trial")
        else "warn"
        if verdict.get("level") == "warning"
        else {"True": "ok", "False": "bad"}.get(str(verdict.get("ok")), "open"),
        "model": f"{run_facts.attention}{f', {run_facts.parameters:,} parameters' if run_facts.parameters else ''}",
        "state_class": "open" if state is None else STATE_CLASSES.get(state, "open"),
        "settings": format_settings(history.config),
        "started": _format_start_date(history),
        "steps": f"{run_facts.step:,} of {run_facts.steps:,}",
        "validation": "" if last is None else f"{first:,.3f} → {last:,.3f}",
        "speed": format_speed(history) or "",
        "time": "" if run_facts.wall_s is None else format_duration(run_facts.wall_s),
    }


def _format_start_date(history: History) -> str:
    start_events = history.events_of_kind("start", "resume")
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start_events[0]["t"])) if start_events else ""
