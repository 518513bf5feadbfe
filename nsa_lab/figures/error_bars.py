"""Plot errors relative to their limits."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nsa_lab.figures.style import CMP, FORCED, SEL, WIN, make_panel


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
