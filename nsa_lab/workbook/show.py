"""Putting a figure into a notebook: a PNG with alt text, and whether there is a person at a front end to show it to."""

from __future__ import annotations

import os
from collections.abc import Sequence

from IPython.display import Image, display
from matplotlib.figure import Figure

from nsa_lab.figures.panels import Box, panel_boxes
from nsa_lab.figures.style import png, title


def show(figure: Figure, alt: str | None = None) -> None:
    """Display the figure once, as an image that carries `alt` (default: its title) for readers who cannot see it."""
    display(image(figure, alt, panel_boxes(figure)))


def image(figure: Figure, alt: str | None = None, panels: Sequence[Box] = ()) -> Image:
    """The figure as a displayable image with alt text; `panels` tell a page where it may cut it."""
    return Image(data=png(figure), format="png", alt=alt or title(figure), metadata={"panels": list(panels)})


def has_front_end() -> bool:
    """Whether a Jupyter server started this kernel for a notebook that somebody has open.

    Jupyter servers name the notebook in JPY_SESSION_NAME; papermill, nbconvert and nbval start their kernels without it.
    """
    return "JPY_SESSION_NAME" in os.environ
