"""Rules that watch a run, each small enough to test alone: one that fires it, one where it stays silent.

A rule observes numbers that are already on the host and answers with a `Finding` or None. `halt` stops the run with a
diagnosis; `warn` is recorded and the run goes on. Limits are relative to the run's own past where there is one.

    non_finite   a loss or gradient that is not finite     halt   (the update was skipped on the device)
    spike        a loss far above its recent window        halt   (train.spike_sigma; 0: off)
    throughput   below train.min_tokens_per_s, sustained   halt   (0: off)
    slowdown     well below the run's own best pace        warn
    saturated    gates of a layer stuck at 0 or 1          warn
    frozen       gate weights of a layer that never move   warn
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SPIKE_WINDOW, SPIKE_MIN_LOSSES = 128, 32
# Seconds for which a run must be slow before it is said: another program's burst is not the run's fault, and three log
# points can be half a second of a small run.
SLOW_DURATION_S = 30.0
# Of the best pace that the attempt kept: half the speed is below it, and so is, some day, one that creeps down.
SLOW_FACTOR = 0.6
# Log points over which a pace must be kept to count; the first judgement is after the fewer.
PACE_WINDOW, PACE_MIN_POINTS = 20, 5


@dataclass(frozen=True)
class Finding:
    """What a rule found. `step` is the step it is about; `text` is a sentence for the report."""

    rule: str
    step: int
    value: float
    limit: float
    action: str
    text: str


class Halt(Exception):
    """A rule stops the run. The weights are those after the last good step."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


def check_non_finite(step: int, loss: float, grad_norm: float, is_bad: float) -> Finding | None:
    """Judge the flag that the device raised; once raised it stays, so the first step that shows it is the bad one."""
    if not is_bad:
        return None
    what = "loss" if not math.isfinite(loss) else "gradient norm"
    value = loss if what == "loss" else grad_norm
    return Finding(
        "non_finite",
        step,
        value,
        0.0,
        "halt",
        f"step {step}: the {what} is {value}; the update was skipped, weights and moments are those of step {step - 1}",
    )


class SpikeRule:
    """Halts on a loss more than `sigma` standard deviations above the mean of the last 128; off at `sigma` 0.

    Silent until 32 losses were seen. `losses` is the window, saved with a checkpoint and given back on resume.
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
        # The floor keeps a plateau, whose deviation is rounding, from calling every ripple a spike.
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
            f"step {step}: loss {loss:.4f} is above {limit:.4f}, {self._sigma:g} deviations over its window",
        )


class ThroughputRule:
    """Judges tokens per second at log points, after the first of an attempt (which holds compilation).

    Halts after `patience` log points in a row below `minimum` (0: off); warns once when `patience_slow` in a row, and
    `SLOW_FOR_S` seconds, are below `SLOW_FACTOR` of the best pace, the highest median of `PACE_WINDOW` log points in a row
    so far. A slow decline does not lower that, as it would a median of the past.
    """

    def __init__(self, minimum: float, *, patience: int = 10, patience_slow: int = 3) -> None:
        self._minimum, self._patience, self._patience_slow = minimum, patience, patience_slow
        self._recent_paces: deque[float] = deque(maxlen=PACE_WINDOW)
        self._best_pace = 0.0
        self._n_below = self._n_slow = 0
        self._slow_duration_s, self._has_warned = 0.0, False

    def observe(self, step: int, tokens_per_s: float, seconds: float = math.inf) -> Finding | None:
        """The speed at a log point, and the seconds since the one before it."""
        self._n_below = self._n_below + 1 if tokens_per_s < self._minimum else 0
        if self._minimum and self._n_below >= self._patience:
            return Finding(
                "throughput",
                step,
                tokens_per_s,
                self._minimum,
                "halt",
                f"step {step}: {tokens_per_s:,.0f} tokens/s, below train.min_tokens_per_s = "
                f"{self._minimum:,.0f} at {self._n_below} log points in a row",
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
            f"step {step}: {tokens_per_s:,.0f} tokens/s, less than {SLOW_FACTOR:.0%} of the {self._best_pace:,.0f} that this "
            "run kept before",
        )


class GateRule:
    """Warns once per layer, when its gates are stuck: all at 0 or 1, or their weights not moving at all.

    `saturation` is the share of a layer's gate values within 1 % of 0 or 1; `update` the norm by which its gate weights
    moved since the last reading. Either must show in `patience` readings in a row.
    """

    def __init__(self, *, saturation_limit: float = 0.95, patience: int = 3) -> None:
        self._limit, self._patience = saturation_limit, patience
        self._n_consecutive: dict[tuple[str, int], int] = {}

    def observe(self, step: int, saturation: Sequence[float], update: Sequence[float]) -> list[Finding]:
        found = [
            Finding(
                "saturated",
                step,
                value,
                self._limit,
                "warn",
                f"step {step}: {value:.0%} of layer {layer}'s gate values are within 1 % of 0 or 1",
            )
            for layer, value in enumerate(saturation)
            if self._has_persisted("saturated", layer, value >= self._limit)
        ]
        return found + [
            Finding("frozen", step, value, 0.0, "warn", f"step {step}: the gate weights of layer {layer} do not move")
            for layer, value in enumerate(update)
            if self._has_persisted("frozen", layer, value == 0.0)
        ]

    def _has_persisted(self, rule: str, layer: int, is_present: bool) -> bool:
        row = self._n_consecutive[rule, layer] = self._n_consecutive.get((rule, layer), 0) + 1 if is_present else 0
        return row == self._patience
