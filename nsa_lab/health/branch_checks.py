"""Checks of the gates and the branch outputs, per layer. They return None for a dense model, which has neither."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nsa_lab.config import BRANCHES
from nsa_lab.health.level_shifts import find_level_shift
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History

MIN_MOVEMENTS = 5  # readings with which a usual movement is known
MIN_RATE_SHARE = 0.01  # of the median of the rates between two readings
MAX_ENTROPY = math.log(3)  # of three branches, for which the limits hold


def check_gates_moved(history: History, limits: Limits) -> Verdict | None:
    """Check that gates are never stuck: weights and shares change.

    The entropy must not stay at its maximum, the logarithm of the number of branches, which gate weights of 0 give.
    """
    n_branches = len(list_active_branches(history))
    if is_dense(history) or n_branches < 2:
        return None
    highest = math.log(n_branches)
    _, entropy = history.layer_series("gate_entropy")
    if not len(entropy):
        return Verdict("gates moved", None, None, limits.gate_min_change, "no gate statistics were recorded")
    pinned = np.all(np.abs(entropy - highest) < limits.gate_pinned, axis=0)
    if pinned.any():
        return Verdict(
            "gates moved",
            False,
            highest,
            highest - limits.gate_pinned,
            f"entropy pinned at ln {n_branches} = {highest:.4f} in every reading of {format_layers(pinned)}",
        )
    _, update = history.layer_series("gate_update")
    constant = (update == 0).all(axis=0) if len(update) else np.zeros(entropy.shape[1], bool)
    if constant.any():
        return Verdict("gates moved", False, 0.0, 0.0, f"the gate weights never changed in {format_layers(constant)}")
    if len(entropy) < 3:
        return Verdict(
            "gates moved", None, None, limits.gate_min_change, f"{len(entropy)} readings are too few to detect changes"
        )
    shares = np.stack([values for values in _get_gate_shares(history).values() if len(values) == len(entropy)] or [entropy])
    statistics = {"branch shares": shares, "gate entropy": entropy[None]}  # [statistics, readings, layers] each
    change = np.max([np.ptp(values, axis=1).max(axis=0) for values in statistics.values()], axis=0)
    frozen = change < limits.gate_min_change
    if frozen.any():
        return Verdict(
            "gates moved",
            False,
            float(change.min()),
            limits.gate_min_change,
            f"gate never changed in {format_layers(frozen)}",
        )
    # Shares and entropy follow the same gates: one that is constant while the other changes is no longer measured.
    is_unchanged = update <= limits.gate_update_least * update.max(axis=0) if len(update) else update == 0
    stuck = {f"{name} bitwise equal": (values[:, 1:] == values[:, :-1]).all(axis=0) for name, values in statistics.items()}
    stuck["change of the gate weights bitwise equal"] = (update[1:] == update[:-1]) & (update[1:] != 0)
    for subject, mask in {**stuck, "gate weights unchanged": is_unchanged}.items():
        streak = _compute_longest_streak(mask)
        if (streak >= limits.gate_constant_readings).any():
            text = (
                f"{subject} in {streak.max()} readings in a row in {format_layers(streak >= limits.gate_constant_readings)}"
            )
            return Verdict("gates moved", False, float(streak.max()), limits.gate_constant_readings, text)
    if problem := _find_other_movement(history, limits):
        return Verdict("gates moved", False, *problem)
    if (half := entropy.shape[0] // 2) >= limits.gate_constant_readings:
        for name, values in statistics.items():
            recent = np.ptp(values[:, -half:], axis=1).max(axis=0)
            if (stopped := recent < limits.gate_min_change).any():
                text = f"{name} no longer changed in the second half in {format_layers(stopped)}"
                return Verdict("gates moved", False, float(recent.min()), limits.gate_min_change, text)
    return Verdict(
        "gates moved",
        True,
        float(change.min()),
        limits.gate_min_change,
        f"{_describe_movement(entropy, _get_gate_shares(history))}; "
        f"{_describe_unspecialized(_get_gate_shares(history), limits)}",
    )


def _find_other_movement(history: History, limits: Limits) -> tuple[float, float, str] | None:
    """Return value, limit and text of gate weights whose movement does not follow the learning rate; None if it does.

    An optimizer moves weights by about the sum of the rates since the last reading.
    """
    steps, update = history.layer_series("gate_update")
    rate_steps, rates = history.series("lr")
    if len(steps) < MIN_MOVEMENTS or not np.isfinite(rates).all() or len(rates) < 2:
        return None
    sums = np.concatenate([[0.0], np.cumsum(np.diff(rate_steps) * (rates[1:] + rates[:-1]) / 2)])
    passed = np.diff(np.interp(steps, rate_steps, sums), prepend=0.0)
    # At the end of a schedule that reaches 0, rounding moves weights as much as the rate.
    is_used = passed > MIN_RATE_SHARE * np.median(passed)
    if is_used.sum() < MIN_MOVEMENTS:
        return None
    steps, relative = steps[is_used], update[is_used] / passed[is_used, None]
    usual = np.median(relative, axis=0)
    ratios = relative / np.where(usual > 0, usual, np.inf)
    reading, layer = np.unravel_index(ratios.argmax(), ratios.shape)
    ratio, limit = float(ratios[reading, layer]), limits.gate_update_range
    if ratio > limit:
        text = f"the gate weights of layer {layer} move {ratio:,.0f} times as far as usual for their learning rate"
        return ratio, limit, f"{text}, at step {steps[reading]:,}"
    logs = np.log(passed[is_used])
    if np.ptp(logs) < math.log(limits.gate_update_rates) or not (update[is_used] > 0).all():
        return None
    slopes = np.polyfit(logs, np.log(update[is_used]), 1)[0]
    layer = int(slopes.argmin())
    if slopes[layer] >= limits.gate_update_slope:
        return None
    text = f"the gate weights of layer {layer} move as far at any learning rate: the log of their movement has slope"
    return float(slopes[layer]), limits.gate_update_slope, f"{text} {slopes[layer]:.2f} over that of the rate"


def _describe_movement(entropy: np.ndarray, shares: dict[str, np.ndarray]) -> str:
    """Return how much the gates of the layers changed, separately in shares and in entropy, whose units differ."""
    changes = [np.ptp(values, axis=0) for values in shares.values() if len(values)]
    share_text = (
        f"branch shares changed by {_format_range(np.max(changes, axis=0))}" if changes else "no shares were recorded"
    )
    return f"{share_text}; entropy by {_format_range(np.ptp(entropy, axis=0))}, nats"


def _format_range(change: np.ndarray) -> str:
    least, most = int(change.argmin()), int(change.argmax())
    return f"{change[least]:.3f} (layer {least}) to {change[most]:.3f} (layer {most})"


def _describe_unspecialized(shares: dict[str, np.ndarray], limits: Limits) -> str:
    """Return the layers that never preferred a branch on average. Their gates may still differ between tokens."""
    even_share = 1 / len(shares)
    deviations = [np.abs(values - even_share).max(axis=0) for values in shares.values() if len(values)]
    even = np.max(deviations, axis=0) < limits.gate_even if deviations else np.zeros(0, bool)
    if not even.any():
        return "every layer specialized" if len(even) else "unknown which layers specialized"
    deviation = f"within {np.max(deviations, axis=0)[even].max():.3f} of 1/{len(shares)}"
    return f"never specialized (all mean shares {deviation}): {format_layers(even)}"


def check_gates_alive(history: History, limits: Limits) -> Verdict | None:
    """Check that no layer's gate is collapsed onto one branch, saturated or without a branch, at the end and throughout.

    Slightly outside a limit is a warning. Branches that the configuration disables do not count.
    """
    active = list_active_branches(history)
    if is_dense(history) or len(active) < 2:
        return None
    # The highest entropy of two branches is lower than that of three.
    scale = math.log(len(active)) / MAX_ENTROPY
    _, entropy = history.layer_series("gate_entropy")
    if not len(entropy):
        return Verdict("gates alive", None, None, limits.gate_entropy, "no gate statistics were recorded")
    _, saturation = history.layer_series("gate_saturation")
    shares = _get_gate_shares(history)
    problems = [
        (
            entropy,
            entropy < limits.gate_entropy * scale,
            (limits.gate_entropy * scale, limits.gate_entropy_failed * scale),
            "collapsed onto one branch in {where}, entropy {value:.3f} nats",
        ),
        (
            saturation,
            saturation > limits.gate_saturation,
            (limits.gate_saturation, limits.gate_saturation_failed),
            "{value:.0%} of the gate values are saturated at 0 or 1 in {where}",
        ),
        *(
            (
                share,
                share < limits.gate_share,
                (limits.gate_share, limits.gate_share_failed),
                f"the {BRANCHES[branch]} branch has {{value:.1%}} of the gates in {{where}}",
            )
            for branch, share in shares.items()
        ),
    ]
    warning = None
    for values, violates, (limit, failed_limit), text in problems:
        if not len(values):
            continue
        # A short violation is part of training; one at the end or in many readings is not.
        is_frequent = violates.mean(axis=0) > limits.gate_readings
        is_last = violates[-1]
        if (failing := is_last | is_frequent).any():
            # Report the reading with the largest violation, among the last readings if these violate the limit.
            mask = (violates[-1:] & failing) if is_last.any() else (violates & failing)
            violations = values[-len(mask) :][mask]
            value = float(violations[np.abs(violations - limit).argmax()])
            when = "" if is_last.any() else f", in {violates[:, failing].mean(axis=0).max():.0%} of the readings"
            text = text.format(value=value, where=format_layers(failing)) + when
            verdict = Verdict("gates alive", False, value, limit, text)
            if abs(value - limit) >= abs(failed_limit - limit):
                return verdict
            warning = warning or verdict.to_warning()
    if warning:
        return warning
    last = entropy[-1]
    mean_shares = ", ".join(
        f"{BRANCHES[branch]} {values[-1].mean():.0%}" for branch, values in shares.items() if len(values)
    )
    return Verdict(
        "gates alive",
        True,
        float(last.min()),
        limits.gate_entropy,
        f"{mean_shares}; lowest entropy of a layer {last.min():.2f} of {math.log(len(active)):.2f} nats",
    )


def check_branch_outputs(history: History, limits: Limits) -> Verdict | None:
    """Check that the output of every branch neither vanishes nor explodes, in any layer and reading."""
    if is_dense(history):
        return None
    norms = {branch: history.layer_series(f"norm_{branch}") for branch in list_active_branches(history)}
    for branch, (steps, values) in norms.items():
        if not len(values):
            continue
        for is_wrong, value, limit, text in _find_output_problems(values, limits):
            if is_wrong.any():
                first = int(steps[is_wrong.any(axis=1).argmax()])
                where = format_layers(is_wrong.any(axis=0))
                text = f"the {BRANCHES[branch]} branch {text} in {where}, first at step {first:,}"
                return Verdict("branch outputs", False, value, limit, text)
        if shift := find_level_shift(history, steps, values, limits):
            text = f"the {BRANCHES[branch]} branch changes by a factor of {shift.factor:.0f} in layer {shift.layer}"
            return Verdict("branch outputs", False, shift.factor, limits.level_shift, f"{text} at step {shift.step:,}")
    if not all(len(values) for _, values in norms.values()):
        return Verdict("branch outputs", None, None, 0.0, "no norms were recorded")
    last = {branch: values[-1].mean() for branch, (_, values) in norms.items()}
    mean_norms = ", ".join(f"{BRANCHES[branch]} {value:.2f}" for branch, value in last.items())
    return Verdict("branch outputs", True, float(min(last.values())), 0.0, f"RMS, mean over layers: {mean_norms}")


def _find_output_problems(values: np.ndarray, limits: Limits) -> list[tuple[Any, float, float, str]]:
    """Return (bool [readings, layers], value, limit, text) of each way in which the norms of a branch can be wrong."""
    own, others = (_find_normal_levels(values, axis, limits.branch_range) for axis in (0, 1))
    smallest = np.minimum(values / own, values / others)
    largest = np.maximum(values / own, values / others)
    faded = values / np.maximum(np.maximum.accumulate(values), 1e-30)
    return [
        (values == 0, 0.0, 0.0, "is 0"),
        (values < limits.branch_least, float(values.min()), limits.branch_least, "vanishes"),
        (smallest < 1 / limits.branch_range, float(smallest.min()), 1 / limits.branch_range, "vanishes"),
        (largest > limits.branch_range, float(largest.max()), limits.branch_range, "explodes"),
        (values > 1 / limits.branch_least, float(values.max()), 1 / limits.branch_least, "explodes"),
        (faded < limits.branch_fade, float(faded.min()), limits.branch_fade, "fades"),
    ]


def _find_normal_levels(values: np.ndarray, axis: int, max_ratio: float) -> np.ndarray:
    """Return the normal RMS along `axis`: the median, unless most values exploded or vanished.

    A norm is normally near 1. If the median is above the smallest value by more than `max_ratio` and is farther from 1, the
    smallest value is normal; likewise the largest one if the median is below it.
    """
    median = np.maximum(np.median(values, axis=axis, keepdims=True), 1e-30)
    smallest, largest = values.min(axis=axis, keepdims=True), values.max(axis=axis, keepdims=True)
    has_exploded = (median > max_ratio * smallest) & (median * smallest > 1)
    has_vanished = (largest > max_ratio * median) & (median * largest < 1)
    return np.where(has_exploded, smallest, np.where(has_vanished, largest, median))


def list_active_branches(history: History) -> list[str]:
    """Return the branches that exist and that the configuration does not disable."""
    model = history.config.model
    return [branch for branch in model.branches if branch not in model.silent]


def _get_gate_shares(history: History) -> dict[str, np.ndarray]:
    """Return the share of the gates, [readings, layers], of each branch that is not disabled."""
    return {branch: history.layer_series(f"gate_share_{branch}")[1] for branch in list_active_branches(history)}


def _compute_longest_streak(mask: np.ndarray) -> np.ndarray:
    """Return the largest number of consecutive True values in each column of a mask [readings, layers]."""
    longest = streak = np.zeros(mask.shape[1], dtype=np.int64)
    for row in mask:
        streak = np.where(row, streak + 1, 0)
        longest = np.maximum(longest, streak)
    return longest


def is_dense(history: History) -> bool:
    return history.config.model.attention == "dense"


def format_layers(mask: np.ndarray) -> str:
    """Return "layer 2", "layers 0, 3" or "every layer" for a bool mask over layers."""
    numbers = np.flatnonzero(mask)
    if len(numbers) == len(mask):
        return "every layer"
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
