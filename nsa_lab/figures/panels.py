"""Where the panels of a figure lie in its PNG, so that a page can cut it and let them stand below each other."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave

Box = tuple[float, float, float, float]


def panel_boxes(figure: Figure) -> list[Box]:
    """Of each panel of a figure with several columns: left, top, right, bottom in its `png`, as shares of width and height.

    Empty for a figure of one column, which is narrow enough, and for one with a legend that belongs to all its panels.
    """
    panels = [axes for axes in figure.axes if axes.get_subplotspec() is not None]
    if figure.legends or _places(panels, "colspan") < 2:
        return []
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    whole, pad = figure.get_tightbbox(renderer), rcParams["savefig.pad_inches"]
    left, bottom = whole.x0 - pad, whole.y0 - pad
    width, height = whole.width + 2 * pad, whole.height + 2 * pad
    found = [_extent(axes, figure, renderer) for axes in panels]
    return [
        (
            float((x0 - left) / width),
            float(1 - (y1 - bottom) / height),
            float((x1 - left) / width),
            float(1 - (y0 - bottom) / height),
        )
        for x0, y0, x1, y1 in found
    ]


def cut(picture: bytes, boxes: Sequence[Sequence[float]]) -> list[bytes]:
    """The pieces of a PNG, each a PNG."""
    pixels = imread(io.BytesIO(picture), format="png")
    height, width = pixels.shape[:2]
    pieces = []
    for left, top, right, bottom in boxes:
        rows = slice(max(round(top * height), 0), round(bottom * height))
        columns = slice(max(round(left * width), 0), round(right * width))
        buffer = io.BytesIO()
        imsave(buffer, pixels[rows, columns], format="png")
        pieces.append(buffer.getvalue())
    return pieces


def _places(panels: Sequence[Axes], span: str) -> int:
    return len({getattr(axes.get_subplotspec(), span).start for axes in panels})


def _extent(axes: Axes, figure: Figure, renderer: RendererBase) -> tuple[float, float, float, float]:
    """Of a panel with its labels, legend and colour bar: left, bottom, right, top, inches, with a little air."""
    # A colour bar is an axes of its own, and knows whose it is.
    own = [axes, *(bar for bar in figure.axes if axes in getattr(bar, "_colorbar_info", {}).get("parents", ()))]
    boxes = [part.get_tightbbox(renderer) for part in own]
    air = 0.04
    return (
        min(box.x0 for box in boxes if box) / figure.dpi - air,
        min(box.y0 for box in boxes if box) / figure.dpi - air,
        max(box.x1 for box in boxes if box) / figure.dpi + air,
        max(box.y1 for box in boxes if box) / figure.dpi + air,
    )
