"""Speeds of NSA's parts beside dense attention, from the benchmark itself, and the length from which NSA is faster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from nsa_lab.bench.attention import Row, Shape, run_attention_bench
from nsa_lab.figures.speeds import COLOURS, WHOLE, time_by_length
from nsa_lab.workbook.show import show

TABLE_WIDTH = 150  # characters
# One length a step, 16 384 tokens each up to there: where the crossover lies shows between them.
SHAPES = (Shape(1024, 16), Shape(2048, 8), Shape(4096, 4), Shape(8192, 2), Shape(16384, 1), Shape(32768, 1))


def show_speeds(shapes: Sequence[Shape] = SHAPES) -> list[Row]:
    """Run the benchmark, print its table, and show time per token over length."""
    rows = run_attention_bench(tuple(shapes), console=Console(width=TABLE_WIDTH, force_jupyter=False))
    show(time_by_length(curves_of(rows, shapes)))
    print(crossover(rows, shapes))
    return rows


def curves_of(rows: Sequence[Row], shapes: Sequence[Shape]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """For each part that is drawn and what computed it: lengths in tokens with nanoseconds per token, both passes."""
    per_ns = {str(shape): (shape.T, 1e6 / (shape.T * shape.B)) for shape in shapes}
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.total_ms is not None and row.part in COLOURS:
            length, scale = per_ns[row.shape]
            curves.setdefault((row.part, row.by), []).append((length, row.total_ms * scale))
    return curves


def crossover(rows: Sequence[Row], shapes: Sequence[Shape]) -> str:
    """From which of the measured lengths the whole of NSA takes less than SDPA flash at the same shape."""
    share = {row.shape: row.share for row in rows if row.part == WHOLE and row.share is not None}
    lines = [f"T = {shape.T}: {share[str(shape)]:.3f} of dense" for shape in shapes if str(shape) in share]
    faster = [shape.T for shape in shapes if share.get(str(shape), 1.0) < 1.0]
    if not share:
        return "no share of dense attention was measured"
    lines.append(f"NSA is the faster from T = {min(faster)}" if faster else "dense attention is the faster throughout")
    return "\n".join(lines)
