"""A picture of the time that attention takes per token, over the length of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN

WHOLE = "whole"
# What is drawn, of all that the benchmark measures.
ATTENTION_COLOURS = {
    WHOLE: "black",
    "dense": DENSE,
    "compressed": CMP,
    "choice": FORCED,
    "selected, real": SEL,
    "window": WIN,
}


def plot_attention_time(curves: Mapping[tuple[str, str], Sequence[tuple[int, float]]], caption: str) -> Figure:
    """Forward and backward of each contender, log-log; `about`: where and when it was measured.

    `curves` holds, for each part of `COLOURS` and what computed it, the lengths in tokens with the nanoseconds per token.
    """
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Attention of one layer, forward and backward: {caption}", fontsize=10)
    for number, ((part, by), points) in enumerate(curves.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o^sv"[number % 4],
            markersize=4,
            color=ATTENTION_COLOURS[part],
            linewidth=2.2 if part == WHOLE else 1,
            linestyle="--" if part == "dense" else "-",
            label=f"{part}: {by}",
        )
    axes.set(xscale="log", yscale="log", xlabel="sequence length T, tokens", ylabel="nanoseconds per token")
    lengths = sorted({length for points in curves.values() for length, _ in points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, which="both", linewidth=0.5, color=DENSE)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
