"""Batch prefetching: one thread loads batches, one consumer takes them, and neither can block the other forever.

Invariants
* The queue is bounded and belongs to one worker and one consumer. Steps come in order, without gaps or repeats.
* An exception of the worker is raised in the consumer at its step. There is no fallback batch.
* Every wait ends: with a batch, by a stop request, or with a `DataError` that names the phase.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from nsa_lab.data.errors import DataError

POLL_S = 0.05
MAX_POLL_S = 5.0  # a longer poll is one during which the process was suspended


class Prefetcher:
    """Load `load(step)` for `first`, `first` + 1, ... up to `stop` (exclusive; None: unlimited), `depth` steps ahead.

    `load` returns tensors, or tuples and lists of them. Other values are passed through.
    `pin_memory`: pin the tensors for asynchronous copies to a GPU.

    A context manager: leaving it stops the thread.
    """

    def __init__(
        self,
        load: Callable[[int], Any],
        first: int = 0,
        stop: int | None = None,
        depth: int = 2,
        timeout_s: float = 120.0,
        pin_memory: bool = False,
    ) -> None:
        self._load = load
        self._next = first
        self._stop = stop
        self._timeout_s = timeout_s
        self._pin_memory = pin_memory
        self._queue: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(first,), name="nsa_lab batches", daemon=True)
        self._thread.start()

    def get(self, step: int, should_stop: Callable[[], bool] | None = None) -> Any:
        """Return the result of `load(step)`, or None as soon as `should_stop()` is true while waiting.

        Raises an exception of `load`, `DataError` if no batch arrives within `timeout_s`, and `ValueError` for a step out
        of order.
        """
        if step != self._next or (self._stop is not None and step >= self._stop):
            raise ValueError(
                f"get({step}): the next step is {self._next} of {self._stop}; create a new Prefetcher for another step"
            )
        waited_s, last_poll = 0.0, time.monotonic()
        while True:
            try:
                _, value, error = self._queue.get(timeout=POLL_S)
                break
            except queue.Empty:
                if should_stop is not None and should_stop():
                    return None
                now = time.monotonic()
                # A longer gap is a suspension of the process, in which no batch can arrive.
                waited_s, last_poll = waited_s + min(now - last_poll, MAX_POLL_S), now
                if waited_s > self._timeout_s:
                    raise DataError(
                        f"data: no batch for step {step} within {self._timeout_s:g} s (phase: reading shards); "
                        "check the disk that holds the shards, or raise data.timeout_s"
                    ) from None
        if error is not None:
            # A repeated call raises the same error instead of waiting for a thread that has ended.
            self._queue.put((step, None, error))
            raise error
        self._next += 1
        return value

    def close(self) -> None:
        """Stop the thread. A `load` that never returns is abandoned; the thread is a daemon."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self, step: int) -> None:
        while not self._closing.is_set() and (self._stop is None or step < self._stop):
            try:
                value = self._load(step)
                item = (step, _pin(value) if self._pin_memory else value, None)
            except BaseException as error:  # noqa: BLE001 - every exception is raised in the consumer
                item = (step, None, error)
            self._put(item)
            if item[2] is not None:
                return
            step += 1

    def _put(self, item: tuple[int, Any, BaseException | None]) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return
            except queue.Full:
                continue


def _pin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, (tuple, list)):
        # A named tuple takes its fields as separate arguments.
        make = getattr(value, "_make", type(value))
        return make(_pin(item) for item in value)
    return value
