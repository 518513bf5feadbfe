"""Read the event log of a run. This module never writes and does not import torch.

Invariants
* `events.jsonl` is append-only, one JSON object per line (`nsa_lab.runs.event_schema`). A killed process may leave one
  incomplete line. Readers skip it and any other line that violates the schema, with a warning that names the line.
* The file is read in blocks. Lines are at most MAX_LINE bytes long.
* Attempts are numbered. An attempt that resumed at step s repeated every step after s, so events of earlier attempts about
  those steps are superseded (`drop_superseded`).
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nsa_lab.runs.atomic_io import UnreadableFile, open_regular, parse_json, warn_once
from nsa_lab.runs.directory import EVENTS, RUNNING, read_status
from nsa_lab.runs.event_builder import EventsBuilder, make_events
from nsa_lab.runs.event_fields import is_finite, is_int
from nsa_lab.runs.event_schema import FIRST_KINDS, SUPERSEDED_KINDS, EvalEvent, StepEvent
from nsa_lab.runs.event_table import Events

__all__ = [
    "Event",
    "Events",
    "Progress",
    "Tail",
    "drop_superseded",
    "follow",
    "get_eval_events",
    "get_step_events",
    "infer_status",
    "read_events",
    "read_progress",
    "read_status",
]

Event = dict[str, Any]

BLOCK_BYTES = 1 << 22
PROGRESS_KINDS = ("start", "resume", "step", "eval", "checkpoint")
TAIL_BYTES = 1 << 15
MAX_LINE = 1 << 26  # bytes; the losses of a million windows fit
MAX_READING = 1 << 22  # bytes of any other event; statistics of 10,000 layers fit


def read_events(run_dir: str | Path, max_step: int | None = None) -> Events[Event]:
    """Return all complete events of the run in the order of writing; empty if nothing has been written yet.

    `run_dir` may also be the path of an `events.jsonl` file. `max_step`: number of steps of the run; events of later steps
    are skipped as violations of the schema, because every reader would fail on them. Raises OSError if the file is not a
    regular file or cannot be read.
    """
    path = Path(run_dir)
    path = path / EVENTS if path.is_dir() else path
    builder = EventsBuilder(max_step)
    if os.path.lexists(path):  # a broken link is no empty record
        for number, line, is_complete in read_lines(path):
            event = decode_line(line)
            if event is not None:
                builder.add(number, event)
            elif is_complete and line.strip():
                builder.add_torn(number)
    events = builder.build()
    _warn_of_violations(path, events)
    return events


def infer_status(events: Iterable[Event]) -> dict[str, Any]:
    """Reconstruct the status of a run whose status.json is lost from its events; empty without events."""
    record = make_events(events)
    if not len(record):
        return {}
    last = int(record.ints("attempt").max())
    own = record.select(record.ints("attempt") == last)
    endings = [event for event in own.of_kind("end", "halt") if isinstance(event.get("status"), str)]
    outcome = {name: endings[-1][name] for name in ("status", "exit_code", "reason") if endings and name in endings[-1]}
    return {"status": RUNNING, "attempt": last, "step": own[-1]["step"], "tokens": own[-1].get("tokens", 0), **outcome}


def drop_superseded(events: Iterable[Event]) -> Events[Event]:
    """Return the events without those about steps that a later attempt repeated, so that each step counts once."""
    record = make_events(events)
    attempts, indices = np.unique(record.ints("attempt"), return_inverse=True)
    if len(attempts) < 2:
        return record
    first_events = record.of_kind(*FIRST_KINDS)
    from_steps = np.nan_to_num(first_events.numbers("from_step")).tolist()
    resumed_at = dict(zip(first_events.ints("attempt").tolist(), from_steps, strict=True))
    # Also attempts without a first event, which may be lost or before a part of the record.
    limits, lowest = np.full(len(attempts), math.inf), math.inf
    for index in reversed(range(len(attempts))):
        limits[index] = lowest
        lowest = min(lowest, resumed_at.get(int(attempts[index]), math.inf))
    is_about_a_step = record.is_kind(*SUPERSEDED_KINDS)
    return record.select(~is_about_a_step | (record.ints("step") <= limits[indices]))


def get_step_events(events: Iterable[Event]) -> Events[StepEvent]:
    """Return one `step` event per logged step, ascending."""
    return _keep_last_per_step(drop_superseded(events).of_kind("step"))


def get_eval_events(events: Iterable[Event], split: str = "validation") -> Events[EvalEvent]:
    """Return one `eval` event of a split per evaluated step, ascending."""
    evaluations = drop_superseded(events).of_kind("eval")
    is_split = np.array([value == split for value in evaluations.values("split")], dtype=bool)
    return _keep_last_per_step(evaluations.select(is_split))


def _keep_last_per_step(events: Events[Any]) -> Events[Any]:
    """Return the last event of each step, ascending."""
    steps = events.ints("step")
    order = np.argsort(steps, kind="stable")
    is_last = np.append(np.diff(steps[order]) != 0, True)[: len(order)]
    return events.select(order[is_last])


class Progress(NamedTuple):
    """Progress of a run according to the end of its record, without steps that a later attempt repeated."""

    step: int
    """The last step that is recorded as completed."""
    validation_bpb: float | None
    """Of the last evaluation; None if there is none, or if it was not finite."""
    speeds: dict[int, float]
    """Tokens per second by step, of the last readings."""
    latest: int
    """The largest step of any event. It is larger than the steps of the run if its configuration was changed."""


def read_progress(run_dir: str | Path, max_step: int, n_readings: int, max_bytes: int = 1 << 22) -> Progress:
    """Return the progress of a run of `max_step` steps from the last lines of its record.

    Reads back to the last evaluation and at least `n_readings` logged steps, at most `max_bytes`. Lines that are no such
    events are skipped. Raises OSError as `read_events`.
    """
    path, n_found, evaluations = Path(run_dir) / EVENTS, 0, list[float | None]()
    last_step, latest, speeds = 0, 0, dict[int, float]()
    # Attempt -> the step from which it continued.
    from_steps: dict[int, int] = {}
    for line in _read_lines_backwards(path, max_bytes) if os.path.lexists(path) else ():
        event = _decode_progress(line)
        if event is None:
            continue
        kind, attempt, step = event["kind"], event["attempt"], event["step"]
        latest = max(latest, step)
        if kind in FIRST_KINDS:
            from_steps[attempt] = event.get("from_step") or 0
        elif step <= min((first for later, first in from_steps.items() if later > attempt), default=max_step):
            last_step, n_found = max(last_step, step), n_found + (kind == "step")
            if kind == "step" and is_finite(event.get("tokens_per_s")):
                speeds.setdefault(step, event["tokens_per_s"])
            elif kind == "eval" and event.get("split") == "validation":
                evaluations.append(event["bpb"] if is_finite(event.get("bpb")) else None)
        if n_found >= n_readings and evaluations:
            break
    return Progress(last_step, evaluations[0] if evaluations else None, speeds, latest)


def _decode_progress(line: bytes) -> Event | None:
    """Return the event of a line that is about progress; None for any other line, and for one that violates the schema."""
    event: Any = decode_line(line)
    if not isinstance(event, dict) or event.get("kind") not in PROGRESS_KINDS:
        return None
    numbers = [event.get("attempt"), event.get("step"), event.get("from_step") or 0]
    return event if all(is_int(number) and number >= 0 for number in numbers) else None


def _read_lines_backwards(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file from the last one on, without empty ones; at most those in the last `max_bytes`."""
    with open_regular(path) as file:
        end = file.seek(0, 2)
        rest, first = b"", max(end - max_bytes, 0)
        while end > first:
            start = max(end - TAIL_BYTES, first)
            file.seek(start)
            rest = file.read(end - start) + rest
            end = start
            rest, *lines = rest.split(b"\n")
            yield from filter(None, map(bytes.strip, reversed(lines)))
        if first == 0 and rest.strip():
            yield rest.strip()


class Tail:
    """Incremental reader of a growing event file. Returns a line once it is complete."""

    def __init__(self, run_dir: str | Path, max_step: int | None = None) -> None:
        """Read the record of a run. `max_step`: events of later steps are skipped, as in `read_events`."""
        self._path = Path(run_dir) / EVENTS
        self._offset, self._line, self._max_step = 0, 0, max_step

    def read(self) -> list[Event]:
        """Return the events completed since the last call."""
        if not os.path.lexists(self._path):
            return []
        builder = EventsBuilder(self._max_step)
        for _, line, is_complete in read_lines(self._path, self._offset):
            if not is_complete:
                break
            self._offset += len(line) + 1
            self._line += 1
            event = decode_line(line) if line.strip() else None
            if event is not None:
                builder.add(self._line, event)
            elif line.strip():
                builder.add_torn(self._line)
        events = builder.build()
        _warn_of_violations(self._path, events)
        return list(events)


def follow(run_dir: str | Path, *, is_alive: Callable[[], bool], poll_s: float = 0.5) -> Iterator[Event]:
    """Yield all events so far, then new ones as they are written, until the trainer has exited and all are read."""
    tail = Tail(run_dir)
    while True:
        alive = is_alive()
        yield from tail.read()
        if not alive:
            return
        time.sleep(poll_s)


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number, line, is_complete) from a byte offset on, numbered from 1. The last line may be incomplete.

    Text after the last line end is still being written, or was left incomplete by a killed process.
    """
    number, rest = 0, b""
    with open_regular(path) as file:
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                number += 1
                yield number, line, True
            if len(rest) > MAX_LINE:
                raise UnreadableFile(
                    errno.EFBIG,
                    f"{path}: line {number + 1:,} is longer than {MAX_LINE:,} bytes; this is not a record of events",
                )
    if rest:
        yield number + 1, rest, False


def decode_line(line: bytes) -> Any:
    """Return the value of a line of JSON; None if it is none, or longer than any event of its kind."""
    try:
        event = parse_json(line)
    except (ValueError, RecursionError):
        return None
    is_too_long = len(line) > MAX_READING and not (isinstance(event, dict) and event.get("kind") == "eval")
    return None if is_too_long else event


def _warn_of_violations(path: Path, events: Events[Any]) -> None:
    skipped = [violation for violation in events.violations.listed if violation.is_skipped]
    if skipped:
        more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        warn_once(f"{path}: a line is not an event and was skipped: {skipped[0]}{more}")
