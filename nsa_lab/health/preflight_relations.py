"""Relations between the checks of a preflight: each runs once, none is missing, and its numbers satisfy its limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.event_schema import PreflightEvent
from nsa_lab.runs.history import History

# `nsa_lab.train.preflight` runs these for every configuration; "documents" only with document masking.
REQUIRED = (
    *("profile", "units", "disk", "data", "initial_loss", "causality", "gradients", "memory", "kernel_parity"),
    *("checkpoint", "throughput"),
)
UNIT_BYTES = {"GB": 1e9, "MB": 1e6, "GiB": 2.0**30, "MiB": 2.0**20}
MEMORY_LIMIT = re.compile(r"([\d.]+) ?% of ([\d.]+) ([GM]i?B)")
SPEED_LIMIT = re.compile(r"([\d,]+) tokens/s")
ROUNDING = 1e-2  # relative, of a size with two decimals


def find_preflight_problem(history: History, checks: Sequence[PreflightEvent]) -> str | None:
    """Return a text on checks of one preflight that passed, but cannot be its record; None if there is none."""
    names = [str(event.get("name")) for event in checks]
    if repeated := [name for name in names if names.count(name) > 1]:
        return f"{repeated[0]} is recorded {names.count(repeated[0])} times, expected one check of each name"
    required = (*REQUIRED, "documents") if history.config.data.documents == "mask" else REQUIRED
    missing = [name for name in required if name not in names]
    # Older versions, which had other checks, recorded no durations. An attempt may still run its preflight.
    is_complete = bool((history.steps.ints("attempt") == checks[0]["attempt"]).any())
    if missing and is_complete and all("seconds" in event for event in checks):
        return f"{missing[0]} is missing, which runs before every run of this configuration"
    return next(filter(None, map(_find_contradiction, checks)), None)


def _find_contradiction(event: PreflightEvent) -> str | None:
    """Return a text on a passed check whose recorded number is beyond its limit; None if there is none."""
    numbers: Any = event.get("numbers")
    if not isinstance(numbers, dict):
        return None
    name, limit = event.get("name"), str(event.get("limit"))
    peak: Any = numbers.get("peak_bytes")
    speed: Any = numbers.get("tokens_per_s")
    if name == "memory" and is_finite(peak) and (found := MEMORY_LIMIT.match(limit)):
        highest = float(found[1]) / 100 * float(found[2]) * UNIT_BYTES[found[3]]
        if not 0 < peak <= highest * (1 + ROUNDING):
            return f"memory passed with a peak of {peak:,.0f} bytes, limit {highest:,.0f}"
    if name == "throughput" and is_finite(speed):
        found = SPEED_LIMIT.match(limit)
        lowest = float(found[1].replace(",", "")) if found else 0.0
        if speed <= 0 or speed < lowest - 1:
            return f"throughput passed with {speed:,.0f} tokens/s, limit {lowest:,.0f}"
    return None
