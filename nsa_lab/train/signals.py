"""Stop requests: SIGTERM, SIGINT and SIGUSR1 request a save and exit; SIGUSR2 writes the stacks of all threads.

Invariants
* The first request sets a flag. The loop polls it between micro-batches, while it waits for data, and between evaluation
  batches. Inside `raise_immediately()` (compilation, data preparation) nothing polls, so `StopRequested` is raised at the
  current line of the main thread.
* SIGCONT reports that a suspended process was continued, in the main thread and, if that is inside a long call, in the
  listening thread.
* The second request ends the process immediately, even if the main thread is inside a long call that never returns to
  Python: a separate thread reads the signals from a pipe that the C-level handler writes to.
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

from nsa_lab.runs.atomic_io import open_in_place
from nsa_lab.runs.directory import APPEND, EXIT_STOPPED, STOP_SIGNALS


class StopRequested(BaseException):
    """Leave the loop, save, exit with 75. Not an `Exception`, so that no library catches it."""


class StopSignals:
    """Installs the signal handlers for the duration of a `with` block; does nothing outside the main thread.

    `on_first(name)` and `on_second(name)` are called from the listening thread; after `on_second` the process exits with
    75. `on_continued` is called from both threads.
    """

    def __init__(
        self,
        stacks: Path,
        on_first: Callable[[str], None],
        on_second: Callable[[str], None],
        on_continued: Callable[[], None] = lambda: None,
    ) -> None:
        self._stacks_path = stacks
        self._on_first, self._on_second, self._on_continued = on_first, on_second, on_continued
        self._requested: str | None = None
        self._raise_now = False
        self._cleanup: list[Callable[[], Any]] = []

    @property
    def requested_signal(self) -> str | None:
        """Name of the signal that requested a stop, or None."""
        return self._requested

    def should_stop(self) -> bool:
        return self._requested is not None

    def raise_if_requested(self) -> None:
        """Raise `StopRequested` if a stop was requested."""
        if self._requested is not None:
            raise StopRequested(self._requested)

    def request_stop(self) -> None:
        """Request a stop, as a SIGTERM from outside would, from any thread. No effect if one was requested already."""
        if self._cleanup and self._requested is None:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """Raise `StopRequested` at the current line of the main thread if a request arrives within this block."""
        self._raise_now = True
        try:
            self.raise_if_requested()
            yield
        finally:
            self._raise_now = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True).start()
        previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._cleanup += [lambda: signal.set_wakeup_fd(previous_fd), lambda: os.close(write_end)]
        for number in STOP_SIGNALS:
            previous = signal.signal(number, self._handle)
            self._cleanup.insert(0, lambda number=number, previous=previous: signal.signal(number, previous))
        previous = signal.signal(signal.SIGCONT, lambda number, frame: self._on_continued())
        self._cleanup.insert(0, lambda previous=previous: signal.signal(signal.SIGCONT, previous))
        # The launcher blocked these signals in this process. A request that arrived meanwhile is delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        stacks = open(open_in_place(self._stacks_path, APPEND), "a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        self._cleanup += [lambda: faulthandler.unregister(signal.SIGUSR2), stacks.close]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._cleanup:
            self._cleanup.pop(0)()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self._requested = signal.Signals(signal_number).name
        if self._raise_now:
            raise StopRequested(self._requested)

    def _listen(self, read_end: int) -> None:
        n_requests = 0
        # The pipe ends when `__exit__` closes its write end.
        while received := os.read(read_end, 64):
            for signal_number in received:
                if signal_number == signal.SIGCONT:
                    self._on_continued()
                if signal_number not in STOP_SIGNALS:
                    continue
                n_requests += 1
                name = signal.Signals(signal_number).name
                if n_requests > 1:
                    self._on_second(name)
                    os._exit(EXIT_STOPPED)
                self._requested = name
                self._on_first(name)
        os.close(read_end)
