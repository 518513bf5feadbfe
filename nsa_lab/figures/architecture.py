"""How NSA is put together: the way of one query through its three branches, and what each branch computes of all pairs."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.figures.query import Reads
from nsa_lab.figures.selection import selection_kinds
from nsa_lab.figures.style import BRANCH_COLOURS, CMP, DENSE, FORCED, PALE, SEL, WIN, row

STRIP = 54.0  # width of a strip of tokens, of the picture's 100
LANES = {"cmp": 41.0, "sel": 17.0, "win": 4.0}  # where the middle of each branch's strip lies
ATTENTION, GATE, SUM = 65.0, 80.0, 91.0  # where the stations on the right lie
NAMES = {
    "cmp": "compressed: one summary per block (eq. 7); darker: more weight p (eq. 8)",
    "sel": "selected: the tokens of the chosen blocks, in full (eq. 12)",
    "win": "window: the latest tokens (section 3.3.3)",
}


def architecture(reads: Reads) -> Figure:
    """The way of one query: what each branch reads, how the first chooses for the second, the gated sum (eq. 5 to 12)."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(
        xlim=(-1, 100), ylim=(0, 54), title=f"NSA for one query, t = {reads.position:,}: three branches, one gated sum"
    )
    for branch, middle in LANES.items():
        axes.text(0, middle + (7.6 if branch == "cmp" else 2.4), NAMES[branch], fontsize=9.5, color=BRANCH_COLOURS[branch])
    _compressed(axes, reads)
    _importance(axes, reads)
    _tokens(axes, "sel", reads, (reads.sel > 0).tolist())
    _tokens(axes, "win", reads, (reads.win > 0).tolist())
    for branch, keys in reads.counts().items():
        _stations(axes, branch, keys)
    _sum(axes)
    return figure


def branch_masks(blocks: Tensor, nsa: NSAConfig) -> Figure:
    """The pairs of query and key that dense attention and each branch compute, for one group's `blocks` [T, n_sel]."""
    length = blocks.shape[0]
    t, s = torch.arange(length)[:, None], torch.arange(length)
    kinds = selection_kinds(blocks, geometry.num_selection(length, nsa), nsa)
    panels = {
        "dense: every token": (s <= t, DENSE),
        "compressed: every block": (geometry.sees_compressed(t[:, 0], geometry.num_compressed(length, nsa), nsa), CMP),
        "selected: chosen blocks": ((kinds >= 2).repeat_interleave(nsa.l_sel, 1)[:, :length] & (s <= t), SEL),
        f"window: {nsa.w} tokens": ((s <= t) & (s > t - nsa.w), WIN),
    }
    figure = Figure(figsize=(10.5, 3.1), layout="constrained")
    figure.suptitle(f"Which pairs are computed: {length:,} queries (rows) by keys (columns)", fontsize=11)
    for axes, (named, (computed, colour)) in zip(row(figure, 4), panels.items(), strict=True):
        pairs = int(computed.sum())
        extent = (-0.5, max(computed.shape[1], 1) - 0.5, length - 0.5, -0.5)  # short texts have no compressed block at all
        colours = ListedColormap(["white", colour])
        axes.imshow(computed.numpy(), cmap=colours, vmin=0, vmax=1, interpolation="nearest", extent=extent)
        axes.set_title(f"{named}\n{pairs:,} pairs", fontsize=9)
        axes.set(xlabel="compressed block" if "compressed" in named else "key, token")
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("query t, token")
    return figure


def _compressed(axes: Axes, reads: Reads) -> None:
    """The tokens of the past, and above them the summaries, the darker the more weight the query gives them."""
    n, unit, rows = reads.nsa, STRIP / (reads.position + 1), max(-(-reads.nsa.l // reads.nsa.d), 1)
    _strip(axes, LANES["cmp"], [PALE] * (reads.position + 1))
    largest = float(reads.cmp.max()) if len(reads.cmp) else 1.0
    for i, weight in enumerate(reads.cmp.tolist()):
        y = LANES["cmp"] + 2 + 2.2 * (i % rows)
        box = Rectangle((i * n.d * unit, y), n.l * unit, 1.9, facecolor=CMP, alpha=0.15 + 0.85 * weight / largest)
        axes.add_patch(box)
        axes.add_patch(Rectangle((i * n.d * unit, y), n.l * unit, 1.9, fill=False, edgecolor=CMP, linewidth=0.8))


def _importance(axes: Axes, reads: Reads) -> None:
    """What the weights say about each selection block, and which are chosen."""
    base, unit = 24.5, STRIP / (reads.position + 1) * reads.nsa.l_sel
    largest = float(reads.importance.max()) if len(reads.importance) else 1.0
    for j, value in enumerate(reads.importance.tolist()):
        colour = FORCED if j in reads.forced else SEL if j in reads.blocks else PALE
        width = min(unit, STRIP - j * unit)
        axes.add_patch(Rectangle((j * unit + 0.2, base), width - 0.4, 0.4 + 7 * value / (largest or 1.0), facecolor=colour))
    said = {
        "importance of a block: the p of all": "black",
        "summaries that overlap it (eq. 9, 10)": "black",
        "forced: always chosen": FORCED,
        "best of the rest: chosen (eq. 11)": SEL,
        "passed over": DENSE,
    }
    for line, (text, colour) in enumerate(said.items()):
        axes.text(STRIP + 2, base + 7.2 - 1.9 * line, text, fontsize=8.5, color=colour)
    _arrow(axes, (STRIP / 2, LANES["cmp"] - 1.6), (STRIP / 2, base + 8.2), CMP)
    _arrow(axes, (STRIP - 1, base - 0.6), (STRIP - 1, LANES["sel"] + 1.4), SEL)


def _tokens(axes: Axes, branch: str, reads: Reads, read: list[bool]) -> None:
    _strip(axes, LANES[branch], [BRANCH_COLOURS[branch] if each else PALE for each in read])


def _strip(axes: Axes, middle: float, colours: list[str]) -> None:
    """One small box per token."""
    unit = STRIP / len(colours)
    for s, colour in enumerate(colours):
        axes.add_patch(Rectangle((s * unit, middle - 1.2), unit * 0.86, 2.4, facecolor=colour))


def _stations(axes: Axes, branch: str, keys: int) -> None:
    """What happens to the keys that a branch reads: attention, then the gate."""
    y, colour = LANES[branch], BRANCH_COLOURS[branch]
    corner = (ATTENTION - 5.5, y - 2.0)
    axes.add_patch(FancyBboxPatch(corner, 11, 4.0, boxstyle="round,pad=0.3", facecolor="white", edgecolor=colour))
    axes.text(ATTENTION, y, f"attention of $q_t$\nover {keys} keys", ha="center", va="center", fontsize=8.5)
    axes.add_patch(Circle((GATE, y), 2.8, facecolor=colour, edgecolor="none"))
    axes.text(GATE, y, f"× $g^{{{branch}}}$", ha="center", va="center", fontsize=9, color="white")
    _arrow(axes, (STRIP + 0.6, y), (ATTENTION - 6.2, y), colour)
    _arrow(axes, (ATTENTION + 6.2, y), (GATE - 3.2, y), colour)
    _arrow(axes, (GATE + 3.2, y), (SUM - 2.0, LANES["sel"] + (y - LANES["sel"]) * 0.12), colour)


def _sum(axes: Axes) -> None:
    y = LANES["sel"]
    axes.add_patch(Circle((SUM, y), 2.6, facecolor="white", edgecolor="black"))
    axes.text(SUM, y, "+", ha="center", va="center", fontsize=14)
    _arrow(axes, (SUM + 2.8, y), (97.0, y), "black")
    axes.text(97.6, y, "$o_t$", ha="left", va="center", fontsize=12)
    axes.text(GATE, 50.5, "gates of this token:\n$g = \\sigma(W_g\\,x_t)$ (eq. 5)", ha="center", va="center", fontsize=9)
    axes.plot([GATE, GATE], [48.0, LANES["win"]], color=DENSE, linestyle=":", linewidth=1.2, zorder=0)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.3))
