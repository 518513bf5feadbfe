"""Pictures of the tiny recall task: what was learned by when, and what an intervention leaves of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN, add_legend, add_legend_below, make_panel

MODEL_COLOURS = (DENSE, SEL, CMP, WIN, FORCED)


def plot_recall_accuracy(curves: Mapping[str, Sequence[tuple[int, float]]], chance: float) -> Figure:
    """Share of answers that are right by step; one line per model, `chance` dotted."""
    figure, axes = make_panel(7, 3.6, "Tiny recall: answers right, by step")
    for place, (name, points) in enumerate(curves.items()):
        steps, shares = zip(*points, strict=True) if points else ((), ())
        width = 1.2 + 0.8 * (len(curves) - 1 - place)  # a curve under another is wider, and so is seen
        axes.plot(
            steps, shares, "o-", markersize=3, color=MODEL_COLOURS[place % len(MODEL_COLOURS)], linewidth=width, label=name
        )
    axes.axhline(chance, color="#999999", linestyle=":", linewidth=1, label="guessing")
    axes.set(xlabel="step", ylabel="answers right", ylim=(-0.02, 1.02))
    add_legend(axes)
    return figure


def plot_ablation_accuracy(accuracies: Mapping[str, Mapping[str, float]], model_names: Sequence[str]) -> Figure:
    """Share of answers that are right under each intervention, models beside each other; name -> intervention -> share.

    `every` names all models in the order of their curves, so that each keeps its colour. Raises ValueError for one that is
    not among them.
    """
    figure, axes = make_panel(8, 3.6, "Tiny recall: answers right when the choice is replaced, or a branch silenced")
    names = list(dict.fromkeys(name for shares in accuracies.values() for name in shares))
    width = 0.8 / max(len(accuracies), 1)
    for place, (model, shares) in enumerate(accuracies.items()):
        colour = MODEL_COLOURS[list(model_names).index(model) % len(MODEL_COLOURS)]
        at = np.arange(len(names)) + (place - (len(accuracies) - 1) / 2) * width
        axes.bar(at, [shares[name] for name in names], width, color=colour, label=model)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(ylabel="answers right", ylim=(0, 1.02))
    add_legend_below(axes)
    return figure
