"""Read the event log of a run. Standard library only; this module never writes.

Invariants
* `events.jsonl` is append-only, one JSON object per line. A killed process may leave one incomplete line. Readers skip it
  and any other line that is not an event, with a warning.
* Every event returned to a reader has a kind, a time, an attempt and a step.
* Attempts are numbered. An attempt that resumed at step s repeated every step after s, so events of earlier attempts about
  those steps are superseded (`drop_superseded`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nsa_lab.runs.atomic_io import warn_once
from nsa_lab.runs.directory import EVENTS, RUNNING, read_status

__all__ = [
    "Tail",
    "drop_superseded",
    "follow",
    "get_eval_events",
    "get_step_events",
    "infer_status",
    "read_events",
    "read_status",
]

Event = dict[str, Any]

# Kinds of events about one step. They are superseded if a later attempt repeats the step.
SUPERSEDED_KINDS = frozenset({"step", "eval", "reach", "checkpoint", "guard"})


def read_events(run_dir: str | Path) -> list[Event]:
    """Return all complete events of the run in the order of writing; empty if nothing has been written yet.

    `run_dir` may also be the path of an `events.jsonl` file.
    """
    path = Path(run_dir)
    path = path / EVENTS if path.is_dir() else path
    return _parse_events(path, path.read_bytes()) if path.exists() else []


def infer_status(events: list[Event]) -> dict[str, Any]:
    """Reconstruct the status of a run whose status.json is lost from its events; empty without events."""
    if not events:
        return {}
    last = max(events, key=lambda event: event["attempt"])["attempt"]
    own = [event for event in events if event["attempt"] == last]
    ending = next((e for e in reversed(own) if e["kind"] in ("end", "halt") and isinstance(e.get("status"), str)), {})
    outcome = {name: ending[name] for name in ("status", "exit_code", "reason") if name in ending}
    return {"status": RUNNING, "attempt": last, "step": own[-1]["step"], "tokens": own[-1].get("tokens", 0), **outcome}


def drop_superseded(events: list[Event]) -> list[Event]:
    """Return the events without those about steps that a later attempt repeated, so that each step counts once."""
    resumed_at: dict[int, int] = {}
    for event in events:
        if event["kind"] in ("start", "resume"):
            resumed_at[event["attempt"]] = event.get("from_step") or 0
    cut: dict[int, float] = {}
    lowest = float("inf")
    for attempt in sorted(resumed_at, reverse=True):
        cut[attempt] = lowest
        lowest = min(lowest, resumed_at[attempt])
    return [
        event
        for event in events
        if event["kind"] not in SUPERSEDED_KINDS or event["step"] <= cut.get(event["attempt"], float("inf"))
    ]


def get_step_events(events: list[Event]) -> list[Event]:
    """Return one `step` event per logged step, ascending."""
    by_step = {event["step"]: event for event in drop_superseded(events) if event["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def get_eval_events(events: list[Event], split: str = "validation") -> list[Event]:
    """Return one `eval` event of a split per evaluated step, ascending."""
    by_step = {e["step"]: e for e in drop_superseded(events) if e["kind"] == "eval" and e.get("split") == split}
    return [by_step[step] for step in sorted(by_step)]


class Tail:
    """Incremental reader of a growing event file. Returns a line once it is complete."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / EVENTS
        self._offset = 0

    def read(self) -> list[Event]:
        """Return the events completed since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return _parse_events(self._path, complete)


def follow(run_dir: str | Path, *, is_alive: Callable[[], bool], poll_s: float = 0.5) -> Iterator[Event]:
    """Yield all events so far, then new ones as they are written, until the trainer has exited and all are read."""
    tail = Tail(run_dir)
    while True:
        alive = is_alive()
        yield from tail.read()
        if not alive:
            return
        time.sleep(poll_s)


def _parse_events(path: Path, block: bytes) -> list[Event]:
    """Return the events in the lines of a block.

    Text after the last line end is still being written, or was left incomplete by a killed process: no warning.
    """
    lines = [line for line in block.split(b"\n") if line.strip()]
    parsed = [_parse_event(line) for line in lines]
    invalid = [line for line, event in zip(lines, parsed, strict=True) if event is None]
    if invalid and not block.endswith(b"\n"):
        invalid = invalid[:-1] if parsed[-1] is None else invalid
    if invalid:
        subject = f"{len(invalid)} lines are not events" if len(invalid) > 1 else "a line is not an event"
        warn_once(f"{path}: {subject} (incomplete or damaged) and skipped: {invalid[0][:60]!r}")
    return [event for event in parsed if event is not None]


# Fields that readers rely on, by type of value. Numbers that were not finite are null.
_REQUIRED_INTS = ("attempt", "step")
_OPTIONAL_INTS = ("tokens", "from_step", "steps")
_OPTIONAL_NUMBERS = (
    *("loss", "bpb", "lr", "grad_norm", "dt_s", "data_s", "tokens_per_s"),
    *("mem_peak_bytes", "rss_bytes", "phase_age_s", "limit_s", "seconds"),
    *("documents", "bytes", "bytes_per_s", "left_s"),
)
_OPTIONAL_TEXTS = ("phase", "path", "rule", "split", "name", "doing", "status", "text")


def _parse_event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    if any(type(event.get(name)) is not int for name in _REQUIRED_INTS) or not isinstance(event.get("t"), int | float):
        return None
    if not math.isfinite(event["t"]) or any(not isinstance(event.get(name), int | None) for name in _OPTIONAL_INTS):
        return None
    if any(not isinstance(event.get(name), int | float | None) for name in _OPTIONAL_NUMBERS):
        return None
    return event if all(isinstance(event.get(name), str | None) for name in _OPTIONAL_TEXTS) else None
