"""Stop requests: SIGTERM, SIGINT and SIGUSR1 ask for a save and an exit; SIGUSR2 asks for the stacks.

Invariants
* The first request sets a flag that the loop polls between micro-batches, in data waits and between evaluation batches.
  Inside `at_once()` (compiling, preparing) nothing polls, so there the request is raised where the main thread stands.
* The second request ends the process at once, even while the main thread is inside a long call that never returns to
  Python: a thread of its own reads the signals from a pipe that the C handler writes to.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nsa_lab.runs.directory import EXIT_STOPPED, STOP_SIGNALS


class StopRequested(BaseException):
    """Leave the loop, save, exit 75. Not an `Exception`, so that no library swallows it."""


class StopSignals:
    """Installs the handlers for the length of a `with` block; does nothing outside the main thread.

    `on_first(name)` and `on_second(name)` are called from the listening thread; after `on_second` the process exits 75.
    """

    def __init__(self, stacks: Path, on_first: Callable[[str], None], on_second: Callable[[str], None]) -> None:
        self._stacks_path = stacks
        self._on_first, self._on_second = on_first, on_second
        self._requested: str | None = None
        self._raise_now = False
        self._cleanup: list[Callable[[], Any]] = []

    @property
    def requested_signal(self) -> str | None:
        """Name of the signal that asked for a stop, or None."""
        return self._requested

    def should_stop(self) -> bool:
        return self._requested is not None

    def raise_if_requested(self) -> None:
        """Raise `StopRequested` if a stop was asked for."""
        if self._requested is not None:
            raise StopRequested(self._requested)

    def request_stop(self) -> None:
        """Ask for a stop as a SIGTERM from outside would, from any thread; nothing if one was asked for already."""
        if self._cleanup and self._requested is None:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """Within this block a request is raised where the main thread stands."""
        self._raise_now = True
        try:
            self.raise_if_requested()
            yield
        finally:
            self._raise_now = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True).start()
        earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._cleanup += [lambda: signal.set_wakeup_fd(earlier), lambda: os.close(writing)]
        for number in STOP_SIGNALS:
            previous = signal.signal(number, self._handle)
            self._cleanup.insert(0, lambda number=number, previous=previous: signal.signal(number, previous))
        # Blocked since the launcher made this process; a request that came meanwhile arrives now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        stacks = open(self._stacks_path, "a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        self._cleanup += [lambda: faulthandler.unregister(signal.SIGUSR2), stacks.close]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._cleanup:
            self._cleanup.pop(0)()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = signal.Signals(number).name
        if self._raise_now:
            raise StopRequested(self._requested)

    def _listen(self, reading: int) -> None:
        seen = 0
        # The pipe ends when `__exit__` closes its writing side.
        while received := os.read(reading, 64):
            for number in received:
                if number not in STOP_SIGNALS:
                    continue
                seen += 1
                name = signal.Signals(number).name
                if seen > 1:
                    self._on_second(name)
                    os._exit(EXIT_STOPPED)
                self._requested = name
                self._on_first(name)
        os.close(reading)
