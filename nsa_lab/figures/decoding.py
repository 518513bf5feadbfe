"""A picture of what one more token takes, over how much stands before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from nsa_lab.figures.style import DENSE

DECODE_COLOURS = {"nsa": "black", "dense": DENSE}


def plot_decode_speed(curves: Mapping[str, Sequence[tuple[int, float]]], quantity: str, caption: str) -> Figure:
    """`curves`: of `nsa` and `dense`, tokens before the new one with a quantity, which `what` names with its unit."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{quantity}, against the tokens before: {caption}", fontsize=10)
    for kind, points in curves.items():
        style = "--" if kind == "dense" else "-"
        axes.plot(*zip(*sorted(points), strict=True), marker="o", linestyle=style, color=DECODE_COLOURS[kind], label=kind)
    lengths = sorted({length for points in curves.values() for length, _ in points})
    axes.set(xscale="log", xlabel="tokens before", ylabel=quantity)
    axes.set_ylim(bottom=0)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, linewidth=0.5, color=DENSE)
    axes.legend(frameon=False)
    return figure
