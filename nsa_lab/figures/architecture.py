"""Diagrams of NSA: how one query passes through the three branches, and which query-key pairs each branch computes."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.figures.query_plot import AttentionReads
from nsa_lab.figures.selection_maps import classify_blocks
from nsa_lab.figures.style import BRANCH_COLOURS, CMP, DENSE, FORCED, PALE, SEL, WIN, stack_panels

STRIP_WIDTH = 54.0  # width of a strip of tokens; the diagram is 100 wide
LANE_CENTERS = {"cmp": 41.0, "sel": 17.0, "win": 4.0}  # vertical center of the strip of each branch
ATTENTION_X, GATE_X, SUM_X = 65.0, 80.0, 91.0  # horizontal positions of the parts on the right
LANE_LABELS = {
    "cmp": "compressed: one key per block (eq. 7); darker: larger weight p (eq. 8)",
    "sel": "selected: the tokens of the selected blocks (eq. 12)",
    "win": "window: the latest tokens (section 3.3.3)",
}


def plot_architecture(reads: AttentionReads) -> Figure:
    """Plot one query: the keys of each branch, the block selection by the first branch, the gated sum (eq. 5 to 12)."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(
        xlim=(-1, 100), ylim=(0, 54), title=f"NSA for one query, t = {reads.position:,}: three branches, one gated sum"
    )
    for branch, center in LANE_CENTERS.items():
        axes.text(
            0, center + (7.6 if branch == "cmp" else 2.4), LANE_LABELS[branch], fontsize=9.5, color=BRANCH_COLOURS[branch]
        )
    _draw_compressed(axes, reads)
    _draw_importance(axes, reads)
    _draw_tokens(axes, "sel", reads, (reads.sel > 0).tolist())
    _draw_tokens(axes, "win", reads, (reads.win > 0).tolist())
    for branch, n_keys in reads.count_keys().items():
        _draw_attention_and_gate(axes, branch, n_keys)
    _draw_sum(axes)
    return figure


def plot_branch_masks(blocks: Tensor, nsa: NSAConfig) -> Figure:
    """Plot the query-key pairs that dense attention and each branch compute, for the `blocks` [T, n_sel] of one group."""
    length = blocks.shape[0]
    t, s = torch.arange(length)[:, None], torch.arange(length)
    kinds = classify_blocks(blocks, geometry.num_selection(length, nsa), nsa)
    panels = {
        "dense: every token": (s <= t, DENSE),
        "compressed: every block": (geometry.sees_compressed(t[:, 0], geometry.num_compressed(length, nsa), nsa), CMP),
        "selected: the blocks of each query": ((kinds >= 2).repeat_interleave(nsa.l_sel, 1)[:, :length] & (s <= t), SEL),
        f"window: {nsa.w} tokens": ((s <= t) & (s > t - nsa.w), WIN),
    }
    figure = Figure(figsize=(7.6, 7.6), layout="constrained")
    figure.suptitle(f"Computed pairs: {length:,} queries (rows) by keys (columns)", fontsize=11)
    for axes, (title, (computed, colour)) in zip(stack_panels(figure, 4, columns=2), panels.items(), strict=True):
        n_pairs = int(computed.sum())
        extent = (-0.5, max(computed.shape[1], 1) - 0.5, length - 0.5, -0.5)  # short texts have no compressed block
        colours = ListedColormap(["white", colour])
        axes.imshow(computed.numpy(), cmap=colours, vmin=0, vmax=1, interpolation="nearest", extent=extent)
        axes.set_title(f"{title}\n{n_pairs:,} pairs", fontsize=9)
        axes.set(xlabel="compressed block" if "compressed" in title else "key, token")
        axes.tick_params(labelsize=7)
    for axes in figure.axes[::2]:
        axes.set_ylabel("query t, token")
    return figure


def _draw_compressed(axes: Axes, reads: AttentionReads) -> None:
    """Draw the past tokens and, above them, the compressed keys; darker keys have more attention weight."""
    n, unit, rows = reads.nsa, STRIP_WIDTH / (reads.position + 1), max(-(-reads.nsa.l // reads.nsa.d), 1)
    _draw_strip(axes, LANE_CENTERS["cmp"], [PALE] * (reads.position + 1))
    largest = float(reads.cmp.max()) if len(reads.cmp) else 1.0
    for i, weight in enumerate(reads.cmp.tolist()):
        y = LANE_CENTERS["cmp"] + 2 + 2.2 * (i % rows)
        box = Rectangle((i * n.d * unit, y), n.l * unit, 1.9, facecolor=CMP, alpha=0.15 + 0.85 * weight / largest)
        axes.add_patch(box)
        axes.add_patch(Rectangle((i * n.d * unit, y), n.l * unit, 1.9, fill=False, edgecolor=CMP, linewidth=0.8))


def _draw_importance(axes: Axes, reads: AttentionReads) -> None:
    """Draw the importance of each selection block, coloured by selection."""
    base, unit = 24.5, STRIP_WIDTH / (reads.position + 1) * reads.nsa.l_sel
    largest = float(reads.importance.max()) if len(reads.importance) else 1.0
    for j, value in enumerate(reads.importance.tolist()):
        colour = FORCED if j in reads.forced else SEL if j in reads.blocks else PALE
        width = min(unit, STRIP_WIDTH - j * unit)
        axes.add_patch(Rectangle((j * unit + 0.2, base), width - 0.4, 0.4 + 7 * value / (largest or 1.0), facecolor=colour))
    legend = {
        "importance of a block: the p of all": "black",
        "compressed keys it overlaps (eq. 9, 10)": "black",
        "forced: always selected": FORCED,
        "selected by importance (eq. 11)": SEL,
        "not selected": DENSE,
    }
    for line, (text, colour) in enumerate(legend.items()):
        axes.text(STRIP_WIDTH + 2, base + 7.2 - 1.9 * line, text, fontsize=8.5, color=colour)
    _draw_arrow(axes, (STRIP_WIDTH / 2, LANE_CENTERS["cmp"] - 1.6), (STRIP_WIDTH / 2, base + 8.2), CMP)
    _draw_arrow(axes, (STRIP_WIDTH - 1, base - 0.6), (STRIP_WIDTH - 1, LANE_CENTERS["sel"] + 1.4), SEL)


def _draw_tokens(axes: Axes, branch: str, reads: AttentionReads, is_read: list[bool]) -> None:
    _draw_strip(axes, LANE_CENTERS[branch], [BRANCH_COLOURS[branch] if is_key_read else PALE for is_key_read in is_read])


def _draw_strip(axes: Axes, center: float, colours: list[str]) -> None:
    """Draw one small box per token."""
    unit = STRIP_WIDTH / len(colours)
    for s, colour in enumerate(colours):
        axes.add_patch(Rectangle((s * unit, center - 1.2), unit * 0.86, 2.4, facecolor=colour))


def _draw_attention_and_gate(axes: Axes, branch: str, n_keys: int) -> None:
    """Draw the attention over the keys of a branch and its gate."""
    y, colour = LANE_CENTERS[branch], BRANCH_COLOURS[branch]
    corner = (ATTENTION_X - 5.5, y - 2.0)
    axes.add_patch(FancyBboxPatch(corner, 11, 4.0, boxstyle="round,pad=0.3", facecolor="white", edgecolor=colour))
    axes.text(ATTENTION_X, y, f"attention of $q_t$\nover {n_keys} keys", ha="center", va="center", fontsize=8.5)
    axes.add_patch(Circle((GATE_X, y), 2.8, facecolor=colour, edgecolor="none"))
    axes.text(GATE_X, y, f"× $g^{{{branch}}}$", ha="center", va="center", fontsize=9, color="white")
    _draw_arrow(axes, (STRIP_WIDTH + 0.6, y), (ATTENTION_X - 6.2, y), colour)
    _draw_arrow(axes, (ATTENTION_X + 6.2, y), (GATE_X - 3.2, y), colour)
    _draw_arrow(axes, (GATE_X + 3.2, y), (SUM_X - 2.0, LANE_CENTERS["sel"] + (y - LANE_CENTERS["sel"]) * 0.12), colour)


def _draw_sum(axes: Axes) -> None:
    y = LANE_CENTERS["sel"]
    axes.add_patch(Circle((SUM_X, y), 2.6, facecolor="white", edgecolor="black"))
    axes.text(SUM_X, y, "+", ha="center", va="center", fontsize=14)
    _draw_arrow(axes, (SUM_X + 2.8, y), (97.0, y), "black")
    axes.text(97.6, y, "$o_t$", ha="left", va="center", fontsize=12)
    axes.text(GATE_X, 50.5, "gates of this token:\n$g = \\sigma(W_g\\,x_t)$ (eq. 5)", ha="center", va="center", fontsize=9)
    axes.plot([GATE_X, GATE_X], [48.0, LANE_CENTERS["win"]], color=DENSE, linestyle=":", linewidth=1.2, zorder=0)


def _draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.3))
