"""Plots of block selection: importance and selected blocks of one group, and the selected blocks of several layers."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.figures.style import FORCED, PALE, SEL, add_colour_legend, stack_panels

KIND_COLOURS = {"forced": FORCED, "selected by score": SEL, "not selected": PALE, "not started": "white"}


def plot_importance(importance: Tensor, blocks: Tensor, nsa: NSAConfig, caption: str) -> Figure:
    """Plot the importance [T, n_blocks] of one group, and its selected blocks [T, n_sel] with the forced ones marked."""
    length, n_blocks = importance.shape
    figure = Figure(figsize=(7.5, 7.8), layout="constrained")
    figure.suptitle(f"Block importance and selection: {caption}", fontsize=11)
    upper, lower = stack_panels(figure, 2)
    is_candidate = geometry.candidate_blocks(torch.arange(length), n_blocks, nsa)
    positive = importance.clamp_min(1e-6).masked_fill(~is_candidate, float("nan"))
    largest = float(importance.max())
    image = upper.imshow(
        positive.T.numpy(),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="cividis",
        norm=LogNorm(vmin=max(largest * 1e-3, 1e-6), vmax=max(largest, 1e-5)),
        extent=(0, length, -0.5, n_blocks - 0.5),
    )
    figure.colorbar(image, ax=upper, label="importance, sum over heads (log)")
    upper.set_title(f"importance [T, blocks] = [{length:,}, {n_blocks:,}]", fontsize=9)
    _draw_kinds(lower, blocks, n_blocks, nsa)
    lower.set_title(f"selected blocks [T, n_sel] = [{length:,}, {blocks.shape[1]}]", fontsize=9)
    for axes in (upper, lower):
        axes.set(xlabel="query t, token", ylabel=f"selection block j ({nsa.l_sel} tokens each)")
    add_colour_legend(lower, KIND_COLOURS, inside=True)
    return figure


def plot_selection_by_layer(blocks: dict[int, Tensor], nsa: NSAConfig, caption: str) -> Figure:
    """Plot the selected blocks [T, n_sel] of one group in several layers, two panels per row."""
    columns = min(len(blocks), 2)
    figure = Figure(figsize=(3.6 * columns + 0.6, 0.4 + 3.2 * -(-len(blocks) // columns)), layout="constrained")
    figure.suptitle(f"Blocks selected: {caption}", fontsize=10)
    panels = stack_panels(figure, len(blocks), columns)
    for index, (axes, (layer, selected)) in enumerate(zip(panels, blocks.items(), strict=True)):
        length = selected.shape[0]
        n_blocks = geometry.num_selection(length, nsa)
        _draw_kinds(axes, selected, n_blocks, nsa)
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.set(xlabel="query t, token", ylabel="" if index % columns else f"selection block j ({nsa.l_sel} tokens each)")
    add_colour_legend(panels[-1], KIND_COLOURS, inside=True)
    return figure


def classify_blocks(blocks: Tensor, n_blocks: int, nsa: NSAConfig) -> Tensor:
    """Return [T, n_blocks]: 0 not started, 1 not selected, 2 selected by score, 3 forced.

    `blocks` [T, n_sel] is padded with -1.
    """
    t = torch.arange(blocks.shape[0])
    kinds = geometry.candidate_blocks(t, n_blocks, nsa).long()
    is_selected = torch.zeros(blocks.shape[0], n_blocks + 1, dtype=torch.bool)
    is_selected.scatter_(1, torch.where(blocks < 0, n_blocks, blocks).long(), True)
    kinds[is_selected[:, :n_blocks]] = 2
    kinds[is_selected[:, :n_blocks] & geometry.forced_blocks(t, n_blocks, nsa)] = 3
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
