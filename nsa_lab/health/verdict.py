"""The result type of health checks, and all thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Thresholds of `nsa-lab health`. Shares are fractions of 1, bpb is bits per byte, entropies are in nats."""

    validation_fall: float = (
        0.25  # minimum relative fall of validation bpb from the untrained model; scaled before step 100
    )
    floor_bpb: float = 0.30  # lower bound for a byte model of text: below, it sees its targets or a repeated text
    noise_slack_bits: float = 0.03  # uniform bytes cost log2(255) bits; the mean of one batch deviates by less than this
    ratio_to_best: float = 1.05  # last validation bpb / best validation bpb
    validation_gap: float = 1.25  # final validation bpb / training bpb
    lr_error: float = 1e-6  # relative to the peak rate: the schedule is a formula, so only rounding may differ
    training_fall: float = 0.25  # minimum relative fall of the training loss from its first reading; scaled before step 100
    training_ratio_to_lowest: float = 1.25  # latest / lowest training loss, both means of the same number of readings
    training_standard_errors: float = 5.0  # minimum excess over the lowest, in standard errors of their difference
    equal_losses: int = 5  # bitwise equal readings in a row: every batch has different text, so losses should differ
    gradient_norm: float = 1e3  # multiple of max(train.grad_clip, 1); above it the clipped gradient is mostly noise
    pace_window_s: float = 2.0  # readings are merged into windows of this length: single short steps are too noisy
    slow_factor: float = 0.6  # a window is slow if its speed is below this fraction of the run's best tenth
    slow_share: float = 0.10  # maximum fraction of slow windows; all windows have the same number of steps
    slow_min_s: float = 30.0  # slow windows of less time in total are attributed to other programs
    data_wait: float = 0.10  # maximum fraction of the training time spent waiting for data
    memory_growth: float = 1.5  # maximum resident memory in the second half / in the first half
    heartbeats: float = 0.5  # minimum fraction of the heartbeats expected in the duration of the last attempt
    clock_back_s: float = 60.0  # tolerance for clocks of two hosts, or a corrected clock
    gate_min_change: float = 0.002  # minimum change of a layer's branch shares or entropy that counts as movement
    gate_even: float = 0.05  # a layer is unspecialized if its branch shares never differ from 1/3 by more than this
    gate_pinned: float = 1e-4  # an entropy this close to ln 3 in every reading means a gate of zeros
    gate_entropy: float = 0.20  # a layer below this has collapsed onto one branch (equal shares: ln 3 = 1.099)
    gate_share: float = 0.02  # a branch below this share is unused in the layer
    gate_saturation: float = 0.50  # maximum fraction of gate values within 0.01 of 0 or 1, which pass no gradient
    gate_readings: float = 0.10  # maximum fraction of readings with a collapsed, saturated or branchless gate
    gate_constant_readings: int = 3  # readings in a row without any change, bitwise
    equal_readings: int = 5  # readings of a statistic in a row that are equal in all layers: it is no longer measured
    selection_gain: float = 0.25  # minimum loss increase (nats per byte) of answers beyond the window without the selection
    selection_gain_share: float = (
        0.5  # the same, relative to the loss without it: two random selections differ by 1/4 (16 sequences) or 1/2 (4)
    )
    selection_gain_after: float = 0.5  # fraction of the steps before which copying may not have formed yet
    reuse_constant: float = 0.9995  # neighboring queries share this many of their blocks: selection ignores the query
    reuse_slack: float = (
        0.05  # neighboring queries that share fewer blocks than chance minus this avoid each other's blocks
    )
    distance_margin: float = 0.02  # of the range from always-nearest to always-oldest blocks; closer is not content-based
    selection_steps: int = 100  # an untrained model attends evenly, and ties select the oldest blocks
    sink_share: float = 0.80  # maximum fraction of the selected attention on the first block
    dense_gap: float = 0.01  # maximum validation bpb relative to the dense baseline, minus 1
    plan_memory: float = 0.15  # maximum relative deviation of peak memory from the estimate
    plan_time: float = 0.25  # maximum relative deviation of the time from the estimate
    trial_steps: int = 100  # a shorter run is a trial: scaled limits have not reached their full values
    trial_tokens: float = 1.0  # minimum tokens per parameter; with fewer, the model has seen too little text to judge it
    diverged_loss: float = 1.5  # last loss / lowest loss of a halted run
    diverged_gradient: float = 10.0  # last gradient norm / smallest gradient norm
    risky_lr: float = 0.03  # weights start at a few hundredths, and AdamW moves each by about the rate per step
    decode_error: float = 1e-6  # maximum difference / largest logit, cached decoding against a full pass, in float64


LIMITS = Limits()


@dataclass(frozen=True)
class Verdict:
    """Result of one check. `ok`: True, False, or None if unknown. `value` was compared with `limit`."""

    name: str
    ok: bool | None
    value: float | None
    limit: float | None
    text: str

    @property
    def mark(self) -> str:
        return {True: "ok", False: "FAIL", None: "?"}[self.ok]

    def __str__(self) -> str:
        return f"{self.mark:<4} {self.name}: {self.text}"


def join_lines(text: Any) -> str:
    """Return the text without line breaks; empty for None."""
    return " ".join(str(text).split()) if text is not None else ""


def list_names(value: Any) -> list[str]:
    """Return the strings in a list recorded in an event; empty if the field is not a list."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
