"""Speeds of NSA's parts beside dense attention, from the benchmark itself, and the length from which NSA is faster."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import Console

from nsa_lab.bench.attention import Row, Shape, run_attention_bench
from nsa_lab.explore.show import CMP, DENSE, FORCED, SEL, WIN, show

WHOLE = "whole"
# What is drawn, of all that the benchmark measures.
COLOURS = {WHOLE: "black", "dense": DENSE, "compressed": CMP, "choice": FORCED, "selected, real": SEL, "window": WIN}
TABLE_WIDTH = 150  # characters
# One length a step, 16 384 tokens each up to there: where the crossover lies shows between them.
SHAPES = (Shape(1024, 16), Shape(2048, 8), Shape(4096, 4), Shape(8192, 2), Shape(16384, 1), Shape(32768, 1))


def show_speeds(shapes: Sequence[Shape] = SHAPES) -> list[Row]:
    """Run the benchmark, print its table, and show time a token over length."""
    rows = run_attention_bench(tuple(shapes), console=Console(width=TABLE_WIDTH, force_jupyter=False))
    show(time_by_length(rows, shapes))
    print(crossover(rows, shapes))
    return rows


def time_by_length(rows: Sequence[Row], shapes: Sequence[Shape]) -> Figure:
    """Forward and backward of each contender, nanoseconds a token over the length of a sequence, log-log."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title("Attention of one layer, forward and backward", fontsize=10)
    per_ns = {str(shape): (shape.T, 1e6 / (shape.T * shape.B)) for shape in shapes}
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.total_ms is not None and row.part in COLOURS:
            length, scale = per_ns[row.shape]
            curves.setdefault((row.part, row.by), []).append((length, row.total_ms * scale))
    for number, ((part, by), points) in enumerate(curves.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o^sv"[number % 4],
            markersize=4,
            color=COLOURS[part],
            linewidth=2.2 if part == WHOLE else 1,
            linestyle="--" if part == "dense" else "-",
            label=f"{part}: {by}",
        )
    axes.set(xscale="log", yscale="log", xlabel="sequence length T, tokens", ylabel="nanoseconds a token")
    axes.grid(alpha=0.25, which="both", linewidth=0.5, color=DENSE)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def crossover(rows: Sequence[Row], shapes: Sequence[Shape]) -> str:
    """From which of the measured lengths the whole of NSA takes less than SDPA flash at the same shape."""
    share = {row.shape: row.share for row in rows if row.part == WHOLE and row.share is not None}
    lines = [f"T = {shape.T}: {share[str(shape)]:.3f} of dense" for shape in shapes if str(shape) in share]
    faster = [shape.T for shape in shapes if share.get(str(shape), 1.0) < 1.0]
    if not share:
        return "no share of dense attention was measured"
    lines.append(f"NSA is the faster from T = {min(faster)}" if faster else "dense attention is the faster throughout")
    return "\n".join(lines)
