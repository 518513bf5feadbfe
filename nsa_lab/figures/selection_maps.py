"""Pictures of the choice of blocks: what scores high, what is chosen, and what several layers choose."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.figures.style import FORCED, PALE, SEL, add_colour_legend, make_panel_row

KIND_COLOURS = {"forced": FORCED, "chosen by score": SEL, "passed over": PALE, "not begun": "white"}


def plot_importance(importance: Tensor, blocks: Tensor, nsa: NSAConfig, caption: str) -> Figure:
    """Importance [T, blocks] of one group beside the blocks that were chosen [T, n_sel], forced ones apart."""
    length, count = importance.shape
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(f"What scores high and what is chosen: {caption}", fontsize=11)
    left, right = make_panel_row(figure, 2)
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
    left.set_title(f"importance [T, blocks] = [{length:,}, {count:,}]", fontsize=9)
    _draw_kinds(right, blocks, count, nsa)
    right.set_title(f"chosen blocks [T, n_sel] = [{length:,}, {blocks.shape[1]}]", fontsize=9)
    for axes in (left, right):
        axes.set(xlabel="query t, token", ylabel=f"selection block j ({nsa.l_sel} tokens each)")
    add_colour_legend(right, KIND_COLOURS, inside=True)
    return figure


def plot_selection_by_layer(blocks: dict[int, Tensor], nsa: NSAConfig, caption: str) -> Figure:
    """The chosen blocks [T, n_sel] of one group in several layers, side by side."""
    figure = Figure(figsize=(3.1 * len(blocks) + 0.6, 3.6), layout="constrained")
    figure.suptitle(f"Blocks selected: {caption}", fontsize=10)
    panels = make_panel_row(figure, len(blocks))
    for n, (axes, (layer, chosen)) in enumerate(zip(panels, blocks.items(), strict=True)):
        length = chosen.shape[0]
        count = geometry.num_selection(length, nsa)
        _draw_kinds(axes, chosen, count, nsa)
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.set(xlabel="query t, token", ylabel="" if n else f"selection block j ({nsa.l_sel} tokens each)")
    add_colour_legend(panels[-1], KIND_COLOURS, inside=True)
    return figure


def classify_blocks(blocks: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """[T, blocks] of 0 not begun, 1 passed over, 2 chosen by score, 3 forced, from blocks [T, n_sel] padded with -1."""
    t = torch.arange(blocks.shape[0])
    kinds = geometry.candidate_blocks(t, n_blocks, nsa).long()
    chosen = torch.zeros(blocks.shape[0], n_blocks + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(blocks < 0, n_blocks, blocks).long(), True)
    kinds[chosen[:, :n_blocks]] = 2
    kinds[chosen[:, :n_blocks] & geometry.forced_blocks(t, n_blocks, nsa)] = 3
    return kinds


def _draw_kinds(axes: Axes, blocks: Tensor, n_blocks: int, nsa: NSAConfig) -> None:
    colours = ListedColormap(list(reversed(KIND_COLOURS.values())))
    kinds = classify_blocks(blocks, n_blocks, nsa).T.numpy()
    axes.imshow(
        kinds,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=colours,
        vmin=0,
        vmax=len(KIND_COLOURS) - 1,
        extent=(0, blocks.shape[0], -0.5, n_blocks - 0.5),
    )
