"""Plots of block geometry: block positions, visible blocks, overlap weights, and the number of keys that a query reads."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.figures.style import BRANCH_COLOURS, CMP, DENSE, PALE, SEL, WIN, add_colour_legend, make_panel, stack_panels


def plot_block_geometry(length: int, nsa: NSAConfig, position: int) -> Figure:
    """Plot the blocks of each branch, and which of them the query at `position` may read."""
    figure, axes = make_panel(10, 3.2, f"Blocks over {length:,} tokens, for query t = {position:,}")
    n_visible = int(geometry.visible_compressed(torch.tensor(position), nsa))
    rows = max(-(-nsa.l // nsa.d), 1)  # overlapping blocks are drawn in separate rows
    for i in range(geometry.num_compressed(length, nsa)):
        row = 2.0 + (rows - 1 - i % rows) / rows
        _draw_box(axes, i * nsa.d, nsa.l, row, 0.9 / rows, CMP if i < n_visible else PALE, str(i))
    n_candidates = int(geometry.candidate_blocks(torch.tensor(position), geometry.num_selection(length, nsa), nsa).sum())
    for j in range(geometry.num_selection(length, nsa)):
        first = j * nsa.l_sel
        _draw_box(axes, first, min(nsa.l_sel, length - first), 1.0, 0.9, SEL if j < n_candidates else PALE, str(j))
    start = max(position - nsa.w + 1, 0)
    _draw_box(axes, start, position + 1 - start, 0.0, 0.9, WIN, f"{position + 1 - start} tokens")
    axes.axvline(position + 0.5, color="black", linewidth=1.2)
    axes.set(xlim=(0, length), ylim=(-0.2, 3.1), xlabel="token")
    axes.set_yticks(
        [0.45, 1.45, 2.45],
        [f"window\nw = {nsa.w}", f"selection\nl_sel = {nsa.l_sel}", f"compression\nl = {nsa.l}, d = {nsa.d}"],
    )
    add_colour_legend(axes, {"compressed, visible": CMP, "selection, candidate": SEL, "window": WIN, "later than t": PALE})
    return figure


def plot_visible_blocks(length: int, nsa: NSAConfig) -> Figure:
    """Plot which compressed blocks each query sees."""
    n_blocks = geometry.num_compressed(length, nsa)
    t = torch.arange(length)
    is_visible = torch.arange(n_blocks) < geometry.visible_compressed(t, nsa).unsqueeze(-1)
    figure, axes = make_panel(6.4, 4.2, f"Compressed blocks that each query sees: [T, N] = [{length:,}, {n_blocks:,}]")
    axes.imshow(
        is_visible.T.numpy(),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=ListedColormap(["white", CMP]),
        extent=(0, length, -0.5, max(n_blocks, 1) - 0.5),
        vmin=0,
        vmax=1,
    )
    axes.set(xlabel="query t, token", ylabel="compressed block i")
    axes.axvline(nsa.l - 1, color="black", linestyle=":", linewidth=1)
    note = f"t = l − 1 = {nsa.l - 1}:\nthe first block is complete"
    axes.annotate(
        note, (nsa.l - 1, 0.9), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points", fontsize=8
    )
    return figure


def plot_overlap_weights(nsa: NSAConfig, n_compressed: int, n_selection: int) -> Figure:
    """Plot the weights of eq. 9 as a matrix: the strides that two blocks share, and the formula as printed."""
    geometric = geometry.overlap(n_compressed, n_selection, nsa)
    printed = compute_equation_nine(n_compressed, n_selection, nsa, as_printed=True)
    figure = Figure(figsize=(7.6, 1.8 + 2 * (0.7 + 0.32 * n_selection)), layout="constrained")
    figure.suptitle(
        f"Weights from compressed block i to selection block j (l = {nsa.l}, d = {nsa.d}, l_sel = {nsa.l_sel})", fontsize=11
    )
    for axes, weights, title in zip(
        stack_panels(figure, 2),
        (geometric, printed),
        ("shared tokens / d: correct", "eq. 9 as printed: l_sel/d − 1 strides too early"),
        strict=True,
    ):
        axes.imshow(weights.T.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=float(geometric.max()) * 1.3)
        for i, j in weights.nonzero().tolist():
            axes.text(i, j, f"{weights[i, j]:g}", ha="center", va="center", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.set(
            xlabel="compressed block i", ylabel="selection block j", xticks=range(n_compressed), yticks=range(n_selection)
        )
        axes.tick_params(labelsize=8)
    return figure


def compute_equation_nine(n_compressed: int, n_selection: int, nsa: NSAConfig, *, as_printed: bool) -> Tensor:
    """Return the double sum of eq. 9 as a matrix [compressed, selection]. Block indices start at 0, as in eq. 12.

    importance[j] = sum over m < l_sel/d and n < l/d of p[(l_sel/d) * j + m - n]; as printed, p[(l_sel/d) * j - m - n].
    Outside its range, p is zero.
    """
    step, lead = nsa.l_sel // nsa.d, nsa.l // nsa.d
    weights = torch.zeros(n_compressed, n_selection)
    for column in range(n_selection):
        for m in range(step):
            for n in range(lead):
                i = step * column + (-m if as_printed else m) - n
                if 0 <= i < n_compressed:
                    weights[i, column] += 1
    return weights


def plot_reads_by_length(lengths: list[int], nsa: NSAConfig) -> Figure:
    """Plot the number of keys that the last query of a sequence reads, by branch, with dense attention. Log-log axes."""
    figure, axes = make_panel(
        7.6,
        4.4,
        f"Keys read by the query at the end of a sequence (l = {nsa.l}, d = {nsa.d}, "
        f"l_sel = {nsa.l_sel}, n_sel = {nsa.n_sel}, w = {nsa.w})",
    )
    labels = {"cmp": "compressed", "sel": "selected", "win": "window"}
    reads = [geometry.decode_reads(length, nsa) for length in lengths]
    for branch, label in labels.items():
        axes.plot(lengths, [r[branch] for r in reads], color=BRANCH_COLOURS[branch], label=label, marker=".", markersize=4)
    axes.plot(lengths, [sum(r.values()) for r in reads], color="black", label="NSA, all three", linewidth=2)
    axes.plot(lengths, lengths, color=DENSE, linestyle="--", label="dense")
    budget = nsa.n_sel * nsa.l_sel
    axes.axvline(budget, color=SEL, linestyle=":", linewidth=1)
    axes.annotate(
        f"n_sel · l_sel = {budget:,}:\nselection is dense up to here",
        (budget, 1),
        xytext=(6, 8),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set(xscale="log", yscale="log", xlabel="sequence length, tokens", ylabel="keys read")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    return figure


def _draw_box(axes: Axes, x: float, width: float, y: float, height: float, colour: str, label: str) -> None:
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
