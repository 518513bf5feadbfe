"""Write `events.jsonl`.

Invariants
* An event is one `os.write` to a file opened for appending. A kill tears at most the last line, and a new attempt starts
  on a new line.
* A failed write does not end the run. The part that was written is truncated, and the next event that can be written is
  preceded by an `error` event with the number of missing events and the reason.
* Digests of the lines so far (`nsa_lab.runs.segment_digests`) are of the file, because other ranks write to it too. Only
  one process writes them at a time.
* JSON has no NaN: a number that is not finite is written as null and named in `nonfinite`.
* Events are checked against `nsa_lab.runs.event_schema`. One that violates it is written all the same, because it must not
  end a run, with an error in trainer.log; readers report its line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from nsa_lab.runs.atomic_io import open_in_place
from nsa_lab.runs.directory import EVENTS
from nsa_lab.runs.event_fields import check_event
from nsa_lab.runs.event_schema import SCHEMA_VERSION
from nsa_lab.runs.segment_digests import KIND, hash_complete_lines, read_segments

logger = logging.getLogger("nsa_lab.train")


class EventLog:
    """Appends events to `events.jsonl`. Thread-safe."""

    def __init__(self, run_dir: Path, run: str, attempt: int) -> None:
        self.run, self.attempt = run, attempt
        self.step, self.tokens = 0, 0
        self._lock = threading.Lock()
        self._n_lost = 0
        self._reported_violations: set[str] = set()
        self._path = run_dir / EVENTS
        self._segment_start: int | None = None  # known after the first digest
        self._file = open_in_place(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._end_torn_line()

    def append(self, kind: str, **fields: Any) -> None:
        """Append one event at the current step, or at the fields `step` and `tokens` if given."""
        line = self._encode_event(kind, fields)
        with self._lock:
            self._try_write_line(line)

    def append_digest(self) -> str | None:
        """Append a `digest` event of all lines since the previous one. Return the SHA-256 of its line; None on failure."""
        with self._lock:
            try:
                if self._segment_start is None:
                    self._segment_start = read_segments(self._path).end
                size, digest = hash_complete_lines(self._file, self._segment_start)
            except OSError as error:
                logger.error("the digest of the events could not be computed, the run continues: %s", error)
                return None
            line = self._encode_event(KIND, {"bytes": size, "sha256": digest})
            # A line into which another process wrote is not found by readers, so the next digest has to cover it.
            if not self._try_write_line(line) or not self._ends_with_line(line):
                return None
            self._segment_start += size
            return hashlib.sha256(line.rstrip(b"\n")).hexdigest()

    def sync(self) -> None:
        """Flush the events to the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            logger.error("some events may not be on disk: %s", error)

    def close(self) -> None:
        with self._lock:
            self.sync()
            os.close(self._file)

    def _try_write_line(self, line: bytes) -> bool:
        """Write a line, after an error event if earlier ones are missing. Return False if it cannot be written."""
        try:
            if self._n_lost:
                self._end_torn_line()
                message = f"the {self._n_lost} events before this one could not be written: {self._loss_reason}"
                self._write_line(self._encode_event("error", {"where": "events", "message": message, "fatal": False}))
                self._n_lost = 0
            self._write_line(line)
        except OSError as error:
            if not self._n_lost:
                logger.error("an event could not be written, the run continues: %s", error)
            self._n_lost, self._loss_reason = self._n_lost + 1, str(error)
            return False
        return True

    def _encode_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        fields, nonfinite = _replace_non_finite(fields)
        envelope = {
            "v": SCHEMA_VERSION,
            "t": round(time.time(), 3),
            "run": self.run,
            "attempt": self.attempt,
            "kind": kind,
            "step": self.step,
            "tokens": self.tokens,
        }
        if nonfinite:
            envelope["nonfinite"] = nonfinite
        event = {**envelope, **fields}
        self._report_violation(kind, check_event(event))
        return json.dumps(event, separators=(",", ":")).encode() + b"\n"

    def _report_violation(self, kind: str, problem: str | None) -> None:
        if problem and f"{kind}: {problem}" not in self._reported_violations:
            self._reported_violations.add(f"{kind}: {problem}")
            logger.error("an event violates its schema (nsa_lab/runs/event_schema.py): %s: %s", kind, problem)

    def _write_line(self, line: bytes) -> None:
        """Write the whole line or nothing. A disk that fills up accepts only a part of it."""
        written = os.write(self._file, line)
        start = os.lseek(self._file, 0, os.SEEK_CUR) - written
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            # Do not truncate if another rank has written since; the next line then starts after a line break.
            if os.fstat(self._file).st_size == start + written:
                os.ftruncate(self._file, start)
            raise

    def _ends_with_line(self, line: bytes) -> bool:
        """Return whether the bytes that this process wrote last are this line, from its beginning to its end."""
        start = os.lseek(self._file, 0, os.SEEK_CUR) - len(line)
        before = b"\n" if start else b""
        return os.pread(self._file, len(before + line), start - len(before)) == before + line

    def _end_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def _replace_non_finite(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    nonfinite: list[str] = []

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            return None
        if isinstance(value, dict):
            return {key: clean(f"{name}.{key}", inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(f"{name}[{index}]", inner) for index, inner in enumerate(value)]
        return value

    return {name: clean(name, value) for name, value in fields.items()}, nonfinite
