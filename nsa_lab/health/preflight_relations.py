"""Relations between the checks of a preflight: each runs once, none is missing, and it agrees with its limit and the run.

Most checks record texts only, and those of older versions differ: a text of another form is not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from nsa_lab.config.errors import shorten
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
SIZE = re.compile(r"([\d.]+) ([GM]i?B)\b")
CHANGE = re.compile(r"logits .* (?:change|move) by (\S+) when")
ERROR_SHARE = re.compile(r"([\d.]+) of (?:the allowed error|what is allowed)\b")
PARAMETERS = re.compile(r"([\d,]+) parameters\b")
LEAST_PARAMETERS = re.compile(r"at least ([\d,]+) parameters\b")
STAGE = re.compile(r"([\d,]+) optimi[sz]er steps x ([\d,]+) tokens")
INITIAL_LOSS = re.compile(r"([\d.]+)(?:; standard deviation of the logits ([\d.]+))?$")
# For new weights: a tolerance in percent, or in nats with bounds of the logits; for pretrained ones, an upper bound.
LOSS_LIMITS = (
    re.compile(r"(?P<expected>[\d.]+) \(ln V\) within (?P<percent>[\d.]+) ?%"),
    re.compile(r"(?P<expected>[\d.]+) \(ln V \+ .*\) ± (?P<nats>[\d.]+); s from (?P<low>[\d.]+) to (?P<high>[\d.]+)"),
    re.compile(r"below (?P<highest>[\d.]+) \(ln V\)"),
)
# Beginning of the value of a passed check, by its limit.
PASSED_VALUES = {
    "all parameters": re.compile(r"all$"),
    "equal logits": re.compile(r".*the probe is equal after loading$"),
    "the same logits": re.compile(r".*the probe is the same after loading$"),
}
ROUNDING = 1e-2  # relative, of a size with two decimals
LAST_DIGIT = 1e-3  # of a loss and of a standard deviation


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
    return next(filter(None, (find(history, event) for event in checks for find in RELATIONS)), None)


def _read_count(text: str) -> int:
    return int(text.replace(",", ""))


def _find_other_number(history: History, event: PreflightEvent) -> str | None:
    """A recorded number satisfies its limit."""
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
        lowest = _read_count(found[1]) if found else 0
        if speed <= 0 or speed < lowest - 1:
            return f"throughput passed with {speed:,.0f} tokens/s, limit {lowest:,.0f}"
    return None


def _find_other_text(history: History, event: PreflightEvent) -> str | None:
    """The value of a passed check satisfies the limit in the same event."""
    name, value, limit = (str(event.get(key)) for key in ("name", "value", "limit"))
    expected = PASSED_VALUES.get(limit)
    is_other = expected is not None and not expected.match(value)
    if name == "disk" and (free := SIZE.match(value)) and (needed := SIZE.match(limit)):
        sizes = [float(found[1]) * UNIT_BYTES[found[2]] for found in (free, needed)]
        is_other = sizes[0] < sizes[1] * (1 - ROUNDING)
    elif name in ("causality", "documents") and (found := CHANGE.match(value)):
        is_other = not _read_number(found[1]) <= _read_number(limit)
    elif name == "kernel_parity" and (found := ERROR_SHARE.match(value)):
        is_other = not _read_number(found[1]) <= 1.0
    elif name == "profile" and (found := PARAMETERS.match(value)) and (least := LEAST_PARAMETERS.search(limit)):
        is_other = _read_count(found[1]) < _read_count(least[1])
    elif name == "initial_loss":
        is_other = _is_other_loss(value, limit)
    return f"{name} passed with {shorten(value)}, limit {shorten(limit)}" if is_other else None


def _read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_other_loss(value: str, limit: str) -> bool:
    """Return whether the loss of the new model, or the deviation of its logits, is outside its limit."""
    measured = INITIAL_LOSS.match(value)
    bounds = next((found.groupdict() for form in LOSS_LIMITS if (found := form.match(limit))), None)
    if measured is None or bounds is None:
        return False
    loss, numbers = _read_number(measured[1]), {name: _read_number(text) for name, text in bounds.items()}
    if "highest" in numbers:
        return not loss < numbers["highest"] + LAST_DIGIT
    tolerance = numbers.get("nats", numbers["expected"] * numbers.get("percent", 0.0) / 100)
    if not abs(loss - numbers["expected"]) <= tolerance + LAST_DIGIT:
        return True
    is_bounded = "low" in numbers and measured[2] is not None
    return is_bounded and not numbers["low"] - LAST_DIGIT <= _read_number(measured[2]) <= numbers["high"] + LAST_DIGIT


def _find_other_run(history: History, event: PreflightEvent) -> str | None:
    """The preflight checked the model and the schedule of the run."""
    name, value = event.get("name"), str(event.get("value"))
    recorded = {start.get("params") for start in history.first_events} - {None}
    if name == "profile" and recorded and (found := PARAMETERS.match(value)) and _read_count(found[1]) not in recorded:
        return f"profile is of a model with {found[1]} parameters, the first event has {min(recorded):,}"
    if name == "units" and (found := STAGE.findall(value)):
        stages = [(_read_count(steps), _read_count(tokens)) for steps, tokens in found]
        plan = [(stage.steps, stage.tokens_per_step) for stage in history.config.train.plan]
        for own, planned in zip(stages, plan, strict=False):
            if own != planned:
                return (
                    f"units has {own[0]:,} steps of {own[1]:,} tokens, but config.yaml has {planned[0]:,} of {planned[1]:,}"
                )
        if len(stages) != len(plan):
            return f"units has {len(stages)} stages, but config.yaml has {len(plan)}"
    return None


RELATIONS: tuple[Callable[[History, PreflightEvent], str | None], ...] = (
    _find_other_number,
    _find_other_text,
    _find_other_run,
)
