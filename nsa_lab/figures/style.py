"""The common style of all figures: colours, panels with a title, legends, and PNG export with the title as alt text."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import ScalarFormatter, StrMethodFormatter
from PIL import Image

# Colour-blind-safe palette (Okabe and Ito). Each branch has the same colour in every figure.
CMP, SEL, WIN, DENSE, FORCED, PALE = "#0072B2", "#E69F00", "#009E73", "#666666", "#D55E00", "#DDDDDD"
BRANCH_COLOURS = {"cmp": CMP, "sel": SEL, "win": WIN, "dense": DENSE}

DPI = 110
PALETTE_SIZE = 256


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG with a colour palette. Axis labels of 1,000 and above get thousands separators."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        # Keep labels that the figure sets itself, and powers of ten.
        if type(axis.get_major_formatter()) is ScalarFormatter and max(map(abs, axis.get_view_interval())) >= 1000:
            axis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", facecolor="white")
    return reduce_colours(buffer.getvalue())


def reduce_colours(png: bytes) -> bytes:
    """Store a PNG with at most `PALETTE_SIZE` colours, which takes a quarter of the bytes."""
    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    # The default method merges colours of few pixels: a thin curve then gets the colour of another one.
    palette_image = image.quantize(PALETTE_SIZE, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette_image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def get_title(figure: Figure) -> str:
    """Return the title of the figure, or the titles of its axes if it has none."""
    title = figure.get_suptitle() or "; ".join(filter(None, (axes.get_title() for axes in figure.axes)))
    return " ".join(title.split())


def make_panel(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Return a figure with one panel; `width` and `height` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    return figure, axes


def stack_panels(figure: Figure, n_panels: int, columns: int = 1) -> list[Axes]:
    """Return panels with a common y range, one below the other, or in a grid of `columns`.

    A narrow figure stays readable on a phone. Unused places at the end of a grid stay empty.
    """
    grid = figure.subplots(-(-n_panels // columns), columns, sharey=True, squeeze=False).flatten()
    for axes in grid[n_panels:]:
        axes.set_axis_off()
    for axes in grid[:n_panels]:
        axes.tick_params(labelleft=True)
    return list(grid[:n_panels])


def add_legend(axes: Axes, columns: int = 1) -> None:
    """Add a legend if the axes have labels."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, ncols=columns)


def add_legend_below(axes: Axes, columns: int = 3) -> None:
    """Add a legend below the panel, for panels without free space inside."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def annotate_empty(axes: Axes, reason: str = "not recorded") -> None:
    """Write into an empty panel why it is empty."""
    axes.annotate(reason, (0.5, 0.5), xycoords="axes fraction", ha="center", color=DENSE)


def add_colour_legend(axes: Axes, colours: dict[str, str], inside: bool = False, columns: int = 1) -> None:
    """Add a legend of colours: below the panel, or inside it in `columns` columns."""
    handles = [Patch(facecolor=colour, edgecolor="#999999", label=label) for label, colour in colours.items()]
    if inside:
        axes.legend(handles=handles, fontsize=7, loc="upper left", framealpha=0.9, ncols=columns)
    else:
        axes.legend(handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
