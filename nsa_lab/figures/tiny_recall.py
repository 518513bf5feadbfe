"""Pictures of the tiny recall task: what was learned by when, and what an intervention leaves of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN, legend, legend_below, panel

COLOURS = (DENSE, SEL, CMP, WIN, FORCED)


def accuracy_curves(curves: Mapping[str, Sequence[tuple[int, float]]], chance: float) -> Figure:
    """Share of answers that are right by step; one line per model, `chance` dotted."""
    figure, axes = panel(7, 3.6, "Tiny recall: answers right, by step")
    for place, (name, points) in enumerate(curves.items()):
        steps, shares = zip(*points, strict=True) if points else ((), ())
        width = 1.2 + 0.8 * (len(curves) - 1 - place)  # a curve under another is wider, and so is seen
        axes.plot(steps, shares, "o-", markersize=3, color=COLOURS[place % len(COLOURS)], linewidth=width, label=name)
    axes.axhline(chance, color="#999999", linestyle=":", linewidth=1, label="guessing")
    axes.set(xlabel="step", ylabel="answers right", ylim=(-0.02, 1.02))
    legend(axes)
    return figure


def intervention_bars(accuracies: Mapping[str, Mapping[str, float]], every: Sequence[str]) -> Figure:
    """Share of answers that are right under each intervention, models beside each other; name -> intervention -> share.

    `every` names all models in the order of their curves, so that each keeps its colour. Raises ValueError for one that is
    not among them.
    """
    figure, axes = panel(8, 3.6, "Tiny recall: answers right when the choice is replaced, or a branch silenced")
    names = list(dict.fromkeys(name for shares in accuracies.values() for name in shares))
    width = 0.8 / max(len(accuracies), 1)
    for place, (model, shares) in enumerate(accuracies.items()):
        colour = COLOURS[list(every).index(model) % len(COLOURS)]
        at = np.arange(len(names)) + (place - (len(accuracies) - 1) / 2) * width
        axes.bar(at, [shares[name] for name in names], width, color=colour, label=model)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(ylabel="answers right", ylim=(0, 1.02))
    legend_below(axes)
    return figure
