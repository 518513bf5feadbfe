"""The phases of a training process: the current one, its start, and typical durations."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from nsa_lab.train.telemetry.awake_clock import AwakeClock


class Phases:
    """Tracks the current phase, when it began, and how long each phase usually takes.

    `clock`: the time without suspensions, with which all durations are measured, and the watched time, for stalls.
    """

    def __init__(self, max_durations: int = 101) -> None:
        self.clock = AwakeClock()
        # Name, start, and start in watched time. One object, because the heartbeat reads it in another thread.
        self._current = ("start", self.clock.now(), self.clock.get_watched_s())
        self._progress_time = self._current[2]
        self._durations: dict[str, deque[float]] = {}
        self._max_durations = max_durations

    @contextmanager
    def __call__(self, name: str, *, record_duration: bool = True) -> Iterator[None]:
        """Enter the phase `name`. With `record_duration=False` (for a part of a phase) its duration is not recorded."""
        outer_phase, start = self._current[0], self.clock.now()
        self._current = (name, start, self.clock.get_watched_s())
        try:
            yield
        finally:
            now = self.clock.now()
            if record_duration:
                self._durations.setdefault(name, deque(maxlen=self._max_durations)).append(now - start)
            self._current = (outer_phase, now, self.clock.get_watched_s())

    @property
    def occurrence(self) -> tuple[str, float]:
        """Name and start time of the current phase; unique to this occurrence."""
        return self._current[:2]

    def report_progress(self) -> None:
        """Report progress within the current phase; the stall time counts from here."""
        self._progress_time = self.clock.get_watched_s()

    def get_idle_s(self) -> float:
        """Return the watched seconds since the phase began or last reported progress."""
        return self.clock.get_watched_s() - max(self._current[2], self._progress_time)

    def get_current(self) -> tuple[str, float]:
        """Return the name of the current phase and its age in seconds."""
        name, start = self.occurrence
        return name, self.clock.now() - start

    def get_last_duration(self, name: str) -> float:
        """Return the duration of the last completed phase `name` in seconds; 0 if none has completed."""
        return self._durations[name][-1] if self._durations.get(name) else 0.0

    def get_median_duration(self, name: str) -> float | None:
        """Return the median duration of a phase in seconds; None until three have completed."""
        durations = list(self._durations.get(name, ()))
        return statistics.median(durations) if len(durations) >= 3 else None
