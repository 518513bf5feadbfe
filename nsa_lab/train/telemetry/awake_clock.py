"""A clock that stands still while the process is suspended (SIGSTOP), so that a suspension is no stall and no slow step.

Linux has no such clock: CLOCK_MONOTONIC continues for a stopped process. A thread ticks; the gap between its ticks that
ends with SIGCONT was a suspension. A gap without SIGCONT was not: the process was busy, for example in a call that holds
Python's lock. CLOCK_MONOTONIC excludes the time in which the whole machine is suspended.

Threads run in any order after a suspension, so another thread may read the time before SIGCONT is handled. A stall is
therefore measured by `get_watched_s`, which counts only time in which the thread ticked, whatever the reason of a gap.
"""

from __future__ import annotations

import threading
import time

TICK_S = 0.5
# At most this much of the time between two ticks is watched.
MAX_WATCHED_GAP_S = 2 * TICK_S
# A gap may have ended this long before its SIGCONT is handled.
GAP_AGE_S = 5.0


class AwakeClock:
    """Seconds, like `time.monotonic`, without those for which the process was suspended. Thread-safe."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._suspended_s = 0.0
        # The last tick, and the seconds in gaps until then. One object, so that a reader never sees a part of a tick.
        self._ticked = (now, 0.0)
        self._gap_end, self._gap_s = now, 0.0
        # A signal handler may interrupt another call in the same thread.
        self._lock = threading.RLock()
        self._is_ticking = False
        self._machine_offset = _get_machine_offset()
        self._reported_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self._suspended_s

    def tick(self) -> None:
        """Record that the process runs. Call it every `TICK_S` seconds."""
        with self._lock:
            self._tick()

    def _tick(self) -> None:
        now, (last_tick, unwatched_s) = time.monotonic(), self._ticked
        if (gap := now - last_tick - TICK_S) > TICK_S:
            self._gap_end, self._gap_s = now, gap
        self._ticked = (now, unwatched_s + max(0.0, now - last_tick - MAX_WATCHED_GAP_S))

    def note_continued(self) -> None:
        """Record that the process was continued (SIGCONT): the gap that has just ended was a suspension."""
        if not self._is_ticking:
            return
        with self._lock:
            self._tick()
            if time.monotonic() - self._gap_end < GAP_AGE_S:
                self._suspended_s += self._gap_s
            self._gap_s = 0.0

    def get_watched_s(self) -> float:
        """Return seconds, like `now`, without gaps between ticks, in which the process was suspended or busy.

        Without a thread that ticks, all time counts.
        """
        last_tick, unwatched_s = self._ticked  # before the time, so that a suspension here is part of the gap
        now = time.monotonic()
        gap_s = max(0.0, now - last_tick - MAX_WATCHED_GAP_S) if self._is_ticking else 0.0
        return now - unwatched_s - gap_s

    def take_suspended_s(self) -> float:
        """Return the seconds for which the process or the machine was suspended since the last call."""
        machine_s = _get_machine_offset() - self._machine_offset
        total = self._suspended_s + (machine_s if machine_s > TICK_S else 0.0)
        suspended_s, self._reported_s = total - self._reported_s, total
        return suspended_s

    def start_ticking(self, stopped: threading.Event) -> None:
        """Tick in a thread until `stopped` is set."""

        def run() -> None:
            while not stopped.wait(TICK_S):
                self.tick()
            self._is_ticking = False

        self._ticked, self._is_ticking = (time.monotonic(), self._ticked[1]), True
        threading.Thread(target=run, name="clock", daemon=True).start()


def _get_machine_offset() -> float:
    """Return the seconds for which the machine was suspended since it was started; 0 where this is unknown."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
