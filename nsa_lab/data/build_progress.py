"""Speed and remaining time of a shard build, computed from its progress reports."""

from __future__ import annotations

import time
from typing import Any

from nsa_lab.data.build_shards import BuildProgress

# A build reports thousands of documents per second; an event every few seconds is enough for a reader.
REPORT_INTERVAL_S = 5.0


class ProgressMeter:
    """Observe every progress report of a build and return event fields at intervals.

    The rate is measured from the first report with documents, because a resumed build starts with the documents of earlier
    calls.
    """

    def __init__(self, interval_s: float = REPORT_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._first: tuple[float, BuildProgress] | None = None
        self._latest: BuildProgress | None = None
        self._last_report_s = -interval_s

    def observe(self, progress: BuildProgress) -> bool:
        """Record a report and return whether the build advanced since the last one; waiting does not advance it."""
        has_advanced = bool(progress.documents) and (self._latest is None or progress.documents > self._latest.documents)
        if has_advanced:
            self._first = self._first or (time.monotonic(), progress)
        self._latest = progress
        return has_advanced

    def take_report(self) -> dict[str, Any] | None:
        """Return the fields of a `fill` event: phase, progress, bytes per second, seconds remaining.

        None if the last report is less than `interval_s` old.
        """
        now = time.monotonic()
        if self._latest is None or now - self._last_report_s < self._interval_s:
            return None
        self._last_report_s, latest = now, self._latest
        fields: dict[str, Any] = {
            "doing": latest.phase,
            "documents": latest.documents,
            "bytes": latest.text_bytes,
            "tokens_filled": latest.train_tokens,
            "tokens_wanted": latest.total_tokens,
            "bytes_per_s": None,
            "left_s": None,
        }
        if self._first is None or not latest.documents or now - self._first[0] < min(1.0, self._interval_s):
            return fields
        seconds, first = now - self._first[0], self._first[1]
        fields["bytes_per_s"] = (latest.text_bytes - first.text_bytes) / seconds
        rate = (latest.train_tokens - first.train_tokens) / seconds
        if latest.total_tokens and rate > 0:
            fields["left_s"] = max(latest.total_tokens - latest.train_tokens, 0) / rate
        return fields
