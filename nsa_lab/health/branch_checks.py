"""Verdicts on the gates and the outputs of the branches, layer by layer; None for a dense model, which has neither."""

from __future__ import annotations

import math

import numpy as np

from nsa_lab.config import BRANCHES
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History

MAX_ENTROPY = math.log(3)


def check_gates_moved(history: History, limits: Limits) -> Verdict | None:
    """Stuck at no time: weights that move, shares that change, an entropy that is not that of a zero gate."""
    if is_dense(history):
        return None
    _, entropy = history.layer_series("gate_entropy")
    if not len(entropy):
        return Verdict("gates moved", None, None, limits.gate_min_change, "no gate statistics were recorded")
    pinned = np.all(np.abs(entropy - MAX_ENTROPY) < limits.gate_pinned, axis=0)
    if pinned.any():
        return Verdict(
            "gates moved",
            False,
            MAX_ENTROPY,
            MAX_ENTROPY - limits.gate_pinned,
            f"entropy pinned at ln 3 = {MAX_ENTROPY:.4f} in every reading of {format_layers(pinned)}",
        )
    _, update = history.layer_series("gate_update")
    still = (update == 0).all(axis=0) if len(update) else np.zeros(entropy.shape[1], bool)
    if still.any():
        return Verdict("gates moved", False, 0.0, 0.0, f"the gate weights never moved in {format_layers(still)}")
    if len(entropy) < 3:
        return Verdict(
            "gates moved", None, None, limits.gate_min_change, f"{len(entropy)} readings are too few to see movement"
        )
    readings = np.stack(
        [values for values in (entropy, *_get_gate_shares(history).values()) if len(values) == len(entropy)]
    )
    change = np.ptp(readings, axis=1).max(axis=0)
    frozen = change < limits.gate_min_change
    if frozen.any():
        return Verdict(
            "gates moved",
            False,
            float(change.min()),
            limits.gate_min_change,
            f"gate never moved in {format_layers(frozen)}",
        )
    same = (readings[:, 1:] == readings[:, :-1]).all(axis=0)
    for stuck, what in ((same, "the gates are the same to the last bit"), (update == 0, "the gate weights stand still")):
        row = _compute_longest_streak(stuck)
        if (row >= limits.gate_constant_readings).any():
            text = f"{what} in {row.max()} readings in a row in {format_layers(row >= limits.gate_constant_readings)}"
            return Verdict("gates moved", False, float(row.max()), limits.gate_constant_readings, text)
    if (late := entropy.shape[0] // 2) >= limits.gate_constant_readings:
        recent = np.ptp(readings[:, -late:], axis=1).max(axis=0)
        if (stopped := recent < limits.gate_min_change).any():
            text = f"the gate no longer moved in the second half in {format_layers(stopped)}"
            return Verdict("gates moved", False, float(recent.min()), limits.gate_min_change, text)
    return Verdict(
        "gates moved",
        True,
        float(change.min()),
        limits.gate_min_change,
        f"{_describe_movement(entropy, _get_gate_shares(history))}; {_describe_unspecialized(_get_gate_shares(history), limits)}",
    )


def _describe_movement(entropy: np.ndarray, shares: dict[str, np.ndarray]) -> str:
    """By how much the gates of the layers moved: shares and entropies apart, for they have units of their own."""
    moved = [np.ptp(values, axis=0) for values in shares.values() if len(values)]
    by_share = f"shares moved by {_format_range(np.max(moved, axis=0))}, of 1" if moved else "no shares were recorded"
    return f"{by_share}; entropy by {_format_range(np.ptp(entropy, axis=0))}, nats"


def _format_range(change: np.ndarray) -> str:
    least, most = int(change.argmin()), int(change.argmax())
    return f"{change[least]:.3f} (layer {least}) to {change[most]:.3f} (layer {most})"


def _describe_unspecialized(shares: dict[str, np.ndarray], limits: Limits) -> str:
    """Names the layers that never came to prefer a branch. Their gates may differ from token to token all the same."""
    away = [np.abs(values - 1 / 3).max(axis=0) for values in shares.values() if len(values)]
    even = np.max(away, axis=0) < limits.gate_even if away else np.zeros(0, bool)
    if not even.any():
        return "every layer left even shares" if len(even) else "which layers specialised is not known"
    told = f"within {np.max(away, axis=0)[even].max():.3f} of 1/3"
    return f"never specialised, on average every share {told} throughout: {format_layers(even)}"


def check_gates_alive(history: History, limits: Limits) -> Verdict | None:
    """No layer collapsed onto one branch, none saturated, none without a branch: at the end, and through the run."""
    if is_dense(history):
        return None
    _, entropy = history.layer_series("gate_entropy")
    if not len(entropy):
        return Verdict("gates alive", None, None, limits.gate_entropy, "no gate statistics were recorded")
    _, saturation = history.layer_series("gate_saturation")
    shares = _get_gate_shares(history)
    ills = [
        (
            entropy,
            entropy < limits.gate_entropy,
            limits.gate_entropy,
            "collapsed onto one branch in {where}, entropy {value:.3f} nats",
        ),
        (
            saturation,
            saturation > limits.gate_saturation,
            limits.gate_saturation,
            "{value:.0%} of the gate values are stuck at 0 or 1 in {where}",
        ),
        *(
            (
                share,
                share < limits.gate_share,
                limits.gate_share,
                f"the {BRANCHES[branch]} branch holds {{value:.1%}} of the gates in {{where}}",
            )
            for branch, share in shares.items()
        ),
    ]
    for values, ill, limit, text in ills:
        if not len(values):
            continue
        # A moment of it is training; the end of it, or much of it, is not.
        often = ill.mean(axis=0) > limits.gate_readings
        now = ill[-1]
        if (wrong := now | often).any():
            # The reading that is farthest on the wrong side, of the last ones where they show it.
            shown = (ill[-1:] & wrong) if now.any() else (ill & wrong)
            found = values[-len(shown) :][shown]
            value = float(found[np.abs(found - limit).argmax()])
            when = "" if now.any() else f", in {ill[:, wrong].mean(axis=0).max():.0%} of the readings"
            return Verdict("gates alive", False, value, limit, text.format(value=value, where=format_layers(wrong)) + when)
    last = entropy[-1]
    split = ", ".join(f"{BRANCHES[branch]} {values[-1].mean():.0%}" for branch, values in shares.items() if len(values))
    return Verdict(
        "gates alive",
        True,
        float(last.min()),
        limits.gate_entropy,
        f"{split}; lowest entropy of a layer {last.min():.2f} of {MAX_ENTROPY:.2f} nats",
    )


def check_branch_outputs(history: History, limits: Limits) -> Verdict | None:
    """Every branch of every layer says something, at every reading."""
    if is_dense(history):
        return None
    norms = {branch: history.layer_series(f"norm_{branch}") for branch in BRANCHES}
    for branch, (steps, values) in norms.items():
        if len(values) and (silent := values == 0).any():
            first = int(steps[silent.any(axis=1).argmax()])
            text = f"the {BRANCHES[branch]} branch is 0 in {format_layers(silent.any(axis=0))}, first at step {first:,}"
            return Verdict("branch outputs", False, 0.0, 0.0, text)
    if not all(len(values) for _, values in norms.values()):
        return Verdict("branch outputs", None, None, 0.0, "no norms were recorded")
    last = {branch: values[-1].mean() for branch, (_, values) in norms.items()}
    split = ", ".join(f"{BRANCHES[branch]} {value:.2f}" for branch, value in last.items())
    return Verdict("branch outputs", True, float(min(last.values())), 0.0, f"root mean square {split}, over the layers")


def _get_gate_shares(history: History) -> dict[str, np.ndarray]:
    """Of each branch, its share of the gates `[readings, layers]`."""
    return {branch: history.layer_series(f"gate_share_{branch}")[1] for branch in BRANCHES}


def _compute_longest_streak(shows: np.ndarray) -> np.ndarray:
    """How often in a row each column of `[n, layers]` shows, at most."""
    longest = row = np.zeros(shows.shape[1], dtype=np.int64)
    for each in shows:
        row = np.where(each, row + 1, 0)
        longest = np.maximum(longest, row)
    return longest


def is_dense(history: History) -> bool:
    return history.config.model.attention == "dense"


def format_layers(which: np.ndarray) -> str:
    numbers = np.flatnonzero(which)
    if len(numbers) == len(which):
        return "every layer"
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
