"""The phases of a trainer: the one that it is in, since when, and how long each usually takes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """What the trainer is doing now, since when, and how long each phase usually takes."""

    def __init__(self, max_durations: int = 101) -> None:
        self._current = ("start", time.monotonic())
        self._progress_time = self._current[1]
        self._durations: dict[str, deque[float]] = {}
        self._max_durations = max_durations

    @contextmanager
    def __call__(self, name: str, *, record_duration: bool = True) -> Iterator[None]:
        """The trainer is in this phase. Without `counts`, for a piece of one, its seconds do not say how long it usually
        takes."""
        outer, begun = self._current[0], time.monotonic()
        self._current = (name, begun)
        try:
            yield
        finally:
            now = time.monotonic()
            if record_duration:
                self._durations.setdefault(name, deque(maxlen=self._max_durations)).append(now - begun)
            self._current = (outer, now)

    @property
    def occurrence(self) -> tuple[str, float]:
        """Name of the phase and when it began; no two phases share both."""
        return self._current

    def report_progress(self) -> None:
        """The phase, however long, has got somewhere: a stall counts from here."""
        self._progress_time = time.monotonic()

    def get_idle_s(self) -> float:
        """Seconds since the phase began or last got somewhere."""
        return time.monotonic() - max(self._current[1], self._progress_time)

    def get_current(self) -> tuple[str, float]:
        """Name of the phase and its age in seconds."""
        name, begun = self._current
        return name, time.monotonic() - begun

    def get_last_duration(self, name: str) -> float:
        """Seconds that the phase took when it last ended; 0 before that."""
        return self._durations[name][-1] if self._durations.get(name) else 0.0

    def get_median_duration(self, name: str) -> float | None:
        """Median seconds of a phase, None until it has ended three times."""
        seconds = list(self._durations.get(name, ()))
        return statistics.median(seconds) if len(seconds) >= 3 else None
