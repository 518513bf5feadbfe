"""Choices of blocks to hold the model's own against, and how much of what its heads look for each of them catches.

Every choice here is made by the definition's own rule (`reference.choose`: forced blocks, n_sel in all, ties to the lower
index); only the scores differ. Selection blocks are those of one whole document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from nsa_lab.attention import geometry, reference, score_and_select_blocks
from nsa_lab.config import NSAConfig
from nsa_lab.model import AttentionInputs, Block, NSATransformer, SelectionInputs, SparseAttention

# Elements of the largest temporary tensor of scores.
MAX_SCORE_ELEMENTS = 1 << 25


def select_model_blocks(scoring: SelectionInputs, layer: SparseAttention) -> Tensor:
    """The blocks that the model chooses, int32 [B, T, G, n_sel]; `scoring` as `SparseAttention.scoring` gives it."""
    assert layer.backends is not None, "a model resolves its backends when it is built"
    return score_and_select_blocks(*scoring, backend=layer.backends)


def select_random_blocks(q: Tensor, n_groups: int, nsa: NSAConfig, generator: torch.Generator) -> Tensor:
    """Blocks by the throw of a die, int32 [B, T, G, n_sel]; `generator` is one of q's device."""
    # There, since there are many: at 32,768 tokens a CPU takes some .2 s for those of one layer and sequence.
    scores = torch.rand(*_get_score_shape(q, n_groups, nsa), generator=generator, device=q.device)
    return reference.select_by_importance(scores, nsa)


def select_nearest_blocks(q: Tensor, n_groups: int, nsa: NSAConfig) -> Tensor:
    """The latest blocks, int32 [B, T, G, n_sel]."""
    shape = _get_score_shape(q, n_groups, nsa)
    return reference.select_by_importance(torch.arange(shape[-1], dtype=torch.float32, device=q.device).expand(shape), nsa)


def select_oracle_blocks(q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Tensor:
    """The blocks that hold most of what the selected branch would attend to if it read everything."""
    return torch.cat(
        [reference.select_by_importance(mass, nsa, first) for first, mass in _iterate_block_mass(q, k_sel, nsa)], dim=1
    )


def compute_block_mass(q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Tensor:
    """Attention over all keys <= t, summed over each selection block and the heads of a group.

    q [B, T, H, D], k_sel [B, T, G, D] -> float32 [B, T, G, blocks]; a row sums to the heads of a group.
    """
    return torch.cat([mass for _, mass in _iterate_block_mass(q, k_sel, nsa)], dim=1)


@torch.no_grad()
def measure_selection_quality(model: NSATransformer, tokens: Tensor, seed: int = 0) -> dict[str, list[float]] | None:
    """By layer, on tokens [B, T]: the share of the oracle's attention mass that a choice catches.

    `chosen`, `nearest` and `random` are shares of all that the oracle catches; `chosen_free` and its kind, of what it
    catches beyond the forced blocks, which every choice reads. Over the queries that have a choice, those past n_sel
    blocks; None if there are none. Raises ValueError for a dense model.
    """
    check_is_sparse(model)
    nsa = model.config.nsa
    if tokens.shape[1] <= nsa.n_sel * nsa.l_sel:
        return None
    generator = torch.Generator(tokens.device).manual_seed(seed)
    by_layer = [_measure_layer_quality(*seen, generator) for seen in _iterate_layers(model, tokens)]
    return {name: [layer[name] for layer in by_layer] for name in by_layer[0]}


def check_is_sparse(model: NSATransformer) -> None:
    """Raises ValueError for a dense model."""
    if model.config.attention != "nsa":
        raise ValueError("a dense model chooses no blocks and has no branches; use model.attention: nsa")


def get_backends(layer: SparseAttention) -> dict[str, str]:
    """The backend of every part of a layer of an `NSATransformer`, by name."""
    assert layer.backends is not None, "a model resolves its backends when it is built"
    return {part: choice.backend for part, choice in layer.backends.items()}


def _iterate_layers(
    model: NSATransformer, tokens: Tensor
) -> Iterator[tuple[AttentionInputs, SelectionInputs, SparseAttention]]:
    """What attention is given, and what chooses, in every layer of an undisturbed forward pass."""
    x, rotary = model.prepare_inputs(tokens)
    for block in cast("list[Block]", model.blocks):
        layer = cast(SparseAttention, block.attention)
        normed = block.attention_norm(x)
        inputs = layer.project(normed, rotary)
        yield inputs, layer.project_selection_inputs(normed, inputs, rotary), layer
        x, _ = block(x, rotary)


def _measure_layer_quality(
    inputs: AttentionInputs, scoring: SelectionInputs, layer: SparseAttention, generator: torch.Generator
) -> dict[str, float]:
    q, k_sel, nsa = inputs[0], inputs[3], layer.config.nsa
    G, first = k_sel.shape[2], nsa.n_sel * nsa.l_sel
    choices = {
        "chosen": select_model_blocks(scoring, layer),
        "nearest": select_nearest_blocks(q, G, nsa),
        "random": select_random_blocks(q, G, nsa, generator),
        "oracle": select_oracle_blocks(q, k_sel, nsa),
    }
    caught = dict.fromkeys((*choices, "forced"), 0.0)
    for start, mass in _iterate_block_mass(q, k_sel, nsa):
        t = geometry.positions(start, start + mass.shape[1], q.device)
        judged = t >= first
        for name, blocks in choices.items():
            own = blocks[:, start : start + mass.shape[1]].long()
            held = mass.gather(-1, own.clamp_min(0)) * (own >= 0)
            caught[name] += held[:, judged].double().sum().item()
        forced = geometry.forced_blocks(t, mass.shape[-1], nsa)[:, None]
        caught["forced"] += (mass * forced)[:, judged].double().sum().item()
    best, always = caught.pop("oracle"), caught.pop("forced")
    shares = {name: held / best for name, held in caught.items()}
    return shares | {f"{name}_free": (held - always) / max(best - always, 1e-12) for name, held in caught.items()}


def _iterate_block_mass(q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Iterator[tuple[int, Tensor]]:
    """`block_mass` in pieces: the first query of each, and float32 [B, queries, G, blocks]."""
    B, T, H, D = q.shape
    G, blocks = k_sel.shape[2], geometry.num_selection(T, nsa)
    rows = max(1, MAX_SCORE_ELEMENTS // (B * H * T))
    for first in range(0, T, rows):
        end = min(first + rows, T)
        part = q[:, first:end].unflatten(2, (G, H // G))
        # Keys past the piece's last query are masked for all of it, so they are not read: half of the work.
        scores = torch.einsum("btghd,bsgd->btghs", part, k_sel[:, :end]).float() * D**-0.5
        t, s = (geometry.positions(a, end, q.device) for a in (first, 0))
        p = scores.masked_fill_((s > t[:, None])[None, :, None, None], float("-inf")).softmax(-1).sum(3)
        yield first, torch.nn.functional.pad(p, (0, blocks * nsa.l_sel - end)).unflatten(-1, (blocks, nsa.l_sel)).sum(-1)


def _get_score_shape(q: Tensor, n_groups: int, nsa: NSAConfig) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[1], n_groups, geometry.num_selection(q.shape[1], nsa)
