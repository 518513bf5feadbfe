"""Writing `events.jsonl`.

Invariants
* One event is one `os.write` to a file opened for appending: a kill tears at most the last line, and a new attempt
  starts on a fresh line.
* JSON has no NaN: a number that is not finite is written as null and named in `nonfinite`.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import EVENTS

SCHEMA_VERSION = 1


class EventLog:
    """Appends events to `events.jsonl`. Safe to use from several threads."""

    def __init__(self, run_dir: Path, run: str, attempt: int) -> None:
        self.run, self.attempt = run, attempt
        self.step, self.tokens = 0, 0
        self._lock = threading.Lock()
        self._file = os.open(run_dir / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end_torn_line()

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event at the current step, or at `step` and `tokens` where they are given."""
        fields, nonfinite = _finite(fields)
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
        line = json.dumps({**envelope, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            os.write(self._file, line)

    def close(self) -> None:
        with self._lock:
            os.fsync(self._file)
            os.close(self._file)

    def _end_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def _finite(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
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
