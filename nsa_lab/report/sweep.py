"""The picture of a sweep, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsa_lab.figures.style import png
from nsa_lab.figures.sweep import sweep_curves
from nsa_lab.health.sweep import VariantResult
from nsa_lab.runs.files import write_bytes


def write_picture(found: Sequence[VariantResult], named: str, file: Path) -> Path | None:
    """Draw what can be compared into the file; None where no run is finished that can."""
    curves = [one.curve for one in found if one.curve]
    if not curves:
        return None
    left_out = [one.name for one in found if one.done and not one.curve]
    title = f"{named}: validation" + (
        f" (evaluated on another text, and not here: {', '.join(left_out)})" if left_out else ""
    )
    write_bytes(file, png(sweep_curves(curves, named=title)))
    return file
