"""How fast a filling goes, from what it reports."""

from __future__ import annotations

import time
from typing import Any

from nsa_lab.data.build_shards import BuildProgress

# Documents come by the thousand in a second, and a reader looks once in a few.
REPORT_INTERVAL_S = 5.0


class ProgressMeter:
    """Takes every report of a filling and gives now and then what a person wants to know of it.

    The rate is that since the first report with documents: a filling that goes on has documents from before.
    """

    def __init__(self, interval_s: float = REPORT_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._first: tuple[float, BuildProgress] | None = None
        self._latest: BuildProgress | None = None
        self._last_report_s = -interval_s

    def observe(self, progress: BuildProgress) -> bool:
        """Whether the filling got somewhere since the last report; waiting reports nothing new."""
        moved = bool(progress.documents) and (self._latest is None or progress.documents > self._latest.documents)
        if moved:
            self._first = self._first or (time.monotonic(), progress)
        self._latest = progress
        return moved

    def take_report(self) -> dict[str, Any] | None:
        """The fields of a `fill` event: what it is doing, how far it is, bytes per second, seconds left. None too soon."""
        now = time.monotonic()
        if self._latest is None or now - self._last_report_s < self._interval_s:
            return None
        self._last_report_s, latest = now, self._latest
        told: dict[str, Any] = {
            "doing": latest.phase,
            "documents": latest.documents,
            "bytes": latest.text_bytes,
            "tokens_filled": latest.train_tokens,
            "tokens_wanted": latest.total_tokens,
            "bytes_per_s": None,
            "left_s": None,
        }
        if self._first is None or not latest.documents or now - self._first[0] < min(1.0, self._interval_s):
            return told
        seconds, first = now - self._first[0], self._first[1]
        told["bytes_per_s"] = (latest.text_bytes - first.text_bytes) / seconds
        rate = (latest.train_tokens - first.train_tokens) / seconds
        if latest.total_tokens and rate > 0:
            told["left_s"] = max(latest.total_tokens - latest.train_tokens, 0) / rate
        return told
