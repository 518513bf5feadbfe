"""What a query reads near the border of two documents: as one text, and with documents told apart."""

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
    """One query twice, over a row of documents that begin at `bounds` (and, last, where the row ends).

    `whole`: its reads where the row is one text, at its position in the row; `alone`: those in its own document, at its
    position there. What begins in another document is red.
    """
    begin = unmasked.position - masked.position
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(
        f"What query t = {unmasked.position:,} reads: it is token {masked.position:,} of its document", fontsize=11
    )
    one, apart = figure.subplots(2, 1, sharex=True)
    for axes, reads, first in ((one, unmasked, 0), (apart, masked, begin)):
        _draw_documents(axes, boundaries)
        foreign = sum(_draw_lane(axes, reads, lane, first, begin) for lane in range(len(LANES)))
        named = "documents told apart (mask)" if first else "read as one text (cross)"
        axes.set_title(f"{named}: {foreign} reads begin in other documents", fontsize=9, loc="left")
        axes.axvline(unmasked.position + 0.5, color="black", linewidth=1)
        axes.set(xlim=(0, boundaries[-1]), ylim=(-0.1, 3.05))
        axes.set_yticks([lane + 0.45 for lane in range(len(LANES))], LANES, fontsize=8)
    apart.set_xlabel("token of the row; dashed: documents begin")
    handles = [
        Patch(facecolor=colour, label=label) for label, colour in {**LANE_COLOURS, "of another document": FORCED}.items()
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_lane(axes: Axes, reads: AttentionReads, lane: int, offset: int, document_start: int) -> int:
    """Boxes of what a branch reads, its document's first token at `first` of the row; how many begin before row `own`."""
    colour, foreign = LANE_COLOURS[LANES[lane]], 0
    # Compressed blocks overlap, and take turns in rows of their own.
    rows = -(-reads.nsa.l // reads.nsa.d) if LANES[lane] == "compressed" else 1
    for number, (begin, end) in enumerate(_list_intervals(reads, LANES[lane])):
        strange = offset + begin < document_start
        foreign += strange
        corner, height = (offset + begin, lane + LANE_HEIGHT * (number % rows) / rows), LANE_HEIGHT / rows
        face, alpha = (FORCED, 0.9) if strange else (colour, 0.55)
        axes.add_patch(Rectangle(corner, end - begin, height, facecolor=face, alpha=alpha, edgecolor="white"))
    return foreign


def _list_intervals(reads: AttentionReads, branch: str) -> list[tuple[int, int]]:
    """Tokens that each read covers, first and one past the last: blocks, and the tokens of the window one by one."""
    n, end = reads.nsa, reads.position + 1
    if branch == "compressed":
        return [(i * n.d, i * n.d + n.l) for i in range(len(reads.cmp))]
    if branch == "selected":
        return [(j * n.l_sel, min((j + 1) * n.l_sel, end)) for j in reads.blocks]
    return [(t, t + 1) for t in torch.nonzero(reads.win).flatten().tolist()]


def _draw_documents(axes: Axes, boundaries: Sequence[int]) -> None:
    """Every second document on grey, a dashed line where one begins."""
    for number, (begin, end) in enumerate(pairwise(boundaries)):
        if number % 2:
            axes.axvspan(begin, end, color=PALE, alpha=0.5, linewidth=0)
        axes.axvline(begin, color="black", linestyle="--", linewidth=0.8)
