"""Plots of attention weights: of one query in each branch, with the block scores; and of all queries of a short text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.config import NSAConfig
from nsa_lab.figures.style import CMP, FORCED, PALE, SEL, WIN, add_colour_legend, make_panel


@dataclass(frozen=True)
class AttentionReads:
    """Attention of the query at `position` in `group`. Weights are means over the heads of the group and sum to 1.

    cmp: weights of the visible compressed blocks, [n_visible]. sel, win: weights of all tokens up to the query, [position
    + 1], 0 if a token is not read. importance: of the candidate blocks, [n_candidates], by eq. 10, or by other keys, of an
    indexer or means, if `has_selection_keys`. blocks: the selected blocks, ascending. forced: the blocks among them that
    are always selected.
    """

    position: int
    group: int
    nsa: NSAConfig
    cmp: Tensor
    sel: Tensor
    win: Tensor
    importance: Tensor
    blocks: list[int]
    forced: list[int]
    has_selection_keys: bool = False

    def count_keys(self) -> dict[str, int]:
        """Return the number of keys that each branch reads, as `geometry.decode_reads` predicts it."""
        return {"cmp": len(self.cmp), "sel": int((self.sel > 0).sum()), "win": int((self.win > 0).sum())}


def plot_query_attention(reads: AttentionReads, caption: str) -> Figure:
    """Plot one query: a lane per branch with the weight of each token, and the importance that selects the blocks."""
    n, t = reads.nsa, reads.position
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    counts = reads.count_keys()
    figure.suptitle(
        f"Attention of query t = {t:,}, group {reads.group} "
        f"({counts['cmp']:,} compressed + {counts['sel']:,} selected + {counts['win']:,} window keys, "
        f"dense: {t + 1:,})\n{caption}",
        fontsize=10,
    )
    cmp, score, sel, win = figure.subplots(4, 1, sharex=True)

    cmp.bar(
        np.arange(len(reads.cmp)) * n.d,
        reads.cmp.numpy(),
        width=n.l,
        align="edge",
        color=CMP,
        alpha=0.45,
        edgecolor=CMP,
        linewidth=0.6,
    )
    cmp.set_ylabel("compressed\nweight per block", fontsize=8)

    n_blocks = len(reads.importance)
    colours = [FORCED if j in reads.forced else SEL if j in reads.blocks else PALE for j in range(n_blocks)]
    score.bar(np.arange(n_blocks) * n.l_sel, reads.importance.numpy(), width=n.l_sel * 0.96, align="edge", color=colours)
    for j in reads.blocks:
        score.axvspan(j * n.l_sel, (j + 1) * n.l_sel, ymax=0.06, color=colours[j])
    score.set_ylabel("importance\n" + ("(of the selection keys)" if reads.has_selection_keys else "(eq. 10)"), fontsize=8)
    add_colour_legend(score, {"forced": FORCED, "selected by score": SEL, "not selected": PALE}, inside=True, columns=3)

    for axes, weights, colour, branch in ((sel, reads.sel, SEL, "selected"), (win, reads.win, WIN, "window")):
        tokens = (weights > 0).nonzero().flatten()
        axes.bar(tokens.numpy() + 0.5, weights[tokens].numpy(), width=max(1.0, t / 700), color=colour)
        axes.set_ylabel(f"{branch}\nweight per token", fontsize=8)
    for j in reads.blocks:
        sel.axvspan(j * n.l_sel, min((j + 1) * n.l_sel, t + 1), color=SEL, alpha=0.15, linewidth=0)
    win.axvspan(max(t - n.w + 1, 0), t + 1, color=WIN, alpha=0.15, linewidth=0)
    for axes in (cmp, score, sel, win):
        axes.axvline(t + 0.5, color="black", linewidth=1)
        axes.tick_params(labelsize=8)
        axes.margins(y=0.45 if axes is score else 0.1)  # space for the legend above the bars
    win.set(xlabel="token", xlim=(0, max(t + 1, n.l_sel) * 1.01))
    return figure


def plot_attention_matrix(weights: Tensor, tokens: Sequence[str], title: str) -> Figure:
    """Plot the attention weights [T, T] of one head: queries in rows, keys in columns. `tokens` label both axes."""
    size = 1.6 + 0.16 * len(tokens)
    figure, axes = make_panel(size + 0.8, size, title)
    image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    labels = [token if token.strip() else "␣" for token in tokens]
    axes.set_xticks(range(len(tokens)), labels, fontsize=7)
    axes.set_yticks(range(len(tokens)), labels, fontsize=7)
    axes.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.7)
    return figure
