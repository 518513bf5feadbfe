"""Checks of a conversion: the indexer learns, its blocks have the attention mass, the loss is close to dense attention's.

The comparison is the event `conversion`, with dense attention, selected blocks and the nearest blocks on the same weights.
`check_teacher` is about all runs that learn from a teacher, also dense ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nsa_lab.health.loss_checks import drop_nonfinite, estimate_scatter
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import History, find_stages

MIN_READINGS = 5


def check_indexer_learns(history: History, limits: Limits) -> Verdict:
    """Check that the selection loss fell: means of the first and of the last fifth of the readings of a stage.

    The changes of all stages are multiplied, because texts of another length have another selection loss. If the indexer
    was trained before the run, its loss may rise by a limited amount instead.
    """
    name, limit = "indexer learns", limits.selection_loss_fall * min(1.0, history.last_step / 100)
    if _is_indexer_loaded(history):
        limit = -limits.selection_loss_rise
    steps, values = drop_nonfinite(*history.series("selection_loss"))
    stages = find_stages(steps, history.config.train)
    series = [own for stage in np.unique(stages) if len(own := values[stages == stage]) >= MIN_READINGS]
    if not series:
        return Verdict(name, None, None, limit, "too few readings of the selection loss")
    counts = [-(-len(own) // 5) for own in series]
    firsts = [float(own[:count].mean()) for own, count in zip(series, counts, strict=True)]
    lasts = [float(own[-count:].mean()) for own, count in zip(series, counts, strict=True)]
    if not all(firsts):
        return Verdict(name, False, 0.0, limit, "the selection loss is 0 from the start")
    fall = 1 - math.prod(last / first for first, last in zip(firsts, lasts, strict=True))
    chance = limits.selection_loss_errors * math.hypot(
        *(estimate_scatter(own) * (2 / n) ** 0.5 / first for own, n, first in zip(series, counts, firsts, strict=True))
    )
    change = f"{abs(fall):.1%} {'lower' if fall >= 0 else 'higher'}"
    requirement = f"required: {limit:.1%} lower" if limit > 0 else f"limit: {-limit:.0%} higher"
    pairs = ", ".join(f"from {first:.4g} to {last:.4g}" for first, last in zip(firsts, lasts, strict=True))
    text = f"selection loss {pairs}{' by stage' if len(series) > 1 else ''}, {change} ({requirement})"
    if fall < limit and abs(fall) < chance:
        return Verdict(name, None, fall, limit, f"{text}; readings differ by up to {chance:.1%} by chance")
    return Verdict(name, bool(fall >= limit), fall, limit, text)


def check_attention_mass(history: History, limits: Limits) -> Verdict:
    """Check that the selected blocks have most of the dense attention mass, and more than the nearest blocks."""
    name, limit = "attention mass", limits.attention_mass
    last = _get_last_comparison(history)
    if isinstance(last, str):
        return Verdict(name, None, None, limit, last)
    mass, nearest = (_average(last.get(key)) for key in ("attention_mass", "attention_mass_nearest"))
    if math.isnan(mass) or math.isnan(nearest):
        return Verdict(name, False, None, limit, "a share of the attention mass is missing or not finite")
    layers = last["attention_mass"]
    text = (
        f"selected blocks have {mass:.1%} of the mass of the best blocks, mean over layers (lowest: layer "
        f"{int(np.argmin(layers))} with {min(layers):.1%}); the nearest blocks {nearest:.1%}"
    )
    if mass <= nearest:
        return Verdict(name, False, mass, nearest, f"{text}: the indexer is no better")
    below = [other - own for own, other in zip(layers, last["attention_mass_nearest"], strict=False)]
    if (worst := max(below)) > limits.attention_mass_layer:
        layer = below.index(worst)
        text = f"{text}; in layer {layer} selected blocks have {layers[layer]:.1%}, {worst:.1%} below the nearest ones"
        return Verdict(name, False, layers[layer], last["attention_mass_nearest"][layer], text)
    return Verdict(name, mass >= limit, mass, limit, f"{text} (required: {limit:.0%})").to_warning()


def check_converted_loss(history: History, limits: Limits) -> Verdict:
    """Check that selected blocks have nearly the loss of dense attention, and a lower one than the nearest blocks."""
    name, limit = "converted loss", limits.conversion_gap
    last = _get_last_comparison(history)
    if isinstance(last, str):
        return Verdict(name, None, None, limit, last)
    dense, selected, nearest = (_to_number(last["loss"].get(key)) for key in ("dense", "selected", "nearest"))
    if any(map(math.isnan, (dense, selected, nearest))):
        return Verdict(name, False, None, limit, "a loss is missing or not finite")
    gap = selected - dense
    text = (
        f"selected blocks {gap:+.4f} nats per token from dense attention's {dense:.4f}, the nearest blocks "
        f"{nearest - dense:+.4f}, at {last['length']:,} tokens"
    )
    if gap <= limit:
        return Verdict(name, True, gap, limit, f"{text} (limit: {limit:+.3f})")
    if selected >= nearest:
        return Verdict(name, False, gap, limit, f"{text}: the indexer is no better than the nearest blocks")
    return Verdict(name, False, gap, limit, f"{text} (limit: {limit:+.3f})").to_warning()


def check_teacher(history: History, limits: Limits) -> Verdict | None:
    """Check that the predictions stay close to the teacher's: mean divergence of the last fifth of the readings.

    None for a run without a teacher.
    """
    name, limit = "teacher", limits.teacher_kl
    if not history.config.train.teacher_weight:
        return None
    _, values = drop_nonfinite(*history.series("teacher_kl"))
    if len(values) < MIN_READINGS:
        is_missing = len(history.steps) >= 2 * MIN_READINGS
        text = f"{len(values)} readings of the divergence from the teacher at {len(history.steps):,} logged steps"
        return Verdict(name, False if is_missing else None, None, limit, text)
    if not values.any():
        return Verdict(name, False, 0.0, limit, f"the divergence from the teacher is 0 in {len(values)} readings")
    count = -(-len(values) // 5)
    first, last = float(values[:count].mean()), float(values[-count:].mean())
    text = f"KL divergence from the teacher's predictions {last:.4f} nats per token, {first:.4f} at the beginning"
    verdict = Verdict(name, last <= limit, last, limit, f"{text} (limit: {limit:g})")
    return verdict if last > limits.teacher_kl_failed else verdict.to_warning()


def _is_indexer_loaded(history: History) -> bool:
    """Return True if the run started with the trained indexer of its source."""
    recorded = [event["indexer"] for event in history.first_events if "indexer" in event]
    if not recorded:  # older runs: those that train all weights may have started with a trained one
        return history.config.train.trainable == "all"
    return recorded[-1] == "loaded"


def _get_last_comparison(history: History) -> dict[str, Any] | str:
    """Return the last complete event `conversion`, or why there is none."""
    events = history.current_events("conversion")
    complete = [event for event in events if isinstance(event.get("loss"), dict)]
    if complete:
        return complete[-1]
    return f"not judged: {events[-1].get('why_not')}" if events else "no comparison with dense attention was recorded"


def _average(values: Any) -> float:
    """Return the mean of a list of numbers; NaN if one is missing."""
    if not isinstance(values, list) or not values:
        return math.nan
    return float(np.mean([_to_number(value) for value in values]))


def _to_number(value: Any) -> float:
    return math.nan if value is None else float(value)
