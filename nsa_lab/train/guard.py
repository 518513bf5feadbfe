"""Rules that watch a run. Each is small enough to test separately: one case that triggers it, one that does not.

A rule observes numbers that are already on the host and returns a `Finding` or None. `halt` stops the run and writes a
diagnosis; `warn` is only recorded. Limits are relative to the run's own past if possible.

    non_finite   loss or gradient that is not finite          halt   (the update was skipped on the device)
    spike        loss far above its recent window             halt   (train.spike_sigma; 0: off)
    throughput   below train.min_tokens_per_s, sustained      halt   (0: off)
    slowdown     far below the run's own best pace            warn
    saturated    gates of a layer stuck at 0 or 1             warn
    frozen       gate weights of a layer that do not change   warn
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SPIKE_WINDOW, SPIKE_MIN_LOSSES = 128, 32
# A run must be slow for this many seconds before it is reported. A short burst of another program does not count, and
# three log points of a small run can take half a second.
SLOW_DURATION_S = 30.0
# Fraction of the attempt's best pace. Half the pace is below it, and so, eventually, is a pace that declines slowly.
SLOW_FACTOR = 0.6
# Log points over which the best pace is the median; the first comparison is possible after PACE_MIN_POINTS.
PACE_WINDOW, PACE_MIN_POINTS = 20, 5


@dataclass(frozen=True)
class Finding:
    """Result of a rule. `step`: the step that it is about; `text`: a sentence for the report."""

    rule: str
    step: int
    value: float
    limit: float
    action: str
    text: str


@dataclass(frozen=True)
class PreflightCheck:
    """Result of one check before a run. `value`: the measured value, `limit`: the required one, both as text with units.

    `numbers`: further measurements by name; the name contains the unit.
    """

    name: str
    ok: bool
    value: str
    limit: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


class Halt(Exception):
    """A rule stops the run. The weights are those after the last good step."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


def check_non_finite(step: int, loss: float, grad_norm: float, is_bad: float) -> Finding | None:
    """Check the flag that the device sets. It stays set, so the first step that shows it is the bad one."""
    if not is_bad:
        return None
    quantity = "loss" if not math.isfinite(loss) else "gradient norm"
    value = loss if quantity == "loss" else grad_norm
    return Finding(
        "non_finite",
        step,
        value,
        0.0,
        "halt",
        f"step {step}: the {quantity} is {value}; the update was skipped, weights and moments are those of step {step - 1}",
    )


class SpikeRule:
    """Halts if a loss is more than `sigma` standard deviations above the mean of the last `SPIKE_WINDOW` losses.

    Off if `sigma` is 0, and until it has seen `SPIKE_MIN_LOSSES`. `losses`: the window, which is saved in a checkpoint
    and passed in on resume.
    """

    def __init__(self, sigma: float, losses: Iterable[float] = ()) -> None:
        self._sigma = sigma
        self._losses = deque(losses, maxlen=SPIKE_WINDOW)

    @property
    def losses(self) -> list[float]:
        return list(self._losses)

    def observe(self, step: int, loss: float) -> Finding | None:
        window = self.losses
        self._losses.append(loss)
        if not self._sigma or len(window) < SPIKE_MIN_LOSSES:
            return None
        # The lower bound of the deviation avoids findings on a plateau, whose deviation is rounding noise.
        deviation = max(statistics.pstdev(window), 0.005 * abs(statistics.fmean(window)))
        limit = statistics.fmean(window) + self._sigma * deviation
        if loss <= limit:
            return None
        return Finding(
            "spike",
            step,
            loss,
            limit,
            "halt",
            f"step {step}: loss {loss:.4f} is above {limit:.4f}, {self._sigma:g} standard deviations over its window",
        )


class ThroughputRule:
    """Checks tokens per second at log points, except the first of an attempt, which includes compilation.

    Halts after `patience` consecutive log points below `minimum` (0: off). Warns once after `patience_slow` consecutive
    log points, and `SLOW_DURATION_S` seconds, below `SLOW_FACTOR` times the best pace. The best pace is the highest
    median of `PACE_WINDOW` consecutive log points so far; unlike a median of the recent past, a slow decline does not
    lower it.
    """

    def __init__(self, minimum: float, *, patience: int = 10, patience_slow: int = 3) -> None:
        self._minimum, self._patience, self._patience_slow = minimum, patience, patience_slow
        self._recent_paces: deque[float] = deque(maxlen=PACE_WINDOW)
        self._best_pace = 0.0
        self._n_below = self._n_slow = 0
        self._slow_duration_s, self._has_warned = 0.0, False

    def observe(self, step: int, tokens_per_s: float, seconds: float = math.inf) -> Finding | None:
        """Observe the pace at a log point, and the seconds since the previous one."""
        self._n_below = self._n_below + 1 if tokens_per_s < self._minimum else 0
        if self._minimum and self._n_below >= self._patience:
            return Finding(
                "throughput",
                step,
                tokens_per_s,
                self._minimum,
                "halt",
                f"step {step}: {tokens_per_s:,.0f} tokens/s, below train.min_tokens_per_s = "
                f"{self._minimum:,.0f} at {self._n_below} consecutive log points",
            )
        return self._check_slowdown(step, tokens_per_s, seconds)

    def _check_slowdown(self, step: int, tokens_per_s: float, seconds: float) -> Finding | None:
        limit = SLOW_FACTOR * self._best_pace
        self._recent_paces.append(tokens_per_s)
        if len(self._recent_paces) >= PACE_MIN_POINTS:
            self._best_pace = max(self._best_pace, statistics.median(self._recent_paces))
        if tokens_per_s >= limit:
            self._n_slow, self._slow_duration_s, self._has_warned = 0, 0.0, False
            return None
        self._n_slow, self._slow_duration_s = self._n_slow + 1, self._slow_duration_s + seconds
        if self._has_warned or self._n_slow < self._patience_slow or self._slow_duration_s < SLOW_DURATION_S:
            return None
        self._has_warned = True
        return Finding(
            "slowdown",
            step,
            tokens_per_s,
            limit,
            "warn",
            f"step {step}: {tokens_per_s:,.0f} tokens/s, less than {SLOW_FACTOR:.0%} of the best pace of this attempt, "
            f"{self._best_pace:,.0f} tokens/s",
        )


class GateRule:
    """Warns once per layer if its gates are stuck: all near 0 or 1, or their weights do not change.

    `saturation`: fraction of a layer's gate values within 1% of 0 or 1. `update`: norm of the change of its gate weights
    since the last reading. Either must hold for `patience` consecutive readings.
    """

    def __init__(self, *, saturation_limit: float = 0.95, patience: int = 3) -> None:
        self._limit, self._patience = saturation_limit, patience
        self._n_consecutive: dict[tuple[str, int], int] = {}

    def observe(self, step: int, saturation: Sequence[float], update: Sequence[float]) -> list[Finding]:
        saturated = [
            Finding(
                "saturated",
                step,
                value,
                self._limit,
                "warn",
                f"step {step}: {value:.0%} of the gate values of layer {layer} are within 1% of 0 or 1",
            )
            for layer, value in enumerate(saturation)
            if self._has_persisted("saturated", layer, value >= self._limit)
        ]
        return saturated + [
            Finding("frozen", step, value, 0.0, "warn", f"step {step}: the gate weights of layer {layer} do not change")
            for layer, value in enumerate(update)
            if self._has_persisted("frozen", layer, value == 0.0)
        ]

    def _has_persisted(self, rule: str, layer: int, is_present: bool) -> bool:
        count = self._n_consecutive[rule, layer] = self._n_consecutive.get((rule, layer), 0) + 1 if is_present else 0
        return count == self._patience
