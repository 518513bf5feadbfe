"""What a verdict is, and every threshold that one is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """The thresholds of `nsa-lab health`. Shares are of 1, bits are per byte, entropies in nats."""

    validation_fall: float = 0.25  # fall of validation bpb from the untrained model's; smaller for runs under 100 steps
    floor_bpb: float = 0.30  # no text is that predictable to a byte model: below, it sees its targets or a repeated text
    noise_slack_bits: float = 0.03  # uniform bytes cost log2(255) bits; a mean over one batch strays less than this
    ratio_to_best: float = 1.05  # last validation bpb over the best one
    validation_gap: float = 1.25  # validation bpb over training bpb at the end
    lr_error: float = 1e-6  # of the peak rate: the schedule is a formula, and only rounding may differ
    training_fall: float = 0.25  # fall of the training loss from its first reading; smaller for runs under 100 steps
    training_ratio_to_lowest: float = 1.25  # the latest training loss over the lowest, both means of as many readings
    training_standard_errors: float = 5.0  # and above it by at least so many standard errors of their difference
    equal_losses: int = 5  # readings in a row that are equal to the last bit: every batch is another text
    gradient_norm: float = 1e3  # times train.grad_clip, or times 1 if that is less: past that, clipping leaves only noise
    pace_window_s: float = 2.0  # readings are joined until they span this: single short steps say nothing on a busy machine
    slow_factor: float = 0.6  # a window below this share of the run's best tenth is slow
    slow_share: float = 0.10  # slow windows among all; they are equal in work, so that a slow half is half of them
    slow_min_s: float = 30.0  # slow windows that take less time together are another program's burst
    data_wait: float = 0.10  # waiting for data, of the training time
    memory_growth: float = 1.5  # largest resident memory of the second half over that of the first
    heartbeats: float = 0.5  # of those that were due in the time that the last attempt took
    clock_back_s: float = 60.0  # that clocks of two hosts may differ, or one be set right
    gate_min_change: float = 0.002  # smallest change of a layer's branch shares or entropy that counts as movement
    gate_even: float = 0.05  # shares that never strayed farther from 1/3 than this are of a layer that did not specialise
    gate_pinned: float = 1e-4  # an entropy this close to ln 3 in every reading is a gate of zeros
    gate_entropy: float = 0.20  # a layer below this has collapsed onto one branch (ln 3 = 1.099 is even)
    gate_share: float = 0.02  # a branch below this in a layer is not used there
    gate_saturation: float = 0.50  # gate values within 0.01 of 0 or 1: these pass no gradient
    gate_readings: float = 0.10  # readings, of all, in which a layer's gate may be collapsed, stuck or without a branch
    gate_constant_readings: int = 3  # readings in a row in which nothing moves, to the last bit
    equal_readings: int = 5  # readings of a statistic in a row that are equal in every layer: it is not measured any more
    selection_gain: float = 0.25  # nats per byte that answers beyond the window must cost more without the choice
    selection_gain_share: float = (
        0.5  # of what they cost without it, too: over 16 sequences a random choice saves a quarter of another, over 4 half
    )
    selection_gain_after: float = 0.5  # of the run's steps: before, copying may not have formed yet
    reuse_constant: float = 0.9995  # neighbours share this much of their blocks: the choice does not depend on the query
    reuse_slack: float = 0.05  # below chance by more than this, neighbours avoid each other's blocks
    distance_margin: float = 0.02  # of the range between always the nearest and always the oldest: no choice by content
    selection_steps: int = 100  # an untrained model spreads its attention evenly, and ties go to the oldest blocks
    sink_share: float = 0.80  # of the selected attention held by the first block
    dense_gap: float = 0.01  # validation bpb over that of the dense twin, at most, as a share
    plan_memory: float = 0.15  # peak memory off the plan, either way
    plan_time: float = 0.25  # time off the plan, either way
    trial_steps: int = 100  # a shorter run is a trial: what is asked of it has not grown to its full height
    trial_tokens: float = 1.0  # tokens per parameter; with less, a model has hardly seen as much as it can hold
    diverged_loss: float = 1.5  # last loss over the lowest one, of a run that was halted
    diverged_gradient: float = 10.0  # last norm of the gradient over the least one
    risky_lr: float = 0.03  # weights begin at a few hundredths, and AdamW moves each by about the rate in a step
    decode_error: float = 1e-6  # difference of logits over the largest, cached decoding against one full pass, in float64


LIMITS = Limits()


@dataclass(frozen=True)
class Verdict:
    """One answer. `ok`: True, False, or None for not known; `value` and `limit` are what was compared."""

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
    """The text without line breaks; empty for None."""
    return " ".join(str(text).split()) if text is not None else ""


def list_names(value: Any) -> list[str]:
    """The texts in a list that an event holds; none where it holds something else."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
