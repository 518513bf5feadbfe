"""Checks of block selection, per layer. They return None for a dense model, which has no selection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nsa_lab.config import NSAConfig
from nsa_lab.health.branch_checks import format_layers, is_dense
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History


@dataclass(frozen=True)
class SelectionRange:
    """Values of `sel_reuse` and `sel_distance` for selections that ignore the content, means over a sequence."""

    chance_reuse: float
    """Fraction of blocks shared by neighboring queries under random selection."""
    nearest: float
    """Distance, in blocks, if the nearest blocks are always selected."""
    farthest: float
    """Distance, in blocks, if the farthest blocks are always selected."""
    has_selection: bool
    """True if any query has more than `n_sel` candidates; otherwise every query reads every block."""


def compute_selection_range(length: int, nsa: NSAConfig) -> SelectionRange:
    """Compute reuse and distances of random, always-nearest and always-farthest selections for one sequence."""
    own = np.arange(length) // nsa.l_sel
    candidates = own + 1
    selected = np.minimum(candidates, nsa.n_sel)
    forced = np.minimum(candidates, 3)
    free, others = selected - forced, candidates - forced
    # Block 0 is at distance `own`; the nearest others are at distances 0, 1, ..., selected - 2.
    nearest = own + (selected - 1) * (selected - 2) / 2
    # Forced: block 0, the query's own block and the one before it. The farthest others are blocks 1, 2, ..., selected - 3.
    oldest = own + (own > 1) + free * own - free * (free + 1) / 2
    shared = forced + np.divide(free**2, others, out=np.zeros(length), where=others > 0)
    return SelectionRange(
        chance_reuse=float((shared / selected)[1:].mean()) if length > 1 else 1.0,
        nearest=float(nearest.sum() / selected.sum()),
        farthest=float(oldest.sum() / selected.sum()),
        has_selection=bool((candidates > nsa.n_sel).any()),
    )


def check_selection_finds(history: History, limits: Limits) -> Verdict | None:
    """Check that answers beyond the window are correct, and need the selection.

    Their loss must be larger with random blocks, with the nearest blocks and without the selected branch: by at least
    `selection_gain` nats per byte and by at least `selection_gain_share` of the loss there. The last complete reading is
    judged. A run on text without facts may pass, but the result is unknown, not failed, if it does not.
    """
    if is_dense(history):
        return None
    name = "selection finds"
    events = history.current_events("reach")
    fields = {"length": int, "answer_loss": dict, "accuracy": dict}
    readings = [event for event in events if all(isinstance(event.get(key), kind) for key, kind in fields.items())]
    if not readings:
        reason = f"not judged: {events[-1].get('why_not')}" if events else "no ablation of the selection was recorded"
        return Verdict(name, None, None, limits.selection_gain, reason)
    last = readings[-1]
    loss, accuracy = last["answer_loss"], last["accuracy"]
    gains = {ablation: _compute_gain(loss, ablation) for ablation in ("random", "nearest", "no_sel")}
    best_ablation, gain = min(gains.items(), key=lambda item: item[1])
    limit = max(limits.selection_gain, limits.selection_gain_share * (loss.get(best_ablation) or 0.0))
    results = {
        name: f"{accuracy.get(name, math.nan):.0%} correct, {_format_nats(loss.get(name))} per byte"
        for name in ("chosen", "random")
    }
    # The number of sequences that the run used; 4 in older runs.
    count = f" in {last['sequences']} sequences" if isinstance(last.get("sequences"), int) else ""
    text = (
        f"answers beyond the window, at {last['length']:,} tokens{count}: {results['chosen']} with selected blocks, "
        f"{results['random']} with random blocks"
    )
    if gain >= limit and accuracy.get("chosen"):
        return Verdict(name, True, gain, limit, text)
    subjects = {"random": "random blocks are", "nearest": "the nearest blocks are", "no_sel": "no selected branch is"}
    if gain >= limit:
        text += f"; selection saves at least {gain:.2f} nats, but no answer is correct yet"
    else:
        text += f"; {subjects[best_ablation]} as good: selection saves {max(gain, 0):.2f} nats, required {limit:.2f}"
    if history.config.data.source != "recall":
        text += ". The run was not trained on facts (data.source: recall), so this is not a failure"
        return Verdict(name, None, gain, limit, text)
    if last["step"] < limits.selection_gain_after * history.config.train.steps:
        return Verdict(name, None, gain, limit, f"{text}. Not judged before {limits.selection_gain_after:.0%} of the steps")
    return Verdict(name, False, gain, limit, text)


def _format_nats(value: float | None) -> str:
    return "? nats" if value is None else f"{value:.2f} nats"


def _compute_gain(loss: Mapping[str, float | None], ablation: str) -> float:
    """Return the loss under `ablation` minus the loss with selection, nats per byte; -inf if either is missing."""
    selected_loss, ablated_loss = loss.get("chosen"), loss.get(ablation)
    return -math.inf if selected_loss is None or ablated_loss is None else ablated_loss - selected_loss


def check_selection_varies(history: History, limits: Limits) -> Verdict | None:
    """Check that neighboring queries select different blocks, but share at least as many as chance predicts."""
    if is_dense(history):
        return None
    reading = _get_last_reading(history, "sel_reuse", "selection chooses")
    if isinstance(reading, Verdict):
        return reading
    reuse, bounds = reading
    low = bounds.chance_reuse - limits.reuse_slack
    if (fixed := reuse > limits.reuse_constant).any():
        return Verdict(
            "selection chooses",
            False,
            float(reuse.max()),
            limits.reuse_constant,
            f"neighboring queries always select the same blocks in {format_layers(fixed)}",
        )
    if (noisy := reuse < low).any():
        return Verdict(
            "selection chooses",
            False,
            float(reuse.min()),
            low,
            f"neighboring queries share {reuse.min():.1%} of their blocks in {format_layers(noisy)}, less than chance",
        )
    return Verdict(
        "selection chooses",
        True,
        float(reuse.max()),
        limits.reuse_constant,
        f"neighboring queries share {_format_range(reuse)} of their blocks, by layer (chance: {bounds.chance_reuse:.0%})",
    )


def check_selection_distance(history: History, limits: Limits) -> Verdict | None:
    """Check that the selected blocks are neither always the nearest (a wider window) nor always the oldest."""
    if is_dense(history):
        return None
    reading = _get_last_reading(history, "sel_distance", "selection reaches")
    if isinstance(reading, Verdict):
        return reading
    distance, bounds = reading
    if history.last_step < limits.selection_steps:
        return Verdict("selection reaches", None, None, None, f"not judged before step {limits.selection_steps}")
    margin = limits.distance_margin * (bounds.farthest - bounds.nearest)
    near, far = bounds.nearest + margin, bounds.farthest - margin
    if (is_near := distance < near).any():
        return Verdict(
            "selection reaches",
            False,
            float(distance.min()),
            near,
            f"only the nearest blocks are selected in {format_layers(is_near)}: equivalent to a wider window",
        )
    if (is_old := distance > far).any():
        return Verdict(
            "selection reaches",
            False,
            float(distance.max()),
            far,
            f"only the oldest blocks are selected in {format_layers(is_old)}",
        )
    return Verdict(
        "selection reaches",
        True,
        float(distance.min()),
        near,
        f"mean distance of selected blocks {distance.min():.1f} to {distance.max():.1f} blocks, by layer "
        f"(always nearest: {bounds.nearest:.1f}, always farthest: {bounds.farthest:.1f})",
    )


def check_sink_share(history: History, limits: Limits) -> Verdict | None:
    """Check that the first block does not attract most of the selected attention."""
    if is_dense(history):
        return None
    _, values = history.layer_series("sel_sink_share")
    if not len(values):
        return Verdict("attention sink", None, None, limits.sink_share, "no selection statistics were recorded")
    last = values[-1]
    if (is_sink := last > limits.sink_share).any():
        return Verdict(
            "attention sink",
            False,
            float(last.max()),
            limits.sink_share,
            f"the first block has {last.max():.0%} of the selected attention in {format_layers(is_sink)}",
        )
    return Verdict(
        "attention sink",
        True,
        float(last.max()),
        limits.sink_share,
        f"the first block, which acts as an attention sink, has {_format_range(last)} of the selected attention, by layer",
    )


def _get_last_reading(history: History, name: str, verdict: str) -> tuple[np.ndarray, SelectionRange] | Verdict:
    """Return the last reading of a statistic by layer and its bounds; a result with the reason if there is none."""
    length, nsa = history.config.train.stage_at(history.last_step).seq_len, history.config.nsa
    bounds = compute_selection_range(length, nsa)
    if not bounds.has_selection:
        return Verdict(
            verdict,
            None,
            None,
            None,
            f"not applicable: {length:,} tokens have {-(-length // nsa.l_sel):,} blocks, "
            f"and all of them are selected (nsa.n_sel = {nsa.n_sel})",
        )
    _, values = history.layer_series(name)
    if not len(values):
        return Verdict(verdict, None, None, None, "no selection statistics were recorded")
    return values[-1], bounds


def _format_range(values: np.ndarray) -> str:
    return f"{values.min():.0%} to {values.max():.0%}"
