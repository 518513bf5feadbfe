"""Display figures and long texts in a notebook, and detect whether a front end is open."""

from __future__ import annotations

import html
import os

from IPython.display import Image, display
from matplotlib.figure import Figure

from nsa_lab.figures.style import get_title, render_png


def show_figure(figure: Figure, alt: str | None = None) -> None:
    """Display the figure as an image. `alt` (default: its title) is its text for readers who cannot see it."""
    display(make_image(figure, alt))


def make_image(figure: Figure, alt: str | None = None) -> Image:
    """Return the figure as a displayable image with alt text."""
    return Image(data=render_png(figure), format="png", alt=alt or get_title(figure))


def show_folded(summary: str, text: str, *, is_open: bool = False) -> None:
    """Display `text` folded under its `summary`, for a wide table or for an answer to guess first.

    Lines are not wrapped; the box scrolls sideways. A terminal, which cannot fold, prints the text.
    """
    # Styled in the element itself, because other viewers of notebooks wrap the output of a cell.
    lines = f'<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">{html.escape(text)}</pre>'
    markup = f"<details{' open' if is_open else ''}><summary>{html.escape(summary)}</summary>{lines}</details>"
    display({"text/html": markup, "text/plain": f"{summary}\n{text}"}, raw=True)


def has_front_end() -> bool:
    """Return whether a Jupyter server started this kernel for a notebook that is open in a front end.

    Jupyter servers set JPY_SESSION_NAME to the notebook. Papermill, nbconvert and nbval start kernels without it.
    """
    return "JPY_SESSION_NAME" in os.environ
