"""Checks of block selection, per layer. They return None for a dense model, which has no selection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nsa_lab.config import NSAConfig
from nsa_lab.health.branch_checks import format_layers, is_dense, list_active_branches
from nsa_lab.health.completeness_checks import find_readings_with_selection
from nsa_lab.health.references import explain_trial
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History, find_stages


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
    # Forced: the first blocks, then the query's own block and those before it.
    sinks = np.minimum(candidates, nsa.sink_blocks)
    local = np.minimum(candidates - sinks, nsa.local_blocks)
    forced = sinks + local
    free, others = selected - forced, candidates - forced
    sink_distance = sinks * own - sinks * (sinks - 1) / 2
    # The nearest others are at distances 0, 1, 2, ...
    nearest = sink_distance + (selected - sinks) * (selected - sinks - 1) / 2
    # The farthest others are the first blocks after the sinks.
    oldest = sink_distance + local * (local - 1) / 2 + free * (own - sinks) - free * (free - 1) / 2
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
    if not selects_blocks(history):
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
    if trial := explain_trial(history, limits):
        return Verdict(name, None, gain, limit, f"{text}. Not judged: a trial run, {trial}")
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
    if not selects_blocks(history):
        return None
    name = "selection chooses"
    readings = _get_readings(history, "sel_reuse", limits)
    if isinstance(readings, str):
        return Verdict(name, None, None, None, readings)
    reuse, low = readings.values, readings.chance_reuse - limits.reuse_slack
    fixed, noisy = reuse > limits.reuse_constant, reuse < low[:, None]
    if failure := _judge(history, name, fixed, limits):
        text = f"neighboring queries always select the same blocks in {failure.where}"
        return failure.make_verdict(float(reuse.max()), limits.reuse_constant, text)
    if failure := _judge(history, name, noisy, limits):
        text = f"neighboring queries share {reuse[noisy].min():.1%} of their blocks in {failure.where}, less than chance"
        return failure.make_verdict(float(reuse[noisy].min()), float(low[-1]), text)
    last = reuse[-1]
    return Verdict(
        name,
        True,
        float(last.max()),
        limits.reuse_constant,
        f"neighboring queries share {_format_range(last)} of their blocks, by layer "
        f"(chance: {readings.chance_reuse[-1]:.0%})",
    )


def check_selection_distance(history: History, limits: Limits) -> Verdict | None:
    """Check that the selected blocks are neither always the nearest (a wider window) nor always the oldest."""
    if not selects_blocks(history):
        return None
    name = "selection reaches"
    readings = _get_readings(history, "sel_distance", limits)
    if isinstance(readings, str):
        return Verdict(name, None, None, None, readings)
    if history.last_step < limits.selection_steps:
        return Verdict(name, None, None, None, f"not judged before step {limits.selection_steps}")
    distance, margin = readings.values, limits.distance_margin * (readings.farthest - readings.nearest)
    near, far = readings.nearest + margin, readings.farthest - margin
    is_near, is_old = distance < near[:, None], distance > far[:, None]
    if failure := _judge(history, name, is_near, limits):
        text = f"only the nearest blocks are selected in {failure.where}: equivalent to a wider window"
        return failure.make_verdict(float(distance[is_near].min()), float(near[-1]), text)
    if failure := _judge(history, name, is_old, limits):
        text = f"only the oldest blocks are selected in {failure.where}"
        return failure.make_verdict(float(distance[is_old].max()), float(far[-1]), text)
    last = distance[-1]
    return Verdict(
        name,
        True,
        float(last.min()),
        float(near[-1]),
        f"mean distance of selected blocks {last.min():.1f} to {last.max():.1f} blocks, by layer "
        f"(always nearest: {readings.nearest[-1]:.1f}, always farthest: {readings.farthest[-1]:.1f})",
    )


def check_sink_share(history: History, limits: Limits) -> Verdict | None:
    """Check that the first block has a part of the selected attention, but does not attract most of it."""
    if not selects_blocks(history):
        return None
    name = "attention sink"
    steps, values = history.layer_series("sel_sink_share")
    if not len(values):
        return Verdict(name, None, None, limits.sink_share, "no selection statistics were recorded")
    if history.config.nsa.sink_blocks and (is_lost := (values == 0).all(axis=1)).any():
        text = f"the first block is always selected, but no layer has attention on it at step {steps[is_lost][0]:,}"
        return Verdict(name, False, 0.0, 0.0, f"{text} ({is_lost.sum():,} such readings)")
    # If all blocks are selected, the share is dense attention's.
    is_sink = (values > limits.sink_share) & find_readings_with_selection(history, steps)[:, None]
    if failure := _judge(history, name, is_sink, limits):
        text = f"the first block has {values[is_sink].max():.0%} of the selected attention in {failure.where}"
        return failure.make_verdict(float(values[is_sink].max()), limits.sink_share, text)
    return Verdict(
        name,
        True,
        float(values[-1].max()),
        limits.sink_share,
        f"the first block, an attention sink, has {_format_range(values[-1])} of the selected attention, by layer",
    )


def selects_blocks(history: History) -> bool:
    """Return True for an NSA model with a selected branch that is not disabled."""
    return "sel" in list_active_branches(history) and not is_dense(history)


@dataclass(frozen=True)
class _Failure:
    """Layers whose selection ignores the content. `where`: these layers, and when if not in the last reading."""

    name: str
    where: str
    is_warning: bool

    def make_verdict(self, value: float, limit: float, text: str) -> Verdict:
        verdict = Verdict(self.name, False, value, limit, text)
        return verdict.to_warning() if self.is_warning else verdict


def _judge(history: History, name: str, violates: np.ndarray, limits: Limits) -> _Failure | None:
    """Judge in which readings and layers, bool [readings, layers], the selection ignores the content.

    Counted are layers in the last reading, and layers in most readings. It is a warning if answers need the selection and
    some layer is unaffected, or if fewer than half of the layers are affected in the last reading only.
    """
    is_lasting = violates.mean(axis=0) > limits.selection_share
    affected = violates[-1] | is_lasting
    if not affected.any():
        return None
    share = violates[:, affected].mean(axis=0).max()
    when = "" if violates[-1].any() else f", in {share:.0%} of the readings"
    finds = check_selection_finds(history, limits)
    if is_lasting.all():
        is_warning = False
    elif finds is not None and finds.ok:
        is_warning = True
    else:
        is_warning = not is_lasting.any() and affected.mean() < 0.5
    return _Failure(name, format_layers(affected) + when, is_warning)


@dataclass(frozen=True)
class _Readings:
    """Readings of a selection statistic [readings, layers], and the bounds of `SelectionRange` at each reading."""

    values: np.ndarray
    chance_reuse: np.ndarray
    nearest: np.ndarray
    farthest: np.ndarray


def _get_readings(history: History, name: str, limits: Limits) -> _Readings | str:
    """Return the readings of stages in which queries have more candidates than they select; a reason if there are none.

    Readings before `selection_steps` are left out, if there are later ones.
    """
    plan, nsa = history.config.train.plan, history.config.nsa
    ranges = [compute_selection_range(stage.seq_len, nsa) for stage in plan]
    length = history.config.train.stage_at(history.last_step).seq_len
    if not compute_selection_range(length, nsa).has_selection:
        return (
            f"not applicable: {length:,} tokens have {-(-length // nsa.l_sel):,} blocks, "
            f"and all of them are selected (nsa.n_sel = {nsa.n_sel})"
        )
    steps, values = history.layer_series(name)
    stages = find_stages(steps, history.config.train)
    is_used = np.array([ranges[stage].has_selection for stage in stages], dtype=bool)
    is_late = is_used & (steps >= limits.selection_steps)
    is_used = is_late if is_late.any() else is_used
    if not is_used.any():
        return "no selection statistics were recorded"
    used = [ranges[stage] for stage in stages[is_used]]
    chance, nearest, farthest = (
        np.array([getattr(own, field) for own in used]) for field in ("chance_reuse", "nearest", "farthest")
    )
    return _Readings(values[is_used], chance, nearest, farthest)


def _format_range(values: np.ndarray) -> str:
    return f"{values.min():.0%} to {values.max():.0%}"
