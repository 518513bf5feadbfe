"""Verdicts on what was learnt: losses, gradients and the learning rate.

The learning rate is written down here independently of the trainer.
"""

from __future__ import annotations

import math

import numpy as np

from nsa_lab.config import StageConfig, TrainConfig
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History, get_latest_training_losses

UNIFORM_NOISE_BITS = math.log2(255)  # of the synthetic source: 255 equal bytes


def compute_expected_lr(step: int, train: TrainConfig) -> float:
    """What the configuration promises for optimiser step `step`, counted from 1.

    In every stage anew: linear to `lr` at step `warmup_steps` (step 1 without warm-up), then half a cosine down to `min_lr`
    at the last step; or no fall; or (`wsd`) none before the last `decay_share` of the steps, and a straight line there.
    """
    for stage in train.stages[:-1]:
        if step <= stage.steps:
            return _compute_stage_lr(step, stage)
        step -= stage.steps
    return _compute_stage_lr(step, train.plan[-1])


def _compute_stage_lr(step: int, train: StageConfig) -> float:
    peak = max(train.warmup_steps, 1)
    if step <= peak:
        return train.lr * step / peak
    if train.lr_schedule == "constant":
        return train.lr
    if train.lr_schedule == "wsd":
        falling = min(max(round(train.steps * train.decay_share), 1), train.steps - peak)
        fallen = max(step - (train.steps - falling), 0)
        return train.lr + (train.min_lr - train.lr) * fallen / falling
    turn = math.pi * (step - peak) / (train.steps - peak)
    return train.min_lr + (train.lr - train.min_lr) * (1 + math.cos(turn)) / 2


def check_loss_fell(history: History, limits: Limits) -> Verdict | None:
    if history.config.data.source == "synthetic":
        return None
    steps, bpb = _drop_nonfinite(*history.validation())
    if len(bpb) < 2 or steps[-1] == 0:
        return Verdict("loss fell", None, None, None, "validation was not evaluated after training")
    limit = _scale_limit(history, limits.validation_fall)
    fall = 1 - bpb[-1] / bpb[0]
    change = f"{abs(fall):.1%} {'below' if fall >= 0 else 'above'} the start"
    text = f"validation from {bpb[0]:.3f} to {bpb[-1]:.3f} bits per byte, {change} (at least {limit:.1%} below asked)"
    return Verdict("loss fell", bool(fall >= limit), float(fall), limit, text)


def _scale_limit(history: History, fall: float) -> float:
    """What can be asked of a short run is less: the limit grows to its full height over the first hundred steps."""
    return fall * min(1.0, history.last_step / 100)


def check_training_loss(history: History, limits: Limits) -> Verdict | None:
    """The loss that is trained on moves, falls, and is not far above what it has been."""
    if history.config.data.source == "synthetic":
        return None
    limit = _scale_limit(history, limits.training_fall)
    falls: list[tuple[float, str]] = []
    for name, unit in (("loss", "nats per token"), ("bpb", "bits per byte")):
        steps, values = _drop_nonfinite(*history.series(name))
        if len(values) < 5:
            return Verdict("training loss", None, None, limit, "too few readings to see it fall")
        still, where = _find_longest_constant(steps, values[:, None])
        if still >= limits.equal_losses:
            text = f"{name} is the same to the last bit in {still} readings in a row, up to step {where:,}"
            return Verdict("training loss", False, still, limits.equal_losses, text)
        now = get_latest_training_losses(history, name)
        if not len(now):
            return Verdict("training loss", None, None, limit, "no reading yet of the stage that the run is in")
        steps, values_now = history.select_current_length(steps, values)
        last, (lowest, lowest_at) = float(np.mean(now)), _find_lowest_mean(steps, values_now, len(now))
        # Steps of a few long texts differ in what they read: two means of as many readings lie that far apart by chance.
        chance = limits.training_standard_errors * _estimate_scatter(values_now) * (2 / len(now)) ** 0.5
        if last > max(limits.training_ratio_to_lowest * lowest, lowest + chance):
            text = f"{name} is {last:.3f} {unit} at the end, and was {lowest:.3f} about step {lowest_at:,}"
            return Verdict("training loss", False, last / lowest, limits.training_ratio_to_lowest, text)
        falls.append((1 - last / values[0], f"from {values[0]:.3f} to {last:.3f} {unit}"))
    per_token, per_byte = falls
    # In bits per byte, as everywhere, unless it is the loss per token alone that fell too little.
    fall, text = per_token if per_token[0] < limit <= per_byte[0] else per_byte
    return Verdict("training loss", bool(fall >= limit), fall, limit, f"{text} (at least {limit:.1%} below asked)")


def _find_lowest_mean(steps: np.ndarray, values: np.ndarray, count: int) -> tuple[float, int]:
    """The lowest mean of `count` readings in a row, and the step of the last of them."""
    means = np.convolve(values, np.full(count, 1 / count), "valid")
    least = int(means.argmin())
    return float(means[least]), int(steps[least + count - 1])


def _estimate_scatter(values: np.ndarray) -> float:
    """Standard deviation of one reading about its neighbours, from the median of their differences."""
    return float(np.median(np.abs(np.diff(values))) / (0.6745 * 2**0.5)) if len(values) > 1 else 0.0


def _find_longest_constant(steps: np.ndarray, values: np.ndarray) -> tuple[int, int]:
    """The most readings `[n, ...]` in a row that are equal to the last bit, and the step of the last of them."""
    longest, where, row = min(len(values), 1), int(steps[-1]) if len(steps) else 0, 1
    for index in range(1, len(values)):
        row = row + 1 if np.array_equal(values[index], values[index - 1]) else 1
        if row > longest:
            longest, where = row, int(steps[index])
    return longest, where


def _drop_nonfinite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the readings that are no numbers; `finite` speaks of those."""
    known = np.isfinite(values)
    return steps[known], values[known]


def check_gradients(history: History, limits: Limits) -> Verdict:
    """Every step has a gradient, in every layer, and none that clipping had to make a thousand times smaller."""
    steps, norms = _drop_nonfinite(*history.series("grad_norm"))
    limit = limits.gradient_norm * max(1.0, history.config.train.grad_clip)
    if not len(norms):
        return Verdict("gradients", None, None, limit, "none was recorded")
    if (none := norms == 0).any():
        text = f"the gradient is 0 at {none.sum():,} logged steps, the first {steps[none.argmax()]:,}"
        return Verdict("gradients", False, 0.0, 0.0, text)
    at, layers = history.layer_series("grad_norm_layers")
    if len(layers) and (none := layers == 0).any():
        reading, layer = np.argwhere(none)[0]
        text = f"no gradient reaches layer {layer} at step {at[reading]:,} ({none.sum()} such readings)"
        return Verdict("gradients", False, 0.0, 0.0, text)
    largest = int(norms.argmax())
    text = f"norm {norms.min():.3g} to {norms[largest]:.3g}, the largest at step {steps[largest]:,}"
    return Verdict("gradients", bool(norms[largest] <= limit), float(norms[largest]), limit, text)


def check_loss_kept(history: History, limits: Limits) -> Verdict:
    steps, bpb = history.select_current_length(*_drop_nonfinite(*history.validation()))
    if len(bpb) < 3:
        return Verdict("loss kept", None, None, limits.ratio_to_best, "fewer than three evaluations")
    best = int(bpb.argmin())
    ratio = bpb[-1] / bpb[best]
    text = f"last validation {bpb[-1]:.3f} bits per byte, best {bpb[best]:.3f} at step {steps[best]:,}"
    return Verdict("loss kept", bool(ratio <= limits.ratio_to_best), ratio, limits.ratio_to_best, text)


def check_no_leak(history: History, limits: Limits) -> Verdict:
    """A loss below what the text can give means that the model sees what it is asked to predict."""
    noise = history.config.data.source == "synthetic"
    limit = UNIFORM_NOISE_BITS - limits.noise_slack_bits if noise else limits.floor_bpb
    steps, bpb = history.series("bpb")
    eval_steps, held_out = history.validation()
    steps, bpb = np.concatenate([steps, eval_steps]), np.concatenate([bpb, held_out])
    if not np.isfinite(bpb).any():
        return Verdict("no leak", None, None, limit, "no loss was recorded")
    lowest = int(np.nanargmin(bpb))
    where = "noise cannot be predicted" if noise else "text is not that predictable"
    text = (
        f"lowest {bpb[lowest]:.3f} bits per byte, at step {steps[lowest]:,}; below {limit:.2f} it would be a leak: {where}"
    )
    return Verdict("no leak", bool(bpb[lowest] >= limit), float(bpb[lowest]), limit, text)


def check_generalization(history: History, limits: Limits) -> Verdict:
    _, train = history.select_current_length(*_drop_nonfinite(*history.series("bpb")))
    evaluated, held_out = history.select_current_length(*_drop_nonfinite(*history.validation()))
    if len(held_out) < 2 or len(train) < 5:
        return Verdict("generalises", None, None, limits.validation_gap, "too few losses to compare")
    # A run that ended between evaluations has trained on since the last.
    recent = float(np.mean(get_latest_training_losses(history.truncate_at(int(evaluated[-1])))))
    ratio = held_out[-1] / recent
    text = f"validation {held_out[-1]:.3f} against training {recent:.3f} bits per byte, ratio {ratio:.3f}"
    return Verdict("generalises", bool(ratio <= limits.validation_gap), ratio, limits.validation_gap, text)


def check_learning_rate(history: History, limits: Limits) -> Verdict:
    steps, rates = history.series("lr")
    if not len(steps):
        return Verdict("learning rate", None, None, None, "none was recorded")
    wanted = np.array([compute_expected_lr(int(step), history.config.train) for step in steps])
    off = np.abs(rates - wanted) / max(stage.lr for stage in history.config.train.plan)
    # A rate that is no number is as far off as any can be.
    off[~np.isfinite(off)] = np.inf
    worst = int(np.argmax(off))
    schedule = " and ".join(dict.fromkeys(stage.lr_schedule for stage in history.config.train.plan))
    text = f"follows the configured {schedule} schedule at {len(steps):,} logged steps"
    if off[worst] > limits.lr_error:
        text = f"{rates[worst]:.4g} at step {steps[worst]:,}, where the configuration says {wanted[worst]:.4g}"
    return Verdict("learning rate", bool(off[worst] <= limits.lr_error), float(off[worst]), limits.lr_error, text)
