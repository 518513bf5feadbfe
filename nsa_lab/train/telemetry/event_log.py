"""Writing `events.jsonl`.

Invariants
* One event is one `os.write` to a file opened for appending: a kill tears at most the last line, and a new attempt
  starts on a fresh line.
* An event that cannot be written ends nothing: what of it was written is cut off again, and the next event that can be
  written comes with an `error` event that says how many are missing, and why.
* JSON has no NaN: a number that is not finite is written as null and named in `nonfinite`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import EVENTS

SCHEMA_VERSION = 1

logger = logging.getLogger("nsa_lab.train")


class EventLog:
    """Appends events to `events.jsonl`. Safe to use from several threads."""

    def __init__(self, run_dir: Path, run: str, attempt: int) -> None:
        self.run, self.attempt = run, attempt
        self.step, self.tokens = 0, 0
        self._lock = threading.Lock()
        self._n_lost = 0
        self._file = os.open(run_dir / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end_torn_line()

    def append(self, kind: str, **fields: Any) -> None:
        """Append one event at the current step, or at `step` and `tokens` where they are given."""
        line = self._encode_event(kind, fields)
        with self._lock:
            try:
                if self._n_lost:
                    self._end_torn_line()
                    message = f"{self._n_lost} events before this one could not be written: {self._loss_reason}"
                    self._write_line(self._encode_event("error", {"where": "events", "message": message, "fatal": False}))
                    self._n_lost = 0
                self._write_line(line)
            except OSError as error:
                if not self._n_lost:
                    logger.error("an event cannot be written, and the run goes on: %s", error)
                self._n_lost, self._loss_reason = self._n_lost + 1, str(error)

    def close(self) -> None:
        with self._lock:
            try:
                os.fsync(self._file)
            except OSError as error:
                logger.error("the events may not all be on the disk: %s", error)
            os.close(self._file)

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
        return json.dumps({**envelope, **fields}, separators=(",", ":")).encode() + b"\n"

    def _write_line(self, line: bytes) -> None:
        """Write the whole line or nothing: a disk that fills takes a part of it."""
        written = os.write(self._file, line)
        begun = os.lseek(self._file, 0, os.SEEK_CUR) - written
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            # Unless another rank has written since; then the next line to come ends the torn one.
            if os.fstat(self._file).st_size == begun + written:
                os.ftruncate(self._file, begun)
            raise

    def _end_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def _replace_non_finite(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    bad: list[str] = []

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(name)
            return None
        if isinstance(value, dict):
            return {key: clean(f"{name}.{key}", inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(f"{name}[{index}]", inner) for index, inner in enumerate(value)]
        return value

    return {name: clean(name, value) for name, value in fields.items()}, bad
