"""Plot of a converted model: loss by position of several attentions, and attention mass by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN, add_legend, annotate_empty

# Colour of each attention that is compared, in the order of the legend.
COLOURS = {"selected": SEL, "oracle": "black", "mean_key": CMP, "nearest": WIN, "window": FORCED, "dense": DENSE}
MASS_LABELS = {"chosen": "selected", "nearest": "nearest", "random": "random"}
MASS_COLOURS = {"chosen": SEL, "nearest": WIN, "random": DENSE}
# Differences up to this many nats are drawn on a linear scale, larger ones on a logarithmic one.
LINEAR_NATS = 0.01


def plot_conversion(record: dict[str, Any], text: str, blocks: int) -> Figure:
    """Plot what `blocks` blocks per query cost, by position, and their share of the attention mass, by layer.

    `record`: contents of conversion.json. Losses are differences from the control of the evaluation, or from dense
    attention with the same weights if it has none, paired by window, with 95% intervals over windows. The attention mass is
    a fraction of the mass in the oracle's blocks. Raises ValueError if the record has no such text or number of blocks.
    """
    results = record["texts"]
    rows = [row for result in results.values() for row in result["losses"] if row["attention"] == "selected"]
    known = sorted({row["blocks"] for row in rows})
    if text not in results or blocks not in known:
        raise ValueError(
            f"plot_conversion: no losses of {text} with {blocks} blocks; the record has {', '.join(results)} with "
            f"{', '.join(map(str, known))} blocks"
        )
    result = results[text]
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    figure.suptitle(f"{record['run']} at step {record['step']:,}: {text}, {blocks} blocks per query", fontsize=10)
    losses, mass = figure.subplots(2, 1)
    _plot_differences(losses, result, blocks)
    fractions = next((row["fractions"] for row in result["mass"] if row["blocks"] == blocks), {})
    _plot_mass(mass, fractions)
    return figure


def _plot_differences(axes: Axes, result: dict[str, Any], blocks: int) -> None:
    rows = {row["attention"]: np.array(row["windows"]) for row in result["losses"] if row["blocks"] in (blocks, None)}
    rows |= {row["attention"]: np.array(row["windows"]) for row in result["losses"] if row["attention"] == "window"}
    reference = "control" if "control" in rows else "dense"
    shown = [name for name in COLOURS if name in rows and name != reference]
    ranges = result["ranges"]
    axes.axhline(0, color="black", linewidth=0.8)
    for number, name in enumerate(shown):
        difference = rows[name] - rows[reference]
        mean, n = difference.mean(axis=0), len(difference)
        half = 1.96 * difference.std(axis=0, ddof=1) / n**0.5 if n > 1 else np.zeros(len(mean))
        x = np.arange(len(ranges)) + (number - (len(shown) - 1) / 2) * 0.1
        axes.errorbar(x, mean, half, fmt="o", ms=4, lw=1, capsize=2, color=COLOURS[name], label=name)
    axes.set_yscale("symlog", linthresh=LINEAR_NATS)
    axes.set_xticks(range(len(ranges)), [f"{first:,}–{last - 1:,}" for first, last in ranges], fontsize=7, rotation=12)
    axes.set(xlabel="position, tokens", ylabel=f"nats per token, minus {reference}")
    add_legend(axes, columns=3)


def _plot_mass(axes: Axes, fractions: dict[str, list[float]]) -> None:
    if not fractions:
        annotate_empty(axes, "all blocks are selected")
        return
    for name, label in MASS_LABELS.items():
        axes.plot(fractions[name], "o-", ms=3, lw=1, color=MASS_COLOURS[name], label=label)
    axes.set(xlabel="layer", ylabel="attention mass / oracle's", ylim=(0, 1.03))
    axes.locator_params(axis="x", integer=True)
    add_legend(axes, columns=3)
