"""Reading a run's record. Only the standard library, and nothing here writes.

Invariants
* `events.jsonl` is append-only, one JSON object per line. A process that was killed may leave one torn line. That, and any
  other line that is no event, is passed over, and it is said that there are such lines.
* Every event that is given to a reader has a kind, a time, an attempt and a step.
* Attempts are numbered. An attempt that resumed at step s did every step after s again, so what earlier attempts said
  about those steps no longer counts (`timeline`).
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

SUPERSEDED_KINDS = frozenset({"step", "eval", "reach", "checkpoint", "guard"})


def read_events(run_dir: str | Path) -> list[Event]:
    """Every whole event of the run in the order of writing; empty if nothing was written yet.

    `run_dir` may also be the path of an `events.jsonl` file.
    """
    path = Path(run_dir)
    path = path / EVENTS if path.is_dir() else path
    return _parse_events(path, path.read_bytes()) if path.exists() else []


def infer_status(events: list[Event]) -> dict[str, Any]:
    """What the record says of how the run stands, for one whose status.json is lost; empty where nothing was recorded."""
    if not events:
        return {}
    last = max(events, key=lambda event: event["attempt"])["attempt"]
    own = [event for event in events if event["attempt"] == last]
    ending = next((e for e in reversed(own) if e["kind"] in ("end", "halt") and isinstance(e.get("status"), str)), {})
    told = {name: ending[name] for name in ("status", "exit_code", "reason") if name in ending}
    return {"status": RUNNING, "attempt": last, "step": own[-1]["step"], "tokens": own[-1].get("tokens", 0), **told}


def drop_superseded(events: list[Event]) -> list[Event]:
    """The events without those that a later attempt did again: each step counts once."""
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
    """The `step` events, one for each logged step, in the order of steps."""
    by_step = {event["step"]: event for event in drop_superseded(events) if event["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def get_eval_events(events: list[Event], split: str = "validation") -> list[Event]:
    """The `eval` events of a split, one for each step that was evaluated, in the order of steps."""
    by_step = {e["step"]: e for e in drop_superseded(events) if e["kind"] == "eval" and e.get("split") == split}
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
        return _parse_events(self._path, whole)


def follow(run_dir: str | Path, *, is_alive: Callable[[], bool], poll_s: float = 0.5) -> Iterator[Event]:
    """Every event so far, then the new ones as they come, until the trainer is gone and the file is read to its end."""
    tail = Tail(run_dir)
    while True:
        alive = is_alive()
        yield from tail.read()
        if not alive:
            return
        time.sleep(poll_s)


def _parse_events(path: Path, block: bytes) -> list[Event]:
    """The events among the lines of a block. What follows the last line end is being written, or was torn by a kill."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    parsed = [_parse_event(line) for line in lines]
    wrong = [line for line, event in zip(lines, parsed, strict=True) if event is None]
    if wrong and not block.endswith(b"\n"):
        wrong = wrong[:-1] if parsed[-1] is None else wrong
    if wrong:
        many = f"{len(wrong)} lines are no events" if len(wrong) > 1 else "a line is no event"
        warn_once(f"{path}: {many}, torn by a kill or damaged, and passed over: {wrong[0][:60]!r}")
    return [event for event in parsed if event is not None]


# What readers reckon with, by the kind of value; a number that was not finite is null.
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
