"""Waiting for a network that may stall: bounded, interruptible, and by name.

A blocking read cannot be interrupted from outside, so it runs in a thread of its own while the caller counts the time. A
thread that never comes back is left behind; it is a daemon and ends with the process.
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
    """`function()`, and again with growing pauses after a transient error, for at most `timeout_s` or `attempts` calls.

    `tick` is called about twice a second; what it raises ends the wait. Raises `DataError` with `phase` and `remedy`
    when the patience ends, and at once what `function` raised if that is not transient.
    """
    deadline = time.monotonic() + timeout_s
    reason = ""
    for attempt in itertools.count(1):
        answer = _run_in_thread(function)
        if not _wait_until_done(answer, deadline, tick):
            raise DataError(f"{phase}: no answer within {timeout_s:g} s (data.timeout_s){reason}; {remedy}")
        error = answer.exception()
        if error is None:
            return answer.result()
        if not is_transient(error):
            raise error
        pause = min(2.0 ** (attempt - 1), MAX_PAUSE_S)
        reason = f", last error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if attempt == max_attempts or time.monotonic() + pause >= deadline:
            raise DataError(f"{phase}: tried {attempt} times{reason}; {remedy}") from error
        _wait_until_done(Future(), time.monotonic() + pause, tick)
    raise AssertionError("unreachable: the loop above has no end of its own")


def _run_in_thread(function: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that waits
            future.set_exception(error)

    threading.Thread(target=work, name="nsa_lab source", daemon=True).start()
    return future


def _wait_until_done(future: Future, deadline: float, tick: Callable[[], None]) -> bool:
    """Whether `future` was done before `deadline`."""
    while not future.done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        wait([future], timeout=min(left, TICK_INTERVAL_S))
        tick()
    return True
