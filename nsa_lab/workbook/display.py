"""Putting a figure or a long text into a notebook, and whether there is a person at a front end to show it to."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from IPython.display import Image, display
from matplotlib.figure import Figure

from nsa_lab.figures.panels import Box, panel_boxes
from nsa_lab.figures.style import get_title, render_png


def show_figure(figure: Figure, alt: str | None = None) -> None:
    """Display the figure once, as an image that carries `alt` (default: its title) for readers who cannot see it."""
    display(make_image(figure, alt, panel_boxes(figure)))


def make_image(figure: Figure, alt: str | None = None, panels: Sequence[Box] = ()) -> Image:
    """The figure as a displayable image with alt text; `panels` tell a page where it may cut it."""
    return Image(data=render_png(figure), format="png", alt=alt or get_title(figure), metadata={"panels": list(panels)})


def show_folded(summary: str, text: str, *, is_open: bool = False) -> None:
    """Display `text` behind its `summary`, closed or `opened`: a wide table, or an answer to think of first.

    Its lines stay whole, in a box that scrolls sideways. Where nothing can be unfolded (a terminal) it is printed as it is.
    """
    # Said in the element itself: pages of elsewhere break the lines of what a cell has given out.
    lines = f'<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">{html.escape(text)}</pre>'
    markup = f"<details{' open' if is_open else ''}><summary>{html.escape(summary)}</summary>{lines}</details>"
    display({"text/html": markup, "text/plain": f"{summary}\n{text}"}, raw=True)


def has_front_end() -> bool:
    """Whether a Jupyter server started this kernel for a notebook that somebody has open.

    Jupyter servers name the notebook in JPY_SESSION_NAME; papermill, nbconvert and nbval start their kernels without it.
    """
    return "JPY_SESSION_NAME" in os.environ
