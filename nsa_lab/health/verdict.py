"""The result type of health checks, its levels, and all thresholds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Limits:
    """Thresholds of `nsa-lab health`. Shares are fractions of 1, bpb is bits per byte, entropies are in nats."""

    validation_fall: float = (
        0.25  # minimum relative fall of validation bpb from the untrained model; scaled before step 100
    )
    floor_bpb: float = 0.30  # lower bound for a byte model of text: below, it sees its targets or a repeated text
    noise_slack_bits: float = 0.03  # uniform bytes cost log2(255) bits; the mean of one batch deviates by less than this
    ratio_to_best: float = 1.05  # last validation bpb / best validation bpb
    ratio_to_best_failed: float = 1.25  # the same; above it the run has diverged
    validation_gap: float = 1.25  # final validation bpb / training bpb
    validation_gap_failed: float = 1.5  # the same; above it the model fits its training text instead of text
    validation_lead: float = 0.85  # minimum of the same ratio: text that was not trained on is not easier (0.92 measured)
    lead_standard_errors: float = 3.0  # by how many standard errors the ratio must be below
    validation_drop: float = 0.75  # minimum change of validation / change of training between two evaluations
    validation_rise: float = 1.10  # maximum validation bpb / lowest one before it (1.03 measured)
    validation_swing: float = 0.03  # minimum change of validation between two evaluations that counts as a swing
    validation_swings: int = 5  # evaluations in a row that rise and fall in turns by this much (0 measured)
    structure_margin: float = 0.98  # maximum validation bpb / order-1 entropy of the held-out text
    structure_of_text: float = 0.95  # maximum order-1 / order-0 entropy of a text with structure (0.7 for English)
    structure_bytes: int = 1 << 16  # of a shorter text, the order-1 entropy is not known well enough
    lr_error: float = 1e-6  # relative to the peak rate: the schedule is a formula, so only rounding may differ
    training_fall: float = 0.25  # minimum relative fall of the training loss from its first reading; scaled before step 100
    training_ratio_to_lowest: float = 1.25  # latest / lowest training loss, both means of the same number of readings
    training_standard_errors: float = 5.0  # minimum excess over the lowest, in standard errors of their difference
    course_change: float = 0.10  # maximum rise or sudden drop of the training loss between windows of readings
    course_standard_errors: float = 8.0  # the same, in standard errors of the difference (5.6 measured)
    course_scatter: float = 5.0  # maximum scatter of the training loss in a window / its median over windows (2.8 measured)
    course_change_long: float = 0.07  # maximum rise with at least 10 windows, whose texts differ less (0.063 measured)
    course_standard_errors_long: float = 4.5  # the same, in standard errors of the difference (2.5 measured)
    course_change_lasting: float = 0.04  # maximum rise of means of four windows, with at least 10 windows (0.023 measured)
    course_standard_errors_lasting: float = 3.5  # the same, in standard errors of the difference (1.8 measured)
    course_spread: float = 2.5  # maximum deviation from a line in a window / its median over windows (1.8 measured)
    training_swing: float = 1.5  # minimum factor between two readings of the training loss that counts as a swing
    training_swings: int = 14  # readings in a row that rise and fall in turns by this much (4 measured)
    course_wave: float = 16.0  # maximum of the spectrum of the training loss / its mean (11 measured)
    course_wave_height: float = 0.02  # minimum amplitude of such a wave relative to the loss
    course_readings: int = 10  # minimum number of readings in a window
    course_start: float = 0.10  # fraction of the readings of a stage that are not judged: the loss falls fast
    equal_losses: int = 5  # bitwise equal readings in a row: every batch has different text, so losses should differ
    distinct_readings: int = 20  # readings in a row of which most must differ, so that values that take turns are found
    distinct_share: float = 0.5  # minimum fraction of distinct values among them (1 measured)
    repeated_share: float = 0.10  # maximum fraction of readings of a run with the value of an earlier one (0.003 measured)
    line_readings: int = 8  # readings in a row that must not be on a straight line
    line_spread: float = 1e-5  # minimum standard deviation of them from a line / their value (2e-4 measured)
    time_ratio: float = 1.5  # maximum step time in a few readings / time between their events (0.99 measured)
    missing_readings: int = 20  # readings in a row without a number that most readings before had (8 measured)
    gradient_norm: float = 1e3  # multiple of max(train.grad_clip, 1); above it the clipped gradient is mostly noise
    equal_evaluations: int = 3  # the same for evaluations and ablations, which are few
    gradient_range: float = 100.0  # maximum largest / smallest median of three gradient norms (27 measured)
    gradient_layer_excess: float = 30.0  # maximum gradient of a layer / median of the layers (4.3 measured)
    gradient_layer_range: float = 50.0  # maximum deviation of a layer's share of the gradient from its median (13 measured)
    gradient_layer_share: float = 1e-2  # minimum gradient norm of a layer / median over layers (0.20 measured)
    gradient_layers_spread: float = 0.02  # largest over readings of the range over layers / their mean (0.19 measured)
    gradient_swing: float = 5.0  # minimum factor between two gradient norms that counts as a swing
    gradient_swings: int = 5  # readings in a row that rise and fall in turns by this much (2 measured)
    gradient_least: float = 1e-6  # smaller norms are rounding noise
    pace_window_s: float = 2.0  # readings are merged into windows of this length: single short steps are too noisy
    slow_factor: float = 0.6  # a window is slow if its speed is below this fraction of the run's best tenth
    slow_share: float = 0.10  # maximum fraction of slow windows; all windows have the same number of steps
    slow_min_s: float = 30.0  # slow windows of less time in total are attributed to other programs
    data_wait: float = 0.10  # maximum fraction of the training time spent waiting for data
    memory_growth: float = 1.5  # maximum resident memory in the second half / in the first half
    memory_trend: float = 0.2  # maximum growth along a line after the first fifth of an attempt, relative to the mean
    memory_correlation: float = 0.95  # minimum correlation of memory and time that counts as a line (0.93 at 0.16 measured)
    memory_readings: int = 8  # minimum number of readings to see growth
    peak_growth: float = 0.05  # maximum growth of the peak memory in the second half, if it grows in most readings
    peak_growth_steps: float = 0.15  # the same, if it grows in a few readings (0.12 measured)
    peak_rise_late: float = 0.25  # maximum growth of the peak memory of a GPU after a stage has settled (0.002 measured)
    memory_trend_late: float = 0.1  # the same trend over the second half of an attempt (0.04 measured)
    heartbeats: float = 0.5  # minimum fraction of the heartbeats expected in the duration of the last attempt
    clock_back_s: float = 60.0  # tolerance for clocks of two hosts, or a corrected clock
    layers_equal: float = 1e-6  # relative difference of two layers in every statistic that counts as none
    exchange_ratio: float = 0.5  # minimum distance of two layers or branches to each other's last reading / to their own
    exchange_distance: float = 2.5  # minimum distance of two layers or branches / their movement, so that they differ
    level_shift: float = 20.0  # maximum lasting change of a norm from readings to the next ones (6.6 measured)
    loss_shift: float = (
        5.0  # minimum factor between all losses of 12 readings and all of the next ones that counts as a shift
    )
    layers_order: float = 0.3  # minimum correlation of the ranks of layers in one reading and the next (0.8 measured)
    gate_min_change: float = 0.002  # minimum change of a layer's branch shares and entropy (0.0096 in half a run measured)
    gate_even: float = 0.05  # a layer is unspecialized if its branch shares never differ from 1/3 by more than this
    gate_pinned: float = 1e-4  # an entropy this close to ln 3 in every reading means a gate of zeros
    gate_entropy: float = 0.20  # a layer below this has collapsed onto one branch (equal shares: ln 3 = 1.099)
    gate_share: float = 0.02  # a branch below this share is unused in the layer
    gate_entropy_failed: float = 0.10  # the same; below it the layer is lost
    gate_share_failed: float = 0.01  # the same for shares
    gate_saturation_failed: float = 0.70  # the same for saturation
    gate_update_least: float = 1e-6  # minimum change of the gate weights / the largest of the layer (1e-4 measured)
    gate_update_range: float = 30.0  # maximum change of the gate weights per learning rate / its median (6 measured)
    gate_update_slope: float = 0.3  # minimum exponent of the rate in this change (0.69 measured)
    gate_update_rates: float = 4.0  # minimum factor between the largest and the smallest rate to know it
    branch_fade: float = 0.05  # minimum RMS of a branch's output / the highest before it in the layer (0.27 measured)
    branch_least: float = 1e-3  # minimum RMS of a branch's output (0.17 measured)
    branch_range: float = (
        100.0  # maximum deviation of it from the median of the layer, and of all layers (74 and 48 measured)
    )
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
    selection_share: float = 0.5  # maximum fraction of readings in which a layer's selection ignores the content
    sink_share: float = 0.80  # maximum fraction of the selected attention on the first block
    selection_loss_fall: float = 0.01  # minimum relative fall of a conversion's selection loss; scaled before step 100
    selection_loss_rise: float = 0.25  # maximum relative rise of the same if the indexer was trained before
    selection_loss_growth: float = 3.0  # maximum selection loss at the end / lowest before, within stages (1.4 measured)
    selection_loss_errors: float = 3.0  # the same fall is unknown within this many standard errors of the readings
    selection_loss_least: float = 1e-4  # minimum selection loss / its largest value (0.07 measured)
    selection_loss_scatter: float = 0.4  # maximum scatter of its log about its neighbors in a stage (0.13 measured)
    attention_mass: float = 0.95  # minimum attention mass in a converted model's blocks / in the best blocks
    conversion_gap: float = 0.03  # maximum loss with selected blocks minus dense attention's, in nats per token
    attention_mass_layer: float = 0.1  # maximum deficit of a layer's mass to the nearest blocks' (0 measured)
    conversion_gain: float = 0.08  # maximum relative gain of a part of the blocks over all blocks (0.02 measured)
    conversion_texts: float = 0.7  # maximum |log| of the loss in a comparison / in the evaluation (0.19 measured)
    conversion_highest: float = 1.5  # maximum loss in a comparison / ln V
    frozen_loss: float = 1e-3  # maximum relative change of the loss of weights that are not trained (0 measured)
    frozen_validation: float = 0.02  # maximum relative rise of validation if only the indexer is trained (0.0001 measured)
    teacher_kl_failed: float = 1.0  # above it, nothing of the teacher is left (0.24 measured)
    teacher_kl: float = 0.1  # maximum KL divergence from a teacher's predictions at the end, in nats per token
    dense_gap: float = 0.01  # maximum validation bpb relative to the dense baseline, minus 1
    plan_memory: float = 0.15  # maximum relative deviation of peak memory from the estimate
    plan_time: float = 0.25  # maximum relative deviation of the time from the estimate
    trial_steps: int = 100  # a shorter run is a trial: scaled limits have not reached their full values
    trial_tokens: float = 1.0  # minimum tokens per parameter; with fewer, the model has seen too little text to judge it
    probe_difference: float = 5e-2  # maximum relative difference of logits after a resume, as in the trainer for bfloat16
    diverged_loss: float = 1.5  # last loss / lowest loss of a halted run
    diverged_gradient: float = 10.0  # last gradient norm / smallest gradient norm
    risky_lr: float = 0.03  # weights start at a few hundredths, and AdamW moves each by about the rate per step
    decode_error: float = 1e-6  # maximum difference / largest logit, cached decoding against a full pass, in float64


LIMITS = Limits()


FAILED, WARNING, PASSED, UNKNOWN = "failed", "warning", "passed", "unknown"


@dataclass(frozen=True)
class Verdict:
    """Result of one check. `ok`: True, False, or None if unknown. `value` was compared with `limit`.

    `level`: failed, warning, passed or unknown. A warning is ok: it does not make the run fail. docs/decisions.md lists the
    level of each check.
    """

    name: str
    ok: bool | None
    value: float | None
    limit: float | None
    text: str
    level: str = ""

    def __post_init__(self) -> None:
        level = {None: UNKNOWN, False: FAILED, True: WARNING if self.level == WARNING else PASSED}[self.ok]
        object.__setattr__(self, "level", level)

    @property
    def mark(self) -> str:
        return {PASSED: "ok", WARNING: "warn", FAILED: "FAIL", UNKNOWN: "?"}[self.level]

    def to_warning(self) -> Verdict:
        """Return a failed check as a warning; any other unchanged."""
        return replace(self, ok=True, level=WARNING) if self.ok is False else self

    def __str__(self) -> str:
        return f"{self.mark:<4} {self.name}: {self.text}"


class Problem(NamedTuple):
    """Steps at which a relation between numbers does not hold, ascending, and a text about the first of them."""

    steps: np.ndarray
    text: str


def join_lines(text: Any) -> str:
    """Return the text without line breaks; empty for None."""
    return " ".join(str(text).split()) if text is not None else ""


def list_names(value: Any) -> list[str]:
    """Return the strings in a list recorded in an event; empty if the field is not a list."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
