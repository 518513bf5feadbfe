"""Pictures of the attention: block geometry, visible blocks, importance, selection, and what one query reads.

Every function takes numbers and gives a matplotlib Figure with a title, units and a legend; none shows or saves it.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.explore.reads import Reads
from nsa_lab.explore.show import BRANCH_COLOURS, CMP, DENSE, FORCED, PALE, SEL, WIN

KINDS = {"forced": FORCED, "chosen by score": SEL, "passed over": PALE, "not begun": "white"}


def block_geometry(length: int, nsa: NSAConfig, position: int) -> Figure:
    """Where the blocks of each branch lie, and which of them the query at `position` may read."""
    figure, axes = _figure(10, 3.2, f"Blocks over {length} tokens, seen from query t = {position}")
    visible = int(geometry.visible_compressed(torch.tensor(position), nsa))
    rows = max(-(-nsa.l // nsa.d), 1)  # blocks that overlap lie on rows of their own
    for i in range(geometry.num_compressed(length, nsa)):
        row = 2.0 + (rows - 1 - i % rows) / rows
        _box(axes, i * nsa.d, nsa.l, row, 0.9 / rows, CMP if i < visible else PALE, str(i))
    begun = int(geometry.candidate_blocks(torch.tensor(position), geometry.num_selection(length, nsa), nsa).sum())
    for j in range(geometry.num_selection(length, nsa)):
        first = j * nsa.l_sel
        _box(axes, first, min(nsa.l_sel, length - first), 1.0, 0.9, SEL if j < begun else PALE, str(j))
    start = max(position - nsa.w + 1, 0)
    _box(axes, start, position + 1 - start, 0.0, 0.9, WIN, f"{position + 1 - start} tokens")
    axes.axvline(position + 0.5, color="black", linewidth=1.2)
    axes.set(xlim=(0, length), ylim=(-0.2, 3.1), xlabel="token")
    axes.set_yticks(
        [0.45, 1.45, 2.45],
        [f"window\nw = {nsa.w}", f"selection\nl_sel = {nsa.l_sel}", f"compression\nl = {nsa.l}, d = {nsa.d}"],
    )
    _legend(axes, {"compressed, visible": CMP, "selection, candidate": SEL, "window": WIN, "later than t": PALE})
    return figure


def visible_blocks(length: int, nsa: NSAConfig) -> Figure:
    """The staircase: which compressed blocks each query sees, and how many."""
    count = geometry.num_compressed(length, nsa)
    t = torch.arange(length)
    seen = torch.arange(count) < geometry.visible_compressed(t, nsa).unsqueeze(-1)
    figure, axes = _figure(6.4, 4.2, f"Compressed blocks that a query sees: [T, N] = [{length}, {count}]")
    axes.imshow(
        seen.T.numpy(),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=ListedColormap(["white", CMP]),
        extent=(0, length, -0.5, max(count, 1) - 0.5),
        vmin=0,
        vmax=1,
    )
    axes.set(xlabel="query t, token", ylabel="compressed block i")
    axes.axvline(nsa.l - 1, color="black", linestyle=":", linewidth=1)
    axes.text(
        0.03, 0.93, f"dotted: t = l − 1 = {nsa.l - 1}, the first block is whole", fontsize=8, transform=axes.transAxes
    )
    return figure


def overlap_weights(nsa: NSAConfig, compressed: int, selection: int) -> Figure:
    """Eq. 9 as a matrix: how many strides compressed block i shares with selection block j, for two readings of j."""
    geometric = geometry.overlap(compressed, selection, nsa)
    zero_based = equation_nine(compressed, selection, nsa, first_j=0)
    figure = Figure(figsize=(11, 1.6 + 0.32 * selection), layout="constrained")
    figure.suptitle(
        f"Weights from compressed block i to selection block j (l = {nsa.l}, d = {nsa.d}, l_sel = {nsa.l_sel})", fontsize=11
    )
    for axes, weights, named in zip(
        figure.subplots(1, 2, sharey=True),
        (geometric, zero_based),
        ("shared tokens / d  =  eq. 9 with j from 1", "eq. 9 with j from 0: one block into the past"),
        strict=True,
    ):
        axes.imshow(weights.T.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=float(geometric.max()) * 1.3)
        for i, j in weights.nonzero().tolist():
            axes.text(i, j, f"{weights[i, j]:g}", ha="center", va="center", fontsize=8)
        axes.set_title(named, fontsize=9)
        axes.set(xlabel="compressed block i", ylabel="selection block j", xticks=range(compressed), yticks=range(selection))
        axes.tick_params(labelsize=8)
    return figure


def equation_nine(compressed: int, selection: int, nsa: NSAConfig, *, first_j: int) -> Tensor:
    """The double sum of eq. 9 taken literally, [compressed, selection], with its block number j counted from `first_j`.

    importance[j] = sum over m < l_sel/d and n < l/d of p[(l_sel/d) * j - m - n]; p outside its range counts as zero.
    """
    step, lead = nsa.l_sel // nsa.d, nsa.l // nsa.d
    weights = torch.zeros(compressed, selection)
    for column in range(selection):
        for m in range(step):
            for n in range(lead):
                # With j from 1 the sum counts p from 1 too; both shifts together are one stride.
                i = step * (column + first_j) - m - n - first_j
                if 0 <= i < compressed:
                    weights[i, column] += 1
    return weights


def importance_map(importance: Tensor, blocks: Tensor, nsa: NSAConfig, about: str) -> Figure:
    """Importance [T, blocks] of one group beside the blocks that were chosen [T, n_sel], forced ones apart."""
    length, count = importance.shape
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(f"What scores high and what is chosen: {about}", fontsize=11)
    left, right = figure.subplots(1, 2, sharey=True)
    begun = geometry.candidate_blocks(torch.arange(length), count, nsa)
    positive = importance.clamp_min(1e-6).masked_fill(~begun, float("nan"))
    largest = float(importance.max())
    picture = left.imshow(
        positive.T.numpy(),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="cividis",
        norm=LogNorm(vmin=max(largest * 1e-3, 1e-6), vmax=max(largest, 1e-5)),
        extent=(0, length, -0.5, count - 0.5),
    )
    figure.colorbar(picture, ax=left, label="importance, sum over heads (log)")
    left.set_title(f"importance [T, blocks] = [{length}, {count}]", fontsize=9)
    _draw_kinds(right, blocks, count, nsa)
    right.set_title(f"chosen blocks [T, n_sel] = [{length}, {blocks.shape[1]}]", fontsize=9)
    for axes in (left, right):
        axes.set(xlabel="query t, token", ylabel=f"selection block j ({nsa.l_sel} tokens each)")
    _legend(right, KINDS, inside=True)
    return figure


def selection_by_layer(blocks: dict[int, Tensor], nsa: NSAConfig, about: str) -> Figure:
    """The chosen blocks [T, n_sel] of one group in several layers, side by side."""
    figure = Figure(figsize=(3.1 * len(blocks) + 0.6, 3.6), layout="constrained")
    figure.suptitle(f"Blocks selected: {about}", fontsize=10)
    for n, (axes, (layer, chosen)) in enumerate(
        zip(figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0], blocks.items(), strict=True)
    ):
        length = chosen.shape[0]
        count = geometry.num_selection(length, nsa)
        _draw_kinds(axes, chosen, count, nsa)
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.set(xlabel="query t, token", ylabel="" if n else f"selection block j ({nsa.l_sel} tokens each)")
    _legend(axes, KINDS, inside=True)
    return figure


def selection_kinds(blocks: Tensor, count: int, nsa: NSAConfig) -> Tensor:
    """[T, blocks] of 0 not begun, 1 passed over, 2 chosen by score, 3 forced, from blocks [T, n_sel] padded with -1."""
    t = torch.arange(blocks.shape[0])
    kinds = geometry.candidate_blocks(t, count, nsa).long()
    chosen = torch.zeros(blocks.shape[0], count + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(blocks < 0, count, blocks).long(), True)
    kinds[chosen[:, :count]] = 2
    kinds[chosen[:, :count] & geometry.forced_blocks(t, count, nsa)] = 3
    return kinds


def query_reads(reads: Reads, about: str) -> Figure:
    """What one query reads: a lane a branch, weight of each token, and the scores that chose the blocks."""
    n, t = reads.nsa, reads.position
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    counts = reads.counts()
    figure.suptitle(
        f"What query t = {t} of group {reads.group} reads "
        f"({counts['cmp']} compressed + {counts['sel']} selected + {counts['win']} window keys, "
        f"dense would read {t + 1})\n{about}",
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
    cmp.set_ylabel("compressed\nweight a block", fontsize=8)

    count = len(reads.importance)
    colours = [FORCED if j in reads.forced else SEL if j in reads.blocks else PALE for j in range(count)]
    score.bar(np.arange(count) * n.l_sel, reads.importance.numpy(), width=n.l_sel * 0.96, align="edge", color=colours)
    for j in reads.blocks:
        score.axvspan(j * n.l_sel, (j + 1) * n.l_sel, ymax=0.06, color=colours[j])
    score.set_ylabel("importance\n(eq. 10)", fontsize=8)
    _legend(score, {"forced": FORCED, "chosen": SEL, "passed over": PALE}, inside=True)

    for axes, weights, colour, named in ((sel, reads.sel, SEL, "selected"), (win, reads.win, WIN, "window")):
        read = (weights > 0).nonzero().flatten()
        axes.bar(read.numpy(), weights[read].numpy(), width=max(1.0, t / 700), color=colour)
        axes.set_ylabel(f"{named}\nweight a token", fontsize=8)
    for j in reads.blocks:
        sel.axvspan(j * n.l_sel, min((j + 1) * n.l_sel, t + 1), color=SEL, alpha=0.15, linewidth=0)
    win.axvspan(max(t - n.w + 1, 0), t + 1, color=WIN, alpha=0.15, linewidth=0)
    for axes in (cmp, score, sel, win):
        axes.axvline(t + 0.5, color="black", linewidth=1)
        axes.tick_params(labelsize=8)
        axes.margins(y=0.1)
    win.set(xlabel="token", xlim=(0, max(t + 1, n.l_sel) * 1.01))
    return figure


def reads_by_length(lengths: list[int], nsa: NSAConfig) -> Figure:
    """Keys that the last query of a sequence reads, by branch, beside dense attention; log-log."""
    figure, axes = _figure(
        7.6,
        4.4,
        f"Keys read by the query at the end of a sequence (l = {nsa.l}, d = {nsa.d}, "
        f"l_sel = {nsa.l_sel}, n_sel = {nsa.n_sel}, w = {nsa.w})",
    )
    named = {"cmp": "compressed", "sel": "selected", "win": "window"}
    reads = [geometry.decode_reads(length, nsa) for length in lengths]
    for branch, label in named.items():
        axes.plot(lengths, [r[branch] for r in reads], color=BRANCH_COLOURS[branch], label=label, marker=".", markersize=4)
    axes.plot(lengths, [sum(r.values()) for r in reads], color="black", label="NSA, all three", linewidth=2)
    axes.plot(lengths, lengths, color=DENSE, linestyle="--", label="dense")
    budget = nsa.n_sel * nsa.l_sel
    axes.axvline(budget, color=SEL, linestyle=":", linewidth=1)
    axes.annotate(
        f"n_sel · l_sel = {budget}:\nselection is dense up to here",
        (budget, 1),
        xytext=(6, 8),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set(xscale="log", yscale="log", xlabel="sequence length, tokens", ylabel="keys read")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    return figure


def shares_of_allowed(rows: list[tuple[str, str, float]], about: str) -> Figure:
    """Errors in units of what is allowed, log scale, for (what, backend, share) rows: a bar past the line at 1 is too long.

    A share of 0 is written "exact", one that is infinite or no number runs off the picture.
    """
    whats = list(dict.fromkeys(what for what, _, _ in rows))
    backends = list(dict.fromkeys(backend for _, backend, _ in rows))
    figure, axes = _figure(9, 1.6 + 0.27 * len(whats) * max(len(backends), 1), about)
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
    handles = [Patch(color=colour, label=backend) for backend, colour in colours.items()]
    handles.append(Line2D([], [], color="black", linestyle=":", label="1: all that is allowed"))
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_kinds(axes: Axes, blocks: Tensor, count: int, nsa: NSAConfig) -> None:
    colours = ListedColormap(list(reversed(KINDS.values())))
    kinds = selection_kinds(blocks, count, nsa).T.numpy()
    axes.imshow(
        kinds,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=colours,
        vmin=0,
        vmax=len(KINDS) - 1,
        extent=(0, blocks.shape[0], -0.5, count - 0.5),
    )


def _figure(width: float, height: float, named: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(named, fontsize=10)
    return figure, axes


def _box(axes: Axes, x: float, width: float, y: float, height: float, colour: str, label: str) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.2))
    axes.text(
        x + width / 2,
        y + height / 2,
        label,
        ha="center",
        va="center",
        fontsize=7,
        color="black" if colour == PALE else "white",
    )


def _legend(axes: Axes, colours: dict[str, str], inside: bool = False) -> None:
    handles = [Patch(facecolor=colour, edgecolor="#999999", label=label) for label, colour in colours.items()]
    if inside:
        axes.legend(handles=handles, fontsize=7, loc="upper left", framealpha=0.9)
    else:
        axes.legend(handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
