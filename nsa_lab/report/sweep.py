"""The picture of a sweep, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsa_lab.figures.style import render_png
from nsa_lab.figures.sweep import plot_sweep
from nsa_lab.health.sweep_results import VariantResult
from nsa_lab.runs.atomic_io import write_bytes


def write_sweep_plot(results: Sequence[VariantResult], name: str, path: Path) -> Path | None:
    """Draw what can be compared into the file; None where no run is finished that can."""
    curves = [one.curve for one in results if one.curve]
    if not curves:
        return None
    left_out = [one.name for one in results if one.n_done and not one.curve]
    title = f"{name}: validation" + (
        f" (evaluated on another text, and not here: {', '.join(left_out)})" if left_out else ""
    )
    write_bytes(path, render_png(plot_sweep(curves, title=title)))
    return path
