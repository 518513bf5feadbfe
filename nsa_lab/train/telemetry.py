"""The run's record as it is written: events, phases and the heartbeat.

Invariants
* One event is one `os.write` to a file opened for appending: a kill tears at most the last line, and a new attempt
  starts on a fresh line.
* The heartbeat beats by time, from its own thread, and names the phase the trainer is in and for how long; a silent run
  says where it is silent. A stall is judged against the run's own median for that phase.
* JSON has no NaN: a number that is not finite is written as null and named in `nonfinite`.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_lab.rundir import EVENTS

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


class Phases:
    """What the trainer is doing now, since when, and how long each phase usually takes."""

    def __init__(self, remembered: int = 101) -> None:
        self._now = ("start", time.monotonic())
        self._seconds: dict[str, deque[float]] = {}
        self._remembered = remembered

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, begun = self._now[0], time.monotonic()
        self._now = (name, begun)
        try:
            yield
        finally:
            now = time.monotonic()
            self._seconds.setdefault(name, deque(maxlen=self._remembered)).append(now - begun)
            self._now = (outer, now)

    @property
    def occurrence(self) -> tuple[str, float]:
        """Name of the phase and when it began; no two phases share both."""
        return self._now

    def current(self) -> tuple[str, float]:
        """Name of the phase and its age in seconds."""
        name, begun = self._now
        return name, time.monotonic() - begun

    def last(self, name: str) -> float:
        """Seconds that the phase took when it last ended; 0 before that."""
        return self._seconds[name][-1] if self._seconds.get(name) else 0.0

    def median(self, name: str) -> float | None:
        """Median seconds of a phase, None until it has ended three times."""
        seconds = list(self._seconds.get(name, ()))
        return statistics.median(seconds) if len(seconds) >= 3 else None


@dataclass(frozen=True)
class StallRule:
    """A phase stalls when it lasts `factor` times its own median, and at least `floor_s` (or the phase's own floor)."""

    factor: float = 20.0
    floor_s: float = 120.0
    floors_s: dict[str, float] = field(default_factory=dict)

    def limit_s(self, phase: str, median_s: float | None) -> float:
        return max(self.floors_s.get(phase, self.floor_s), self.factor * (median_s or 0.0))


class Heartbeat:
    """A thread that writes `heartbeat` events, and one `stall` event with all stacks for each phase that stalls."""

    def __init__(
        self,
        log: EventLog,
        phases: Phases,
        *,
        every_s: float,
        rule: StallRule,
        stacks: Path,
        gpu_util: Callable[[], float | None],
    ) -> None:
        self._log, self._phases, self._every_s, self._rule = log, phases, every_s, rule
        self._stacks, self._gpu_util = stacks, gpu_util
        self._reported: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            occurrence = self._phases.occurrence
            phase, age_s = occurrence[0], time.monotonic() - occurrence[1]
            self._log.event(
                "heartbeat", phase=phase, phase_age_s=round(age_s, 3), rss_bytes=resident_bytes(), gpu_util=self._gpu_util()
            )
            limit_s = self._rule.limit_s(phase, self._phases.median(phase))
            if age_s > limit_s and occurrence != self._reported:
                self._reported = occurrence
                self._report_stall(phase, age_s, limit_s)

    def _report_stall(self, phase: str, age_s: float, limit_s: float) -> None:
        with open(self._stacks, "a", encoding="utf-8") as file:
            file.write(f"\nstall in {phase} after {age_s:.0f} s, {time.ctime()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        self._log.event(
            "stall", phase=phase, phase_age_s=round(age_s, 3), limit_s=round(limit_s, 3), stacks=self._stacks.name
        )


def resident_bytes() -> int:
    """Resident memory of this process now; its peak where /proc is not at hand."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
