"""The heartbeat: a thread that says every few seconds that the trainer lives, and what it is doing.

It beats by time and names the phase the trainer is in and for how long; a silent run says where it is silent. A stall is
judged against the run's own median for that phase. Where it is told to halt the run, it asks the trainer to save and leave,
and ends it if it does not answer.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.machine import resident_bytes
from nsa_lab.train.telemetry.phases import Phases

logger = logging.getLogger("nsa_lab.train")


@dataclass(frozen=True)
class StallRule:
    """A phase stalls when it lasts `factor` times its own median, and at least `floor_s` (or the phase's own floor)."""

    factor: float = 20.0
    floor_s: float = 120.0
    floors_s: dict[str, float] = field(default_factory=dict)

    def limit_s(self, phase: str, median_s: float | None) -> float:
        return max(self.floors_s.get(phase, self.floor_s), self.factor * (median_s or 0.0))


# How long a trainer that was asked to leave a stalled phase may stay in it.
ANSWER_WITHIN_S = 60.0


class Heartbeat:
    """A thread that writes `heartbeat` events, and one `stall` event with all stacks for each phase that stalls.

    `on_stall` is called, in this thread, with the phase, its seconds and their limit; it gives whether the run is to halt.
    Then `on_deaf` is called if the trainer is still in that very phase `ANSWER_WITHIN_S` later, or stalls on its way out.
    """

    def __init__(
        self,
        log: EventLog,
        phases: Phases,
        *,
        every_s: float,
        rule: StallRule,
        stacks: Path,
        gpu_util: Callable[[], float | None],
        on_stall: Callable[[str, float, float], bool] = lambda phase, seconds, limit_s: False,
        on_deaf: Callable[[], None] = lambda: None,
    ) -> None:
        self._log, self._phases, self._every_s, self._rule = log, phases, every_s, rule
        self._stacks, self._gpu_util = stacks, gpu_util
        self._on_stall, self._on_deaf = on_stall, on_deaf
        self._reported: tuple[str, float] | None = None
        self._asked: float | None = None
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
            quiet_s, limit_s = self._phases.quiet_s(), self._rule.limit_s(phase, self._phases.median(phase))
            if quiet_s > limit_s and occurrence != self._reported:
                self._reported = occurrence
                self._report_stall(phase, age_s, limit_s)
                if self._asked is not None:
                    self._on_deaf()
                elif self._on_stall(phase, quiet_s, limit_s):
                    self._asked = time.monotonic()
            elif self._asked is not None and occurrence == self._reported and self._waited_s() > ANSWER_WITHIN_S:
                self._on_deaf()

    def _waited_s(self) -> float:
        return time.monotonic() - self._asked if self._asked is not None else 0.0

    def _report_stall(self, phase: str, age_s: float, limit_s: float) -> None:
        try:
            with open(self._stacks, "a", encoding="utf-8") as file:
                file.write(f"\nstall in {phase} after {age_s:.0f} s, {time.ctime()}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.error("the stacks of a stall cannot be written: %s", error)
        self._log.event(
            "stall", phase=phase, phase_age_s=round(age_s, 3), limit_s=round(limit_s, 3), stacks=self._stacks.name
        )
