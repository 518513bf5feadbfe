"""Checks of losses, gradients and the learning rate.

The learning-rate schedule is implemented here again, independently of the trainer.
"""

from __future__ import annotations

import math

import numpy as np

from nsa_lab.config import StageConfig, TrainConfig
from nsa_lab.health.completeness_checks import find_longest_constant
from nsa_lab.health.level_shifts import find_level_shift, find_swings
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History, get_latest_training_losses, select_latest

MIN_TRAIN_READINGS = 5
MIN_SCATTER_READINGS = 20  # to estimate how much readings differ by chance
UNIFORM_NOISE_BITS = math.log2(255)  # entropy of the synthetic source, which has 255 equally likely bytes


def compute_expected_lr(steps: np.ndarray, train: TrainConfig) -> np.ndarray:
    """Return the configured learning rates [n], float64, of optimizer steps [n], counted from 1.

    Each stage has its own schedule: linear warm-up to `lr` at step `warmup_steps` (step 1 without warm-up), then half a
    cosine to `min_lr` at the last step; or constant; or (`wsd`) constant with a linear decay in the last `decay_share`.
    """
    ends = np.cumsum([0, *(stage.steps for stage in train.plan)])
    stages, rates = np.searchsorted(ends[1:-1], steps), np.zeros(len(steps))
    for number, stage in enumerate(train.plan):
        is_own = stages == number
        rates[is_own] = _compute_stage_lr(steps[is_own] - ends[number], stage)
    return rates


def _compute_stage_lr(steps: np.ndarray, train: StageConfig) -> np.ndarray:
    peak = max(train.warmup_steps, 1)
    n_later = max(train.steps - peak, 1)
    if train.lr_schedule == "constant":
        later = np.full(len(steps), train.lr)
    elif train.lr_schedule == "wsd":
        decay_steps = min(max(round(train.steps * train.decay_share), 1), n_later)
        decayed = np.maximum(steps - (train.steps - decay_steps), 0)
        later = train.lr + (train.min_lr - train.lr) * decayed / decay_steps
    else:
        angle = math.pi * (steps - peak) / n_later
        later = train.min_lr + (train.lr - train.min_lr) * (1 + np.cos(angle)) / 2
    return np.where(steps <= peak, train.lr * steps / peak, later)


def check_loss_fell(history: History, limits: Limits) -> Verdict | None:
    """Check that the validation loss fell. None for noise, which cannot be learned, and for pretrained weights."""
    if history.config.data.source == "synthetic" or history.config.train.initial_weights:
        return None
    steps, bpb = drop_nonfinite(*history.validation())
    if len(bpb) < 2 or steps[-1] == 0:
        return Verdict("loss fell", None, None, None, "no validation after the first step")
    limit = _scale_limit(history, limits.validation_fall)
    fall = 1 - bpb[-1] / bpb[0]
    change = f"{abs(fall):.1%} {'below' if fall >= 0 else 'above'} the start"
    text = f"validation from {bpb[0]:.3f} to {bpb[-1]:.3f} bits per byte, {change} (required: at least {limit:.1%} below)"
    return Verdict("loss fell", bool(fall >= limit), float(fall), limit, text)


def _scale_limit(history: History, fall: float) -> float:
    """Return the required fall of the loss, scaled down linearly for runs of fewer than 100 steps."""
    return fall * min(1.0, history.last_step / 100)


def check_training_loss(history: History, limits: Limits) -> Verdict | None:
    """Check that the training loss varies, falls, and is not far above its lowest value. None as in `check_loss_fell`."""
    if history.config.data.source == "synthetic" or history.config.train.initial_weights:
        return None
    limit = _scale_limit(history, limits.training_fall)
    falls: list[tuple[float, str]] = []
    for name, unit in (("loss", "nats per token"), ("bpb", "bits per byte")):
        steps, values = drop_nonfinite(*history.series(name))
        if len(values) < 5:
            return Verdict("training loss", None, None, limit, "too few readings to see it fall")
        n_equal, end = find_longest_constant(values)
        if n_equal >= limits.equal_losses:
            text = f"{name} is bitwise equal in {n_equal} readings in a row, up to step {steps[end]:,}"
            return Verdict("training loss", False, n_equal, limits.equal_losses, text)
        latest = get_latest_training_losses(history, name)
        if not len(latest):
            return Verdict("training loss", None, None, limit, "no readings in the current stage yet")
        steps, current_values = history.select_current_length(steps, values)
        last, (lowest, lowest_at) = float(np.mean(latest)), _find_lowest_mean(steps, current_values, len(latest))
        # The loss of a step with few long texts depends on the texts, so two means of readings may differ by chance.
        chance = limits.training_standard_errors * estimate_scatter(current_values) * (2 / len(latest)) ** 0.5
        if last > max(limits.training_ratio_to_lowest * lowest, lowest + chance):
            text = f"{name} is {last:.3f} {unit} at the end, up from {lowest:.3f} near step {lowest_at:,}"
            return Verdict("training loss", False, last / lowest, limits.training_ratio_to_lowest, text)
        falls.append((1 - last / values[0], f"from {values[0]:.3f} to {last:.3f} {unit}"))
    per_token, per_byte = falls
    # Report bits per byte, unless only the loss per token fell too little.
    fall, text = per_token if per_token[0] < limit <= per_byte[0] else per_byte
    return Verdict("training loss", bool(fall >= limit), fall, limit, f"{text} (required: at least {limit:.1%} below)")


def _find_lowest_mean(steps: np.ndarray, values: np.ndarray, count: int) -> tuple[float, int]:
    """Return the lowest mean of `count` consecutive readings and the step of the last of them."""
    means = np.convolve(values, np.full(count, 1 / count), "valid")
    least = int(means.argmin())
    return float(means[least]), int(steps[least + count - 1])


def estimate_scatter(values: np.ndarray) -> float:
    """Return the standard deviation of a reading about its neighbors, from the median absolute difference."""
    return float(np.median(np.abs(np.diff(values))) / (0.6745 * 2**0.5)) if len(values) > 1 else 0.0


def drop_nonfinite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite readings. `run_checks.check_finite` reports the others."""
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]


def check_gradients(history: History, limits: Limits) -> Verdict:
    """Check that the gradient neither vanishes nor explodes at any step, in all layers or in one."""
    steps, norms = drop_nonfinite(*history.series("grad_norm"))
    limit = limits.gradient_norm * max(1.0, history.config.train.grad_clip)
    if not len(norms):
        return Verdict("gradients", None, None, limit, "none recorded")
    if (is_zero := norms == 0).any():
        text = f"the gradient is 0 at {is_zero.sum():,} logged steps, the first {steps[is_zero.argmax()]:,}"
        return Verdict("gradients", False, 0.0, 0.0, text)
    layer_steps, layers = history.layer_series("grad_norm_layers")
    if len(layers) and (is_zero := layers == 0).any():
        reading, layer = np.argwhere(is_zero)[0]
        text = f"no gradient reaches layer {layer} at step {layer_steps[reading]:,} ({is_zero.sum()} such readings)"
        return Verdict("gradients", False, 0.0, 0.0, text)
    if problem := _find_gradient_problem(history, steps, norms, layer_steps, layers, limits):
        return Verdict("gradients", False, *problem)
    largest = int(norms.argmax())
    text = f"norm {norms.min():.3g} to {norms[largest]:.3g}, the largest at step {steps[largest]:,}"
    return Verdict("gradients", bool(norms[largest] <= limit), float(norms[largest]), limit, text)


def _find_gradient_problem(
    history: History, steps: np.ndarray, norms: np.ndarray, layer_steps: np.ndarray, layers: np.ndarray, limits: Limits
) -> tuple[float, float, str] | None:
    """Return value, limit and text of a gradient that vanishes or explodes, in all layers or in one; None if none does."""
    least = int(norms.argmin())
    if norms[least] < limits.gradient_least:
        text = f"the gradient vanishes: norm {norms[least]:.3g} at step {steps[least]:,}"
        return float(norms[least]), limits.gradient_least, text
    # A single spike is clipped and does no harm; the limit of the caller judges it.
    lasting = np.median(np.lib.stride_tricks.sliding_window_view(norms, 3), axis=1) if len(norms) > 2 else norms
    ratio = float(lasting.max() / lasting.min())
    if ratio > limits.gradient_range:
        step = steps[int(lasting.argmin())]
        text = f"the gradient norm varies by a factor of {ratio:,.0f}; it is {lasting.min():.3g} from step {step:,} on"
        return ratio, limits.gradient_range, text
    if swings := find_swings(norms, limits.gradient_swing, limits.gradient_swings):
        text = f"the gradient norm rises and falls in turns, by a factor of at least {limits.gradient_swing:g}, in "
        text += f"{swings[0]} readings in a row, up to step {steps[swings[1]]:,}"
        return float(swings[0]), float(limits.gradient_swings), text
    is_known = np.isfinite(layers).all(axis=1) if len(layers) else np.zeros(0, dtype=bool)
    layer_steps, layers = layer_steps[is_known], layers[is_known]
    if not len(layers):
        return None
    share = layers / np.median(layers, axis=1, keepdims=True)
    if (share < limits.gradient_layer_share).any():
        reading, layer = np.unravel_index(share.argmin(), share.shape)
        text = f"the gradient of layer {layer} vanishes at step {layer_steps[reading]:,}: {share.min():.2g} of the median"
        return float(share.min()), limits.gradient_layer_share, text
    # Not of a single reading, as above. A slow growth is in the median over time, too.
    if len(share) > 2:
        lasting = np.median(np.lib.stride_tricks.sliding_window_view(share, 3, axis=0), axis=-1)
        if lasting.max() > limits.gradient_layer_excess:
            reading, layer = np.unravel_index(lasting.argmax(), lasting.shape)
            text = f"the gradient of layer {layer} explodes: {lasting.max():,.0f} times the median of the layers"
            return float(lasting.max()), limits.gradient_layer_excess, f"{text} at step {layer_steps[reading + 1]:,}"
    # The median of two layers depends on both, so the shares of few layers hardly show that one changes.
    if shift := find_level_shift(history, layer_steps, layers, limits):
        text = f"the gradient of layer {shift.layer} changes by a factor of {shift.factor:.0f} at step {shift.step:,}"
        return shift.factor, limits.level_shift, text
    change = share / np.median(share, axis=0)
    extreme = np.maximum(change, 1 / change)
    if extreme.max() > limits.gradient_layer_range:
        reading, layer = np.unravel_index(extreme.argmax(), extreme.shape)
        text = (
            f"the gradient of layer {layer} at step {layer_steps[reading]:,}, relative to the other layers, is "
            f"{change[reading, layer]:.2g} times its median"
        )
        return float(extreme.max()), limits.gradient_layer_range, text
    return None


def check_loss_kept(history: History, limits: Limits) -> Verdict:
    """Check that the last validation loss is close to the best one at the same sequence length.

    Slightly above it is a warning, far above it a failure: the run has diverged.
    """
    steps, bpb = history.select_current_length(*drop_nonfinite(*history.validation()))
    # Pretrained weights have a loss to keep from the first evaluation on.
    fewest = 2 if history.config.train.initial_weights else 3
    if len(bpb) < fewest:
        return Verdict("loss kept", None, None, limits.ratio_to_best, f"fewer than {fewest} evaluations")
    best = int(bpb.argmin())
    ratio = bpb[-1] / bpb[best]
    text = f"last validation {bpb[-1]:.3f} bits per byte, best {bpb[best]:.3f} at step {steps[best]:,}"
    if history.config.train.trainable == "indexer" and ratio > 1 + limits.frozen_validation:
        text += f" (limit: {limits.frozen_validation:.0%} above it, because only the indexer is trained)"
        return Verdict("loss kept", False, ratio, 1 + limits.frozen_validation, text)
    verdict = Verdict("loss kept", bool(ratio <= limits.ratio_to_best), ratio, limits.ratio_to_best, text)
    return verdict if ratio > limits.ratio_to_best_failed else verdict.to_warning()


def check_no_leak(history: History, limits: Limits) -> Verdict:
    """Check that no loss is below what the text permits, and no validation loss far below the training loss.

    Either means that the model sees its targets, or has seen the held-out text.
    """
    is_noise = history.config.data.source == "synthetic"
    limit = UNIFORM_NOISE_BITS - limits.noise_slack_bits if is_noise else limits.floor_bpb
    steps, bpb = history.series("bpb")
    eval_steps, eval_bpb = history.validation()
    steps, bpb = np.concatenate([steps, eval_steps]), np.concatenate([bpb, eval_bpb])
    if not np.isfinite(bpb).any():
        return Verdict("no leak", None, None, limit, "no loss was recorded")
    lowest = int(np.nanargmin(bpb))
    reason = "noise cannot be predicted" if is_noise else "text is not that predictable"
    text = f"lowest {bpb[lowest]:.3f} bits per byte, at step {steps[lowest]:,}; below {limit:.2f} means a leak: {reason}"
    if bpb[lowest] < limit:
        return Verdict("no leak", False, float(bpb[lowest]), limit, text)
    if not is_noise and (lead := _find_validation_lead(history, limits) or _find_validation_drop(history, limits)):
        return lead
    return Verdict("no leak", True, float(bpb[lowest]), limit, text)


def _find_validation_lead(history: History, limits: Limits) -> Verdict | None:
    """Return a failure if a validation loss of the second half, or their mean, is far below the training loss.

    The model has then seen the held-out text, or the evaluated text is another one. None if none is, within the error of
    the training loss, which is a mean of few batches.
    """
    steps, train = history.select_current_length(*drop_nonfinite(*history.series("bpb")))
    eval_steps, eval_bpb = history.select_current_length(*drop_nonfinite(*history.validation()))
    ratios: list[tuple[int, float, float]] = []  # step, validation / training, standard error
    for step, bpb in zip(eval_steps.tolist(), eval_bpb.tolist(), strict=True):
        before = train[steps <= step]
        if step >= history.last_step / 2 and len(before) >= MIN_TRAIN_READINGS:
            recent = select_latest(before)
            mean = max(float(np.mean(recent)), 1e-9)
            error = estimate_scatter(before[-max(len(recent), MIN_SCATTER_READINGS) :]) / len(recent) ** 0.5
            ratios.append((step, bpb / mean, bpb / mean * error / mean))
    if not ratios:
        return None
    mean_ratio, mean_error = (float(np.mean([ratio[n] for ratio in ratios])) for n in (1, 2))
    for step, ratio, error in [*ratios, (ratios[-1][0], mean_ratio, mean_error / len(ratios) ** 0.5)]:
        if ratio + limits.lead_standard_errors * error < limits.validation_lead:
            text = f"up to step {step:,} validation is {ratio:.2f} of the training loss: a leak of the held-out text"
            return Verdict("no leak", False, ratio, limits.validation_lead, text)
    return None


def _find_validation_drop(history: History, limits: Limits) -> Verdict | None:
    """Return a failure if validation falls far more than training between two evaluations of the second half.

    The model has then seen the held-out text in between, or the evaluated text is another one.
    """
    steps, train = drop_nonfinite(*history.series("bpb"))
    eval_steps, eval_bpb = drop_nonfinite(*history.validation())
    for index in range(1, len(eval_bpb)):
        first, last = eval_steps[index - 1], eval_steps[index]
        if first <= 0 or last < history.last_step / 2:
            continue
        before, after = train[steps <= first], train[steps <= last]
        if len(before) < MIN_SCATTER_READINGS:
            continue
        change = eval_bpb[index] / max(eval_bpb[index - 1], 1e-9)
        train_change = float(np.mean(select_latest(after))) / max(float(np.mean(select_latest(before))), 1e-9)
        ratio = float(change / max(min(train_change, 1.0), 1e-9))
        if ratio < limits.validation_drop:
            text = f"validation changes by a factor of {change:.2f} up to step {last:,}, training of {train_change:.2f}"
            return Verdict("no leak", False, ratio, limits.validation_drop, f"{text}: a leak of the held-out text")
    return None


def check_generalization(history: History, limits: Limits) -> Verdict:
    """Check that the validation loss is close to the training loss.

    Slightly above it is a warning, far above it a failure. A run that starts from trained weights fails only if its
    validation loss rises, because its source may have trained on the same text: then the difference is due to the source.
    """
    _, train = history.select_current_length(*drop_nonfinite(*history.series("bpb")))
    eval_steps, eval_bpb = history.select_current_length(*drop_nonfinite(*history.validation()))
    if len(eval_bpb) < 2 or len(train) < MIN_TRAIN_READINGS:
        return Verdict("generalises", None, None, limits.validation_gap, "too few losses to compare")
    # A run may have continued after its last evaluation.
    recent = float(np.mean(get_latest_training_losses(history.truncate_at(int(eval_steps[-1])))))
    ratio = eval_bpb[-1] / recent
    text = f"validation {eval_bpb[-1]:.3f}, training {recent:.3f} bits per byte, ratio {ratio:.3f}"
    verdict = Verdict("generalises", bool(ratio <= limits.validation_gap), ratio, limits.validation_gap, text)
    is_of_source = history.config.train.initial_weights is not None and eval_bpb[-1] <= eval_bpb[0]
    return verdict.to_warning() if is_of_source or ratio <= limits.validation_gap_failed else verdict


def check_learning_rate(history: History, limits: Limits) -> Verdict:
    """Check that every logged learning rate follows the configured schedule."""
    steps, rates = history.series("lr")
    if not len(steps):
        return Verdict("learning rate", None, None, None, "none recorded")
    expected = compute_expected_lr(steps, history.config.train)
    errors = np.abs(rates - expected) / max(stage.lr for stage in history.config.train.plan)
    # The error of a non-finite rate is infinite.
    errors[~np.isfinite(errors)] = np.inf
    worst = int(np.argmax(errors))
    schedule = " and ".join(dict.fromkeys(stage.lr_schedule for stage in history.config.train.plan))
    text = f"follows the configured {schedule} schedule at {len(steps):,} logged steps"
    if errors[worst] > limits.lr_error:
        text = f"{rates[worst]:.4g} at step {steps[worst]:,}, configured: {expected[worst]:.4g}"
    return Verdict("learning rate", bool(errors[worst] <= limits.lr_error), float(errors[worst]), limits.lr_error, text)
