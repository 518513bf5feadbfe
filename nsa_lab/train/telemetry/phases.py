"""The phases of a trainer: the one that it is in, since when, and how long each usually takes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """What the trainer is doing now, since when, and how long each phase usually takes."""

    def __init__(self, remembered: int = 101) -> None:
        self._now = ("start", time.monotonic())
        self._moved = self._now[1]
        self._seconds: dict[str, deque[float]] = {}
        self._remembered = remembered

    @contextmanager
    def __call__(self, name: str, *, counts: bool = True) -> Iterator[None]:
        """The trainer is in this phase. Without `counts`, for a piece of one, its seconds do not say how long it usually
        takes."""
        outer, begun = self._now[0], time.monotonic()
        self._now = (name, begun)
        try:
            yield
        finally:
            now = time.monotonic()
            if counts:
                self._seconds.setdefault(name, deque(maxlen=self._remembered)).append(now - begun)
            self._now = (outer, now)

    @property
    def occurrence(self) -> tuple[str, float]:
        """Name of the phase and when it began; no two phases share both."""
        return self._now

    def moved(self) -> None:
        """The phase, however long, has got somewhere: a stall counts from here."""
        self._moved = time.monotonic()

    def quiet_s(self) -> float:
        """Seconds since the phase began or last got somewhere."""
        return time.monotonic() - max(self._now[1], self._moved)

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
