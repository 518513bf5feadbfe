"""Plots of measurements: attention time by length, decoding speed by context, a training step by part, kernel errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN, make_panel

WHOLE = "whole"
# The parts to draw, out of all parts that the benchmark measures.
ATTENTION_COLOURS = {
    WHOLE: "black",
    "dense": DENSE,
    "compressed": CMP,
    "choice": FORCED,
    "selected, real": SEL,
    "window": WIN,
}
DECODE_COLOURS = {"nsa": "black", "dense": DENSE}
STEP_COLOURS = {
    "gemm": WIN,
    "compressed": CMP,
    "window": "#332288",
    "compressed and window": CMP,  # older records do not separate the two
    "selected": SEL,
    "block choice": FORCED,
    "dense attention": "#000000",
    "gated sum": "#CC79A7",
    "elementwise": DENSE,
    "optimiser": "#56B4E9",
    "copy": "#F0E442",
    "idle": "#FFFFFF",
}

PartTimes = Mapping[str, Mapping[str, float]]


def plot_attention_time(curves: Mapping[tuple[str, str], Sequence[tuple[int, float]]], caption: str) -> Figure:
    """Plot the time of forward and backward per token against the length, log-log, one line per part and implementation.

    `curves` maps (part of `ATTENTION_COLOURS`, implementation) to (length in tokens, nanoseconds per token) pairs.
    `caption` names the device and date.
    """
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Attention of one layer, forward and backward: {caption}", fontsize=10)
    for index, ((part, implementation), points) in enumerate(curves.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o^sv"[index % 4],
            markersize=4,
            color=ATTENTION_COLOURS[part],
            linewidth=2.2 if part == WHOLE else 1,
            linestyle="--" if part == "dense" else "-",
            label=f"{part}: {implementation}",
        )
    axes.set(xscale="log", yscale="log", xlabel="sequence length T, tokens", ylabel="nanoseconds per token")
    lengths = sorted({length for points in curves.values() for length, _ in points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, which="both", linewidth=0.5, color=DENSE)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_decode_speed(curves: Mapping[str, Sequence[tuple[int, float]]], quantity: str, caption: str) -> Figure:
    """Plot `quantity` of NSA and dense attention against context length.

    `curves` maps `nsa` and `dense` to (tokens, value) pairs.
    """
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{quantity} against context length: {caption}", fontsize=10)
    for kind, points in curves.items():
        style = "--" if kind == "dense" else "-"
        axes.plot(*zip(*sorted(points), strict=True), marker="o", linestyle=style, color=DECODE_COLOURS[kind], label=kind)
    lengths = sorted({length for points in curves.values() for length, _ in points})
    axes.set(xscale="log", xlabel="context length, tokens", ylabel=quantity)
    axes.set_ylim(bottom=0)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25, linewidth=0.5, color=DENSE)
    axes.legend(frameon=False)
    return figure


def plot_step_time(panels: Sequence[tuple[str, PartTimes]], caption: str) -> Figure:
    """Plot stacked bars of nanoseconds per token, one colour per part of `STEP_COLOURS`.

    A panel is (title, bars); `bars` maps the label of a bar to the nanoseconds per token of each part.
    """
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    figure.suptitle(caption, fontsize=11)
    for panel, (title, bars) in zip(axes, panels, strict=True):
        for x, parts in enumerate(bars.values()):
            bottom = 0.0
            for part in STEP_COLOURS:
                if part in parts:
                    panel.bar(
                        x,
                        parts[part],
                        bottom=bottom,
                        color=STEP_COLOURS[part],
                        edgecolor="black",
                        linewidth=0.4,
                        label=part,
                    )
                    bottom += parts[part]
            panel.annotate(f"{bottom:,.0f}", (x, bottom), ha="center", va="bottom", fontsize=7)
        panel.set_title(title, fontsize=9)
        panel.set_xticks(range(len(bars)), bars, fontsize=8, rotation=45, ha="right", rotation_mode="anchor")
        panel.margins(y=0.08)  # space for the numbers
    axes[0].set_ylabel("nanoseconds per token")
    handles = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        [handles[part] for part in STEP_COLOURS if part in handles],
        [part for part in STEP_COLOURS if part in handles],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    return figure


def plot_allowed_errors(rows: list[tuple[str, str, float]], title: str) -> Figure:
    """Plot errors as fractions of the allowed error on a log scale; `rows` are (quantity, backend, fraction).

    A bar beyond the line at 1 is too large. A fraction of 0 is labeled "exact"; an infinite fraction or NaN extends to
    the edge.
    """
    quantities = list(dict.fromkeys(quantity for quantity, _, _ in rows))
    backends = list(dict.fromkeys(backend for _, backend, _ in rows))
    figure, axes = make_panel(9, 1.6 + 0.27 * len(quantities) * max(len(backends), 1), title)
    finite = [fraction for _, _, fraction in rows if 0 < fraction < np.inf]
    left, right = min([1e-2, *finite]) / 2, 5 * max([1.0, *finite])
    height = 0.8 / max(len(backends), 1)
    colours = dict(zip(backends, (CMP, SEL, WIN, FORCED), strict=False))
    for index, backend in enumerate(backends):
        for quantity, name, fraction in rows:
            if name == backend:
                y = quantities.index(quantity) + (index - (len(backends) - 1) / 2) * height
                length = fraction if fraction < right else right
                axes.barh(y, max(length, left), height=height * 0.9, color=colours[backend])
                label = "exact" if fraction == 0 else f"{fraction:.2g}" if fraction <= 1 else f"{fraction:.3g}: TOO LARGE"
                is_clipped = length == right
                axes.annotate(
                    label,
                    (max(length, left), y),
                    xytext=(-4 if is_clipped else 4, 0),
                    textcoords="offset points",
                    va="center",
                    ha="right" if is_clipped else "left",
                    fontsize=8,
                )
    axes.axvline(1, color="black", linestyle=":")
    axes.set(
        xscale="log",
        xlim=(left, right),
        yticks=range(len(quantities)),
        xlabel="error / allowed error (log scale; beyond the dotted line it is too large)",
    )
    axes.set_yticklabels(quantities, fontsize=8)
    axes.invert_yaxis()
    handles: list[Artist] = [Patch(color=colour, label=backend) for backend, colour in colours.items()]
    handles.append(Line2D([], [], color="black", linestyle=":", label="1: limit"))
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
