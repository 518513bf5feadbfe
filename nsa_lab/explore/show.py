"""Putting a figure into a notebook: a PNG with alt text, and whether there is a person at a front end to show it to."""

from __future__ import annotations

import io
import os

from IPython.display import Image, display
from matplotlib.figure import Figure

# Colour-blind-safe (Okabe and Ito), the same branch in the same colour in every picture.
CMP, SEL, WIN, DENSE, FORCED, PALE = "#0072B2", "#E69F00", "#009E73", "#666666", "#D55E00", "#DDDDDD"
BRANCH_COLOURS = {"cmp": CMP, "sel": SEL, "win": WIN, "dense": DENSE}

DPI = 110


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


def show(figure: Figure, alt: str | None = None) -> None:
    """Display the figure once, as an image that carries `alt` (default: its title) for readers who cannot see it."""
    display(image(figure, alt))


def image(figure: Figure, alt: str | None = None) -> Image:
    """The figure as a displayable image with alt text."""
    return Image(data=png(figure), format="png", alt=alt or title(figure))


def title(figure: Figure) -> str:
    """The figure's own title, or the titles of its axes."""
    named = figure.get_suptitle() or "; ".join(filter(None, (axes.get_title() for axes in figure.axes)))
    return " ".join(named.split())


def has_front_end() -> bool:
    """Whether a Jupyter server started this kernel for a notebook that somebody has open.

    Jupyter servers name the notebook in JPY_SESSION_NAME; papermill, nbconvert and nbval start their kernels without it.
    """
    return "JPY_SESSION_NAME" in os.environ
