"""Verdicts on the gates and the outputs of the branches, layer by layer; None for a dense model, which has neither."""

from __future__ import annotations

import math

import numpy as np

from nsa_lab.config import BRANCHES
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History

EVEN = math.log(3)


def gates_moved(history: History, limits: Limits) -> Verdict | None:
    """Stuck at no time: weights that move, shares that change, an entropy that is not that of a zero gate."""
    if is_dense(history):
        return None
    _, entropy = history.layers("gate_entropy")
    if not len(entropy):
        return Verdict("gates moved", None, None, limits.gate_moved, "no gate statistics were recorded")
    pinned = np.all(np.abs(entropy - EVEN) < limits.gate_pinned, axis=0)
    if pinned.any():
        return Verdict(
            "gates moved",
            False,
            EVEN,
            EVEN - limits.gate_pinned,
            f"entropy pinned at ln 3 = {EVEN:.4f} in every reading of {layers_named(pinned)}",
        )
    _, update = history.layers("gate_update")
    still = (update == 0).all(axis=0) if len(update) else np.zeros(entropy.shape[1], bool)
    if still.any():
        return Verdict("gates moved", False, 0.0, 0.0, f"the gate weights never moved in {layers_named(still)}")
    if len(entropy) < 3:
        return Verdict("gates moved", None, None, limits.gate_moved, f"{len(entropy)} readings are too few to see movement")
    readings = np.stack([values for values in (entropy, *_shares(history).values()) if len(values) == len(entropy)])
    change = np.ptp(readings, axis=1).max(axis=0)
    frozen = change < limits.gate_moved
    if frozen.any():
        return Verdict(
            "gates moved", False, float(change.min()), limits.gate_moved, f"gate never moved in {layers_named(frozen)}"
        )
    same = (readings[:, 1:] == readings[:, :-1]).all(axis=0)
    for stuck, what in ((same, "the gates are the same to the last bit"), (update == 0, "the gate weights stand still")):
        row = _longest_row(stuck)
        if (row >= limits.gate_still).any():
            text = f"{what} in {row.max()} readings in a row in {layers_named(row >= limits.gate_still)}"
            return Verdict("gates moved", False, float(row.max()), limits.gate_still, text)
    if (late := entropy.shape[0] // 2) >= limits.gate_still:
        recent = np.ptp(readings[:, -late:], axis=1).max(axis=0)
        if (stopped := recent < limits.gate_moved).any():
            text = f"the gate no longer moved in the second half in {layers_named(stopped)}"
            return Verdict("gates moved", False, float(recent.min()), limits.gate_moved, text)
    return Verdict(
        "gates moved",
        True,
        float(change.min()),
        limits.gate_moved,
        f"{_movement(entropy, _shares(history))}; {_never_specialised(_shares(history), limits)}",
    )


def _movement(entropy: np.ndarray, shares: dict[str, np.ndarray]) -> str:
    """By how much the gates of the layers moved: shares and entropies apart, for they have units of their own."""
    moved = [np.ptp(values, axis=0) for values in shares.values() if len(values)]
    by_share = f"shares moved by {_least_to_most(np.max(moved, axis=0))}, of 1" if moved else "no shares were recorded"
    return f"{by_share}; entropy by {_least_to_most(np.ptp(entropy, axis=0))}, nats"


def _least_to_most(change: np.ndarray) -> str:
    least, most = int(change.argmin()), int(change.argmax())
    return f"{change[least]:.3f} (layer {least}) to {change[most]:.3f} (layer {most})"


def _never_specialised(shares: dict[str, np.ndarray], limits: Limits) -> str:
    """Names the layers that never came to prefer a branch. Their gates may differ from token to token all the same."""
    away = [np.abs(values - 1 / 3).max(axis=0) for values in shares.values() if len(values)]
    even = np.max(away, axis=0) < limits.gate_even if away else np.zeros(0, bool)
    if not even.any():
        return "every layer left even shares" if len(even) else "which layers specialised is not known"
    told = f"within {np.max(away, axis=0)[even].max():.3f} of 1/3"
    return f"never specialised, on average every share {told} throughout: {layers_named(even)}"


def gates_alive(history: History, limits: Limits) -> Verdict | None:
    """No layer collapsed onto one branch, none saturated, none without a branch: at the end, and through the run."""
    if is_dense(history):
        return None
    _, entropy = history.layers("gate_entropy")
    if not len(entropy):
        return Verdict("gates alive", None, None, limits.gate_entropy, "no gate statistics were recorded")
    _, saturation = history.layers("gate_saturation")
    shares = _shares(history)
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
            return Verdict("gates alive", False, value, limit, text.format(value=value, where=layers_named(wrong)) + when)
    last = entropy[-1]
    split = ", ".join(f"{BRANCHES[branch]} {values[-1].mean():.0%}" for branch, values in shares.items() if len(values))
    return Verdict(
        "gates alive",
        True,
        float(last.min()),
        limits.gate_entropy,
        f"{split}; lowest entropy of a layer {last.min():.2f} of {EVEN:.2f} nats",
    )


def branch_outputs(history: History, limits: Limits) -> Verdict | None:
    """Every branch of every layer says something, at every reading."""
    if is_dense(history):
        return None
    norms = {branch: history.layers(f"norm_{branch}") for branch in BRANCHES}
    for branch, (steps, values) in norms.items():
        if len(values) and (silent := values == 0).any():
            first = int(steps[silent.any(axis=1).argmax()])
            text = f"the {BRANCHES[branch]} branch is 0 in {layers_named(silent.any(axis=0))}, first at step {first:,}"
            return Verdict("branch outputs", False, 0.0, 0.0, text)
    if not all(len(values) for _, values in norms.values()):
        return Verdict("branch outputs", None, None, 0.0, "no norms were recorded")
    last = {branch: values[-1].mean() for branch, (_, values) in norms.items()}
    split = ", ".join(f"{BRANCHES[branch]} {value:.2f}" for branch, value in last.items())
    return Verdict("branch outputs", True, float(min(last.values())), 0.0, f"root mean square {split}, over the layers")


def _shares(history: History) -> dict[str, np.ndarray]:
    """Of each branch, its share of the gates `[readings, layers]`."""
    return {branch: history.layers(f"gate_share_{branch}")[1] for branch in BRANCHES}


def _longest_row(shows: np.ndarray) -> np.ndarray:
    """How often in a row each column of `[n, layers]` shows, at most."""
    longest = row = np.zeros(shows.shape[1], dtype=np.int64)
    for each in shows:
        row = np.where(each, row + 1, 0)
        longest = np.maximum(longest, row)
    return longest


def is_dense(history: History) -> bool:
    return history.config.model.attention == "dense"


def layers_named(which: np.ndarray) -> str:
    numbers = np.flatnonzero(which)
    if len(numbers) == len(which):
        return "every layer"
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
