"""Relations between the comparisons of a conversion run with dense attention (`conversion` events)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nsa_lab.health.ablation_relations import has_choice
from nsa_lab.health.verdict import LIMITS, Problem
from nsa_lab.runs.event_fields import is_finite
from nsa_lab.runs.history import History

MIN_LAYERS = 3


def _check_losses(history: History) -> Problem | None:
    """Selected blocks lack tokens, so they gain little. No model is much worse than equal probabilities."""
    highest = LIMITS.conversion_highest * math.log(history.config.model.vocab_size)
    evaluations = history.events_of_kind("eval")
    evaluated = dict(zip(evaluations.ints("step").tolist(), evaluations.numbers("loss").tolist(), strict=True))
    for event in history.events_of_kind("conversion"):
        losses = event.get("loss")
        losses = {name: loss for name, loss in losses.items() if is_finite(loss)} if isinstance(losses, dict) else {}
        steps = np.array([event["step"]])
        for name, loss in losses.items():
            if loss > highest:
                return Problem(steps, f"a loss of {loss:.4g} nats per token with {name} attention, highest: {highest:.4g},")
            if name != "dense" and loss < (1 - LIMITS.conversion_gain) * losses.get("dense", 0.0):
                text = (
                    f"{name} blocks have a loss of {loss:.4g}, dense attention {losses['dense']:.4g} with the same weights"
                )
                return Problem(steps, text)
        own, text_loss = losses.get("selected", losses.get("dense", math.nan)), evaluated.get(event["step"], math.nan)
        # Both are losses of the same weights, on few and on more windows.
        if abs(math.log(max(own, 1e-9)) - math.log(max(text_loss, 1e-9))) > LIMITS.conversion_texts:
            return Problem(steps, f"a loss of {own:.4g} in the comparison and {text_loss:.4g} in the evaluation")
    return None


def _check_frozen(history: History) -> Problem | None:
    """If only the indexer is trained, dense attention has the same loss in all comparisons with sequences of one length."""
    if history.config.train.trainable != "indexer":
        return None
    first: dict[int, float] = {}
    for event in history.events_of_kind("conversion"):
        losses = event.get("loss")
        loss = losses.get("dense") if isinstance(losses, dict) else None
        if loss is None or not is_finite(loss):
            continue
        before = first.setdefault(event["length"], loss)
        if abs(loss - before) > LIMITS.frozen_loss * before:
            text = f"the loss of dense attention changes from {before:.4f} to {loss:.4f}, but only the indexer is trained,"
            return Problem(np.array([event["step"]]), text)
    return None


def _check_differ(history: History) -> Problem | None:
    """Other blocks, other weights and other layers give other numbers, to the last bit."""
    if not has_choice(history):
        return None
    previous = None
    for event in history.current_events("conversion"):
        losses, steps = event.get("loss"), np.array([event["step"]])
        if not isinstance(losses, dict):
            continue
        for name in ("selected", "nearest"):
            if is_finite(losses.get(name)) and losses[name] == losses.get("dense"):
                return Problem(steps, f"{name} blocks and dense attention have the same loss")
        for name in ("attention_mass", "attention_mass_nearest"):
            values = event.get(name) or [1.0]
            if len(values) >= MIN_LAYERS and values[0] != 1 and len(set(values)) == 1:
                return Problem(steps, f"{name} is the same in all layers")
        own = losses.get("selected"), event.get("attention_mass")
        if own == previous and None not in own:
            return Problem(steps, "loss and attention mass of selected blocks are those of the comparison before")
        previous = own
    return None


def _check_layers(history: History) -> Problem | None:
    """A comparison measures the attention mass of all layers."""
    n_layers = history.config.model.n_layers
    for event in history.events_of_kind("conversion"):
        for name in ("attention_mass", "attention_mass_nearest"):
            values = event.get(name)
            if isinstance(values, list) and len(values) != n_layers:
                return Problem(np.array([event["step"]]), f"{name} has {len(values)} layers, the model {n_layers},")
    return None


RELATIONS: tuple[Callable[[History], Problem | None], ...] = (
    _check_layers,
    _check_losses,
    _check_frozen,
    _check_differ,
)
