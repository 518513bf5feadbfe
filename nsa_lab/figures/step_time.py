"""A picture of where a training step's time goes, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, WIN

STEP_COLOURS = {
    "gemm": WIN,
    "compressed": CMP,
    "window": "#332288",
    "compressed and window": CMP,  # in records older than the kernels' names, which tell the two apart
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


def plot_step_time(panels: Sequence[tuple[str, PartTimes]], caption: str) -> Figure:
    """Bars of nanoseconds per token, stacked by the parts of `COLOURS`.

    A panel is its title and its bars: for the name under each bar, the nanoseconds per token of its parts.
    """
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    figure.suptitle(caption, fontsize=11)
    for panel, (title, bars) in zip(axes, panels, strict=True):
        for place, parts in enumerate(bars.values()):
            bottom = 0.0
            for part in STEP_COLOURS:
                if part in parts:
                    panel.bar(
                        place,
                        parts[part],
                        bottom=bottom,
                        color=STEP_COLOURS[part],
                        edgecolor="black",
                        linewidth=0.4,
                        label=part,
                    )
                    bottom += parts[part]
            panel.annotate(f"{bottom:,.0f}", (place, bottom), ha="center", va="bottom", fontsize=8)
        panel.set_title(title, fontsize=9)
        panel.set_xticks(range(len(bars)), bars, fontsize=8)
    axes[0].set_ylabel("nanoseconds per token")
    named = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        [named[part] for part in STEP_COLOURS if part in named],
        [part for part in STEP_COLOURS if part in named],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    return figure
