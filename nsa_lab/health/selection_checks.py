"""Verdicts on block selection, layer by layer; None for a dense model, which selects nothing."""

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
    """What `sel_reuse` and `sel_distance` would be without any choice by content, over a sequence."""

    chance_reuse: float
    nearest: float
    farthest: float
    has_selection: bool


def compute_selection_range(length: int, nsa: NSAConfig) -> SelectionRange:
    """Reuse of blocks chosen at random; mean distances, in blocks, of always the nearest and always the farthest.

    `free` says whether any query has more candidates than `n_sel`; otherwise every query reads every block.
    """
    own = np.arange(length) // nsa.l_sel
    candidates = own + 1
    chosen = np.minimum(candidates, nsa.n_sel)
    forced = np.minimum(candidates, 3)
    extra, others = chosen - forced, candidates - forced
    # Block 0 lies `own` away; the nearest others are 0, 1, ..., chosen - 2 away.
    nearest = own + (chosen - 1) * (chosen - 2) / 2
    # Forced: block 0, the own and the one before it. The farthest others are blocks 1, 2, ..., chosen - 3.
    oldest = own + (own > 1) + extra * own - extra * (extra + 1) / 2
    shared = forced + np.divide(extra**2, others, out=np.zeros(length), where=others > 0)
    return SelectionRange(
        chance_reuse=float((shared / chosen)[1:].mean()) if length > 1 else 1.0,
        nearest=float(nearest.sum() / chosen.sum()),
        farthest=float(oldest.sum() / chosen.sum()),
        has_selection=bool((candidates > nsa.n_sel).any()),
    )


def check_selection_finds(history: History, limits: Limits) -> Verdict | None:
    """Answers beyond the window are right, and cost more with random blocks, with the nearest, and without the selected
    branch: by `reach_loss` nats, and by `reach_share` of what they cost there.

    The last reading that was asked is judged. A run on text without facts in it need not have learned to answer: there,
    success is told and its absence says nothing.
    """
    if is_dense(history):
        return None
    name = "selection finds"
    told = history.current_events("reach")
    parts = {"length": int, "answer_loss": dict, "accuracy": dict}
    asked = [event for event in told if all(isinstance(event.get(key), kind) for key, kind in parts.items())]
    if not asked:
        why = f"not judged: {told[-1].get('why_not')}" if told else "no intervention on the choice was recorded"
        return Verdict(name, None, None, limits.selection_gain, why)
    last = asked[-1]
    loss, right = last["answer_loss"], last["accuracy"]
    gained = {change: _compute_gain(loss, change) for change in ("random", "nearest", "no_sel")}
    least, gain = min(gained.items(), key=lambda item: item[1])
    limit = max(limits.selection_gain, limits.selection_gain_share * (loss.get(least) or 0.0))
    shown = {
        name: f"{right.get(name, math.nan):.0%} right, {_format_nats(loss.get(name))} per byte"
        for name in ("chosen", "random")
    }
    # As many as the run that wrote it asked: 4 in earlier ones.
    count = f" in {last['sequences']} sequences" if isinstance(last.get("sequences"), int) else ""
    text = (
        f"answers beyond the window, at {last['length']:,} tokens{count}: {shown['chosen']} with the chosen blocks, "
        f"{shown['random']} with random ones"
    )
    if gain >= limit and right.get("chosen"):
        return Verdict(name, True, gain, limit, text)
    words = {"random": "random blocks are", "nearest": "the nearest blocks are", "no_sel": "no selected branch is"}
    if gain >= limit:
        text += f"; the choice saves {gain:.2f} nats at least, and finds nothing yet"
    else:
        text += f"; {words[least]} as good: the choice saves {max(gain, 0):.2f} nats, and {limit:.2f} were asked"
    if history.config.data.source != "recall":
        text += ". It was not trained on facts, as it would be with data.source: recall, so that says little"
        return Verdict(name, None, gain, limit, text)
    if last["step"] < limits.selection_gain_after * history.config.train.steps:
        return Verdict(name, None, gain, limit, f"{text}. Not judged before {limits.selection_gain_after:.0%} of the steps")
    return Verdict(name, False, gain, limit, text)


def _format_nats(value: float | None) -> str:
    return "? nats" if value is None else f"{value:.2f} nats"


def _compute_gain(loss: Mapping[str, float | None], change: str) -> float:
    """Nats per byte that the choice saves against `change`; minus infinity where either is not a number."""
    chosen, other = loss.get("chosen"), loss.get(change)
    return -math.inf if chosen is None or other is None else other - chosen


def check_selection_varies(history: History, limits: Limits) -> Verdict | None:
    """Blocks differ between neighbouring queries, and not less than chance allows."""
    if is_dense(history):
        return None
    found = _get_last_reading(history, "sel_reuse", "selection chooses")
    if isinstance(found, Verdict):
        return found
    reuse, span = found
    low = span.chance_reuse - limits.reuse_slack
    if (fixed := reuse > limits.reuse_constant).any():
        return Verdict(
            "selection chooses",
            False,
            float(reuse.max()),
            limits.reuse_constant,
            f"neighbouring queries always choose the same blocks in {format_layers(fixed)}",
        )
    if (noisy := reuse < low).any():
        return Verdict(
            "selection chooses",
            False,
            float(reuse.min()),
            low,
            f"neighbours share {reuse.min():.1%} of their blocks in {format_layers(noisy)}, less than chance",
        )
    return Verdict(
        "selection chooses",
        True,
        float(reuse.max()),
        limits.reuse_constant,
        f"neighbouring queries share {_format_range(reuse)} of their blocks, by layer (chance: {span.chance_reuse:.0%})",
    )


def check_selection_distance(history: History, limits: Limits) -> Verdict | None:
    """Blocks are neither always the nearest (a wider window) nor always the oldest."""
    if is_dense(history):
        return None
    found = _get_last_reading(history, "sel_distance", "selection reaches")
    if isinstance(found, Verdict):
        return found
    distance, span = found
    if history.last_step < limits.selection_steps:
        return Verdict("selection reaches", None, None, None, f"not judged before step {limits.selection_steps}")
    margin = limits.distance_margin * (span.farthest - span.nearest)
    near, far = span.nearest + margin, span.farthest - margin
    if (close := distance < near).any():
        return Verdict(
            "selection reaches",
            False,
            float(distance.min()),
            near,
            f"only the nearest blocks are chosen in {format_layers(close)}: a wider window, not a selection",
        )
    if (old := distance > far).any():
        return Verdict(
            "selection reaches",
            False,
            float(distance.max()),
            far,
            f"only the oldest blocks are chosen in {format_layers(old)}",
        )
    return Verdict(
        "selection reaches",
        True,
        float(distance.min()),
        near,
        f"chosen blocks lie {distance.min():.1f} to {distance.max():.1f} blocks back on average, by layer "
        f"(nearest possible {span.nearest:.1f}, farthest {span.farthest:.1f})",
    )


def check_sink_share(history: History, limits: Limits) -> Verdict | None:
    if is_dense(history):
        return None
    _, values = history.layer_series("sel_sink_share")
    if not len(values):
        return Verdict("attention sink", None, None, limits.sink_share, "no selection statistics were recorded")
    last = values[-1]
    if (sunk := last > limits.sink_share).any():
        return Verdict(
            "attention sink",
            False,
            float(last.max()),
            limits.sink_share,
            f"the first block holds {last.max():.0%} of the selected attention in {format_layers(sunk)}",
        )
    return Verdict(
        "attention sink",
        True,
        float(last.max()),
        limits.sink_share,
        f"the first block, where attention goes that nothing asks for, holds {_format_range(last)} of the selected, by layer",
    )


def _get_last_reading(history: History, name: str, verdict: str) -> tuple[np.ndarray, SelectionRange] | Verdict:
    """The last reading by layer and what to compare it with, or the verdict that says why not."""
    length, nsa = history.config.train.stage_at(history.last_step).seq_len, history.config.nsa
    span = compute_selection_range(length, nsa)
    if not span.has_selection:
        return Verdict(
            verdict,
            None,
            None,
            None,
            f"not in play: {length:,} tokens hold {-(-length // nsa.l_sel):,} blocks, "
            f"and all of them are selected (nsa.n_sel = {nsa.n_sel})",
        )
    _, values = history.layer_series(name)
    if not len(values):
        return Verdict(verdict, None, None, None, "no selection statistics were recorded")
    return values[-1], span


def _format_range(values: np.ndarray) -> str:
    return f"{values.min():.0%} to {values.max():.0%}"
