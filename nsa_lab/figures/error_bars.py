"""A picture of errors beside the ones that are allowed."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nsa_lab.figures.style import CMP, FORCED, SEL, WIN, make_panel


def plot_allowed_errors(rows: list[tuple[str, str, float]], title: str) -> Figure:
    """Errors in units of what is allowed, log scale, for (what, backend, share) rows: a bar past the line at 1 is too long.

    A share of 0 is written "exact", one that is infinite or no number runs off the picture.
    """
    whats = list(dict.fromkeys(what for what, _, _ in rows))
    backends = list(dict.fromkeys(backend for _, backend, _ in rows))
    figure, axes = make_panel(9, 1.6 + 0.27 * len(whats) * max(len(backends), 1), title)
    seen = [share for _, _, share in rows if 0 < share < np.inf]
    left, right = min([1e-2, *seen]) / 2, 5 * max([1.0, *seen])
    height = 0.8 / max(len(backends), 1)
    colours = dict(zip(backends, (CMP, SEL, WIN, FORCED), strict=False))
    for n, backend in enumerate(backends):
        for what, name, share in rows:
            if name == backend:
                at = whats.index(what) + (n - (len(backends) - 1) / 2) * height
                length = share if share < right else right
                axes.barh(at, max(length, left), height=height * 0.9, color=colours[backend])
                named = "exact" if share == 0 else f"{share:.2g}" if share <= 1 else f"{share:.3g}: TOO LARGE"
                inside = length == right
                axes.annotate(
                    named,
                    (max(length, left), at),
                    xytext=(-4 if inside else 4, 0),
                    textcoords="offset points",
                    va="center",
                    ha="right" if inside else "left",
                    fontsize=8,
                )
    axes.axvline(1, color="black", linestyle=":")
    axes.set(
        xscale="log",
        xlim=(left, right),
        yticks=range(len(whats)),
        xlabel="error / allowed error (log scale; right of the dotted line is too large)",
    )
    axes.set_yticklabels(whats, fontsize=8)
    axes.invert_yaxis()
    handles: list[Artist] = [Patch(color=colour, label=backend) for backend, colour in colours.items()]
    handles.append(Line2D([], [], color="black", linestyle=":", label="1: all that is allowed"))
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
