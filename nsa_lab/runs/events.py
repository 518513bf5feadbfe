"""Reading a run's record. Only the standard library, and nothing here writes.

Invariants
* `events.jsonl` is append-only, one JSON object per line. A process that was killed may leave one torn line; it is skipped.
* Attempts are numbered. An attempt that resumed at step s did every step after s again, so what earlier attempts said
  about those steps no longer counts (`timeline`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import EVENTS, read_status

__all__ = ["Tail", "evaluations", "follow", "read_events", "read_status", "steps", "timeline"]

Event = dict[str, Any]

REDONE_KINDS = frozenset({"step", "eval", "checkpoint", "guard"})


def read_events(run_dir: str | Path) -> list[Event]:
    """Every whole event of the run in the order of writing; empty if nothing was written yet.

    `run_dir` may also be the path of an `events.jsonl` file.
    """
    path = Path(run_dir)
    path = path / EVENTS if path.is_dir() else path
    if not path.exists():
        return []
    return [event for line in path.read_bytes().split(b"\n") if (event := _parse(line)) is not None]


def timeline(events: list[Event]) -> list[Event]:
    """The events without those that a later attempt did again: each step counts once."""
    resumed_at: dict[int, int] = {}
    for event in events:
        if event["kind"] in ("start", "resume"):
            resumed_at[event["attempt"]] = event.get("from_step", 0)
    cut: dict[int, float] = {}
    lowest = float("inf")
    for attempt in sorted(resumed_at, reverse=True):
        cut[attempt] = lowest
        lowest = min(lowest, resumed_at[attempt])
    return [
        event
        for event in events
        if event["kind"] not in REDONE_KINDS or event["step"] <= cut.get(event["attempt"], float("inf"))
    ]


def steps(events: list[Event]) -> list[Event]:
    """The `step` events, one for each logged step, in the order of steps."""
    by_step = {event["step"]: event for event in timeline(events) if event["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def evaluations(events: list[Event], split: str = "validation") -> list[Event]:
    """The `eval` events of a split, one for each step that was evaluated, in the order of steps."""
    by_step = {e["step"]: e for e in timeline(events) if e["kind"] == "eval" and e.get("split") == split}
    return [by_step[step] for step in sorted(by_step)]


class Tail:
    """Reads a growing event file piece by piece; a line is given once it is whole."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / EVENTS
        self._offset = 0

    def read(self) -> list[Event]:
        """The events that were completed since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            block = file.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.split(b"\n") if (event := _parse(line)) is not None]


def follow(run_dir: str | Path, *, is_alive: Callable[[], bool], poll_s: float = 0.5) -> Iterator[Event]:
    """Every event so far, then the new ones as they come, until the trainer is gone and the file is read to its end."""
    tail = Tail(run_dir)
    while True:
        alive = is_alive()
        yield from tail.read()
        if not alive:
            return
        time.sleep(poll_s)


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None
