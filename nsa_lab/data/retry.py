"""Call a function that may stall on the network: with retries, a time limit, and interruptible.

A blocking read cannot be interrupted from outside. It therefore runs in its own thread while the caller watches the clock.
A thread that never returns is abandoned; it is a daemon and ends with the process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from nsa_lab.data.errors import DataError

T = TypeVar("T")
TICK_INTERVAL_S = 0.5
MAX_TICK_S = 5.0  # a longer interval is one during which the process was suspended
MAX_PAUSE_S = 30.0


def call_with_retry(
    function: Callable[[], T],
    phase: str,
    remedy: str,
    timeout_s: float,
    is_transient: Callable[[BaseException], bool],
    tick: Callable[[], None] = lambda: None,
    max_attempts: int | None = None,
) -> T:
    """Return `function()`. Retry transient errors with growing pauses, for at most `timeout_s` or `max_attempts` calls.

    `tick`: called about twice a second; an exception from it ends the wait. Raises `DataError` with `phase` and `remedy`
    when the time or the attempts run out. Raises a non-transient error of `function` immediately.
    """
    deadline = time.monotonic() + timeout_s
    reason = ""
    for attempt in itertools.count(1):
        future = _run_in_thread(function)
        if not _wait_until_done(future, deadline, tick):
            raise DataError(f"{phase}: no answer within {timeout_s:g} s (data.timeout_s){reason}; {remedy}")
        error = future.exception()
        if error is None:
            return future.result()
        if not is_transient(error):
            raise error
        pause = min(2.0 ** (attempt - 1), MAX_PAUSE_S)
        reason = f", last error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if attempt == max_attempts or time.monotonic() + pause >= deadline:
            raise DataError(f"{phase}: tried {attempt} times{reason}; {remedy}") from error
        _wait_until_done(Future(), time.monotonic() + pause, tick)
    raise AssertionError("unreachable: the loop above is infinite")


def _run_in_thread(function: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - passed to the waiting thread
            future.set_exception(error)

    threading.Thread(target=work, name="nsa_lab source", daemon=True).start()
    return future


def _wait_until_done(future: Future, deadline: float, tick: Callable[[], None]) -> bool:
    """Return whether `future` was done before `deadline`, which is later after a suspension of the process."""
    last = time.monotonic()
    while not future.done():
        now = time.monotonic()
        deadline += max(now - last - MAX_TICK_S, 0.0)
        last = now
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        wait([future], timeout=min(remaining_s, TICK_INTERVAL_S))
        tick()
    return True
