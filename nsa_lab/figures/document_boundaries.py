"""Plot the attention of a query near the boundary of two packed documents, without and with a document mask."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nsa_lab.figures.query_plot import AttentionReads
from nsa_lab.figures.style import CMP, FORCED, PALE, SEL, WIN

LANE_COLOURS = {"window": WIN, "selected": SEL, "compressed": CMP}
LANES = tuple(LANE_COLOURS)
LANE_HEIGHT = 0.85


def plot_document_boundaries(unmasked: AttentionReads, masked: AttentionReads, boundaries: Sequence[int]) -> Figure:
    """Plot one query twice over a sequence of packed documents.

    `unmasked` are its reads without a document mask, at its position in the sequence. `masked` are its reads in its own
    document, at its position there. `boundaries` are the document starts, followed by the end of the sequence. Reads that
    start in another document are red.
    """
    document_start = unmasked.position - masked.position
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(
        f"Reads of query t = {unmasked.position:,}, which is token {masked.position:,} of its document", fontsize=11
    )
    unmasked_axes, masked_axes = figure.subplots(2, 1, sharex=True)
    for axes, reads, offset in ((unmasked_axes, unmasked, 0), (masked_axes, masked, document_start)):
        _draw_documents(axes, boundaries)
        n_foreign = sum(_draw_lane(axes, reads, lane, offset, document_start) for lane in range(len(LANES)))
        title = "with the document mask (mask)" if offset else "without a document mask (cross)"
        axes.set_title(f"{title}: {n_foreign} reads start in other documents", fontsize=9, loc="left")
        axes.axvline(unmasked.position + 0.5, color="black", linewidth=1)
        axes.set(xlim=(0, boundaries[-1]), ylim=(-0.1, 3.05))
        axes.set_yticks([lane + 0.45 for lane in range(len(LANES))], LANES, fontsize=8)
    masked_axes.set_xlabel("token of the sequence; dashed lines: document starts")
    handles = [
        Patch(facecolor=colour, label=label) for label, colour in {**LANE_COLOURS, "in another document": FORCED}.items()
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_lane(axes: Axes, reads: AttentionReads, lane: int, offset: int, document_start: int) -> int:
    """Draw the reads of one branch as boxes, and return how many of them start before `document_start`.

    `offset` is the position of the document's first token in the sequence.
    """
    colour, n_foreign = LANE_COLOURS[LANES[lane]], 0
    # Compressed blocks overlap, so they alternate between several rows.
    rows = -(-reads.nsa.l // reads.nsa.d) if LANES[lane] == "compressed" else 1
    for index, (start, end) in enumerate(_list_intervals(reads, LANES[lane])):
        is_foreign = offset + start < document_start
        n_foreign += is_foreign
        corner, height = (offset + start, lane + LANE_HEIGHT * (index % rows) / rows), LANE_HEIGHT / rows
        face, alpha = (FORCED, 0.9) if is_foreign else (colour, 0.55)
        axes.add_patch(Rectangle(corner, end - start, height, facecolor=face, alpha=alpha, edgecolor="white"))
    return n_foreign


def _list_intervals(reads: AttentionReads, branch: str) -> list[tuple[int, int]]:
    """Return the token interval (first, last + 1) of each read: blocks, and the single tokens of the window."""
    n, end = reads.nsa, reads.position + 1
    if branch == "compressed":
        return [(i * n.d, i * n.d + n.l) for i in range(len(reads.cmp))]
    if branch == "selected":
        return [(j * n.l_sel, min((j + 1) * n.l_sel, end)) for j in reads.blocks]
    return [(t, t + 1) for t in torch.nonzero(reads.win).flatten().tolist()]


def _draw_documents(axes: Axes, boundaries: Sequence[int]) -> None:
    """Shade every second document, and draw a dashed line at each document start."""
    for index, (start, end) in enumerate(pairwise(boundaries)):
        if index % 2:
            axes.axvspan(start, end, color=PALE, alpha=0.5, linewidth=0)
        axes.axvline(start, color="black", linestyle="--", linewidth=0.8)
