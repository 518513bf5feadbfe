"""Block selections to compare with the model's selection, and the attention mass that each of them covers.

All selections use the rule of the definition (`reference.select_by_importance`: forced blocks, n_sel blocks in total, ties
to the lower index) and differ only in the scores. The layout is one full document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from nsa_lab.attention import geometry, reference, score_and_select_blocks
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import Block, NSATransformer, SelectionInputs, SparseAttention

# Maximum elements of a temporary tensor of scores.
MAX_SCORE_ELEMENTS = 1 << 25
# Dense attention of all queries would take minutes for a text of 65,536 tokens; of longer texts, parts are measured.
MAX_QUALITY_QUERIES = 1 << 13


def select_model_blocks(scoring: SelectionInputs, layer: SparseAttention) -> Tensor:
    """Return the blocks that the model selects, int32 [B, T, G, n_sel]; see `SparseAttention.project_selection_inputs`."""
    assert layer.backends is not None, "NSATransformer resolves backends at construction"
    return score_and_select_blocks(*scoring, backend=layer.backends)


def select_random_blocks(q: Tensor, n_groups: int, nsa: NSAConfig, generator: torch.Generator) -> Tensor:
    """Return randomly selected blocks, int32 [B, T, G, n_sel]; `generator` is on the device of q."""
    # Sample on the device of q: on a CPU, 32,768 tokens take about 0.2 s per layer and sequence.
    scores = torch.rand(*_get_score_shape(q, n_groups, nsa), generator=generator, device=q.device)
    return reference.select_by_importance(scores, nsa)


def select_nearest_blocks(q: Tensor, n_groups: int, nsa: NSAConfig) -> Tensor:
    """Return the latest blocks, int32 [B, T, G, n_sel]."""
    shape = _get_score_shape(q, n_groups, nsa)
    return reference.select_by_importance(torch.arange(shape[-1], dtype=torch.float32, device=q.device).expand(shape), nsa)


def select_oracle_blocks(q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the blocks with the largest attention mass of dense attention, int32 [B, T, G, n_sel]."""
    return torch.cat(
        [reference.select_by_importance(mass, nsa, first) for first, mass in _iterate_block_mass(q, k_sel, nsa)], dim=1
    )


def compute_block_mass(q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the dense attention probability of each selection block, summed over the heads of a group.

    q [B, T, H, D], k_sel [B, T, G, D] -> float32 [B, T, G, n_blocks]; each row sums to H / G.
    """
    return torch.cat([mass for _, mass in _iterate_block_mass(q, k_sel, nsa)], dim=1)


@torch.no_grad()
def measure_selection_quality(model: NSATransformer, tokens: Tensor, seed: int = 0) -> dict[str, list[float]] | None:
    """Return, per layer, the attention mass of each selection as a fraction of the mass of the oracle, on tokens [B, T].

    `chosen`, `nearest`, `random`: fraction of the total mass. `chosen_free` and so on: fraction of the mass outside the
    forced blocks, which all selections contain. Computed over queries after the first n_sel blocks, since earlier queries
    select all blocks; None if there are none. Of more than `MAX_QUALITY_QUERIES` tokens, over about as many queries in
    evenly spaced chunks. Raises ValueError for a dense model and for one without a selected branch.
    """
    check_is_sparse(model)
    if reason := explain_no_selection(model.config):
        raise ValueError(reason)
    nsa = model.config.nsa
    if tokens.shape[1] <= nsa.n_sel * nsa.l_sel:
        return None
    generator = torch.Generator(tokens.device).manual_seed(seed)
    by_layer = [_measure_layer_quality(*layer_inputs, generator) for layer_inputs in _iterate_layers(model, tokens)]
    return {name: [layer[name] for layer in by_layer] for name in by_layer[0]}


def check_is_sparse(model: NSATransformer) -> None:
    """Raise ValueError for a dense model."""
    if model.config.attention != "nsa":
        raise ValueError(
            "expected an NSA model, got a dense model without block selection and branches; use model.attention: nsa"
        )


def explain_no_selection(config: ModelConfig) -> str | None:
    """Return why a model selects no blocks, or None if it does."""
    if "sel" in config.branches:
        return None
    return f"model.branches = {list(config.branches)} has no selected branch, so no blocks are selected; train with sel"


def get_backends(layer: SparseAttention) -> dict[str, str]:
    """Return {part: backend} of a layer of an `NSATransformer`."""
    assert layer.backends is not None, "NSATransformer resolves backends at construction"
    return {part: resolved.backend for part, resolved in layer.backends.items()}


def _iterate_layers(model: NSATransformer, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, NSAConfig]]:
    """Yield q, k_sel, the selected blocks and the configuration of every layer in an unmodified forward pass."""
    x, rotary = model.prepare_inputs(tokens)
    selected: Tensor | None = None
    for block in cast("list[Block]", model.blocks):
        layer = cast(SparseAttention, block.attention)
        normalized = block.attention_norm(x)
        inputs = layer.project(normalized, rotary)
        scoring = layer.project_selection_inputs(normalized, inputs, rotary)
        # A layer without an indexer has the blocks of the last layer with one.
        earlier, selected = (selected, selected) if scoring is None else (None, select_model_blocks(scoring, layer))
        q, _, _, k_sel, *_ = inputs
        assert k_sel is not None and selected is not None, "only models with a selected branch get here"
        yield q, k_sel, selected, layer.config.nsa
        x, _ = block(x, rotary, blocks=earlier)


def _measure_layer_quality(
    q: Tensor, k_sel: Tensor, selected: Tensor, nsa: NSAConfig, generator: torch.Generator
) -> dict[str, float]:
    G, first_query = k_sel.shape[2], nsa.n_sel * nsa.l_sel
    selections = {
        "chosen": selected,
        "nearest": select_nearest_blocks(q, G, nsa),
        "random": select_random_blocks(q, G, nsa, generator),
    }
    covered = dict.fromkeys((*selections, "oracle", "forced"), 0.0)
    for start, mass in _iterate_block_mass(q, k_sel, nsa, stride=-(-q.shape[1] // MAX_QUALITY_QUERIES)):
        end = start + mass.shape[1]
        t = geometry.positions(start, end, q.device)
        is_counted = t >= first_query
        chunks = {name: blocks[:, start:end] for name, blocks in selections.items()}
        for name, blocks in {**chunks, "oracle": reference.select_by_importance(mass, nsa, start)}.items():
            indices = blocks.long()
            mass_covered = mass.gather(-1, indices.clamp_min(0)) * (indices >= 0)
            covered[name] += mass_covered[:, is_counted].double().sum().item()
        forced = geometry.forced_blocks(t, mass.shape[-1], nsa)[:, None]
        covered["forced"] += (mass * forced)[:, is_counted].double().sum().item()
    oracle, forced_mass = covered.pop("oracle"), covered.pop("forced")
    fractions = {name: mass_covered / oracle for name, mass_covered in covered.items()}
    return fractions | {
        f"{name}_free": (mass_covered - forced_mass) / max(oracle - forced_mass, 1e-12)
        for name, mass_covered in covered.items()
    }


def _iterate_block_mass(q: Tensor, k_sel: Tensor, nsa: NSAConfig, stride: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield `compute_block_mass` in chunks: the first query, and float32 [B, queries, G, n_blocks].

    `stride`: of that many chunks, the last one; the last chunk of all is always one of them.
    """
    B, T, H, D = q.shape
    G, n_blocks = k_sel.shape[2], geometry.num_selection(T, nsa)
    n_queries = max(1, MAX_SCORE_ELEMENTS // (B * H * T))
    for first in sorted(range(0, T, n_queries)[::-stride]):
        end = min(first + n_queries, T)
        q_chunk = q[:, first:end].unflatten(2, (G, H // G))
        # Keys after the last query of the chunk are masked for the entire chunk; skipping them saves half of the work.
        scores = torch.einsum("btghd,bsgd->btghs", q_chunk, k_sel[:, :end]).float() * D**-0.5
        t, s = (geometry.positions(start, end, q.device) for start in (first, 0))
        p = scores.masked_fill_((s > t[:, None])[None, :, None, None], float("-inf")).softmax(-1).sum(3)
        yield (
            first,
            torch.nn.functional.pad(p, (0, n_blocks * nsa.l_sel - end)).unflatten(-1, (n_blocks, nsa.l_sel)).sum(-1),
        )


def _get_score_shape(q: Tensor, n_groups: int, nsa: NSAConfig) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[1], n_groups, geometry.num_selection(q.shape[1], nsa)
