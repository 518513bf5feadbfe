"""The heartbeat: a thread that regularly records that the trainer is alive, its phase, and the age of the phase.

It is driven by time, so a run that hangs still records where. A stall is a phase that lasts much longer than the run's
own median for that phase, in watched time (`awake_clock`), so a suspended process does not stall. If a stall halts the run,
the heartbeat requests a save and exit, and ends the process if the trainer does not respond.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nsa_lab.runs.atomic_io import open_in_place
from nsa_lab.runs.directory import APPEND
from nsa_lab.train.telemetry.event_log import EventLog
from nsa_lab.train.telemetry.phases import Phases
from nsa_lab.train.telemetry.system_metrics import get_resident_bytes

logger = logging.getLogger("nsa_lab.train")


@dataclass(frozen=True)
class StallRule:
    """A phase stalls if it lasts longer than `factor` times its median, and at least `floor_s` (`floors_s` by phase)."""

    factor: float = 20.0
    floor_s: float = 120.0
    floors_s: dict[str, float] = field(default_factory=dict)

    def get_limit_s(self, phase: str, median_s: float | None) -> float:
        return max(self.floors_s.get(phase, self.floor_s), self.factor * (median_s or 0.0))


# Seconds that a trainer may stay in a stalled phase after a stop request.
STOP_TIMEOUT_S = 60.0


class Heartbeat:
    """A thread that writes `heartbeat` events, and a `stall` event with the stacks of all threads for each stalled phase.

    `on_stall(phase, seconds, limit_s)` is called in this thread and returns whether the run shall halt. If so,
    `on_unresponsive` is called if the trainer is still in the same occurrence of the phase after `STOP_TIMEOUT_S`, or
    stalls again before it exits.
    """

    def __init__(
        self,
        log: EventLog,
        phases: Phases,
        *,
        every_s: float,
        rule: StallRule,
        stacks: Path,
        get_gpu_util: Callable[[], float | None],
        on_stall: Callable[[str, float, float], bool] = lambda phase, seconds, limit_s: False,
        on_unresponsive: Callable[[], None] = lambda: None,
    ) -> None:
        self._log, self._phases, self._every_s, self._rule = log, phases, every_s, rule
        self._stacks, self._get_gpu_util = stacks, get_gpu_util
        self._on_stall, self._on_unresponsive = on_stall, on_unresponsive
        self._reported_occurrence: tuple[str, float] | None = None
        self._stop_requested_at: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._phases.clock.start_ticking(self._stopped)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self.beat()

    def beat(self) -> None:
        """Write a heartbeat, and judge the current phase."""
        occurrence = self._phases.occurrence
        phase, age_s = occurrence[0], self._phases.clock.now() - occurrence[1]
        suspended_s = round(self._phases.clock.take_suspended_s(), 3)
        self._log.append(
            "heartbeat",
            phase=phase,
            phase_age_s=round(age_s, 3),
            rss_bytes=get_resident_bytes(),
            gpu_util=self._get_gpu_util(),
            **({"suspended_s": suspended_s} if suspended_s > 0 else {}),
        )
        limit_s, idle_s = self._rule.get_limit_s(phase, self._phases.get_median_duration(phase)), self._phases.get_idle_s()
        if idle_s > limit_s and occurrence != self._reported_occurrence:
            self._reported_occurrence = occurrence
            self._report_stall(phase, age_s, limit_s)
            if self._stop_requested_at is not None:
                self._on_unresponsive()
            elif self._on_stall(phase, idle_s, limit_s):
                self._stop_requested_at = self._phases.clock.get_watched_s()
        elif (
            self._stop_requested_at is not None
            and occurrence == self._reported_occurrence
            and self._get_wait_s() > STOP_TIMEOUT_S
        ):
            self._on_unresponsive()

    def _get_wait_s(self) -> float:
        return 0.0 if self._stop_requested_at is None else self._phases.clock.get_watched_s() - self._stop_requested_at

    def _report_stall(self, phase: str, age_s: float, limit_s: float) -> None:
        try:
            with open(open_in_place(self._stacks, APPEND), "a", encoding="utf-8") as file:
                file.write(f"\nstall in {phase} after {age_s:.0f} s, {time.ctime()}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.error("the stacks of a stall could not be written: %s", error)
        self._log.append(
            "stall", phase=phase, phase_age_s=round(age_s, 3), limit_s=round(limit_s, 3), stacks=self._stacks.name
        )
