"""The look of every picture, and what becomes of one: colours, a panel with a title, a PNG, the text that stands for it."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import ScalarFormatter, StrMethodFormatter

# Colour-blind-safe (Okabe and Ito), the same branch in the same colour in every picture.
CMP, SEL, WIN, DENSE, FORCED, PALE = "#0072B2", "#E69F00", "#009E73", "#666666", "#D55E00", "#DDDDDD"
BRANCH_COLOURS = {"cmp": CMP, "sel": SEL, "win": WIN, "dense": DENSE}

DPI = 110


def render_png(figure: Figure) -> bytes:
    """The figure as a PNG; numbers along its axes are written as those of the text, 2,048."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        # Labels that a picture sets itself, and powers of ten, stay.
        if type(axis.get_major_formatter()) is ScalarFormatter and max(map(abs, axis.get_view_interval())) >= 1000:
            axis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


def get_title(figure: Figure) -> str:
    """The figure's own title, or the titles of its axes."""
    named = figure.get_suptitle() or "; ".join(filter(None, (axes.get_title() for axes in figure.axes)))
    return " ".join(named.split())


def make_panel(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure of one panel, sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    return figure, axes


def make_panel_row(figure: Figure, n_panels: int) -> list[Axes]:
    """`count` panels in a row on one scale, each with its numbers: on a narrow page they stand below each other."""
    (panels,) = figure.subplots(1, n_panels, sharey=True, squeeze=False)
    for axes in panels:
        axes.tick_params(labelleft=True)
    return list(panels)


def add_legend(axes: Axes, columns: int = 1) -> None:
    """A legend, where anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, ncols=columns)


def add_legend_below(axes: Axes, columns: int = 3) -> None:
    """A legend of the panel's own, below it, where what is drawn leaves no room inside."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def annotate_empty(axes: Axes, reason: str = "not recorded") -> None:
    """Say in an empty panel why it is empty."""
    axes.annotate(reason, (0.5, 0.5), xycoords="axes fraction", ha="center", color=DENSE)


def add_colour_legend(axes: Axes, colours: dict[str, str], inside: bool = False, columns: int = 1) -> None:
    """A legend of what each colour means, below the panel or, in so many columns, inside it."""
    handles = [Patch(facecolor=colour, edgecolor="#999999", label=label) for label, colour in colours.items()]
    if inside:
        axes.legend(handles=handles, fontsize=7, loc="upper left", framealpha=0.9, ncols=columns)
    else:
        axes.legend(handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
