"""Parts of NSA for the attention benchmark, as callables over their inputs, with several kinds of block selection.

A model's branches, scores and indexer determine the parts, which are called as its layers call them. Tensors that a layer
computes before the operator are inputs: rotated heads, compressed keys and values, pooled index keys.

random: every query selects its free blocks independently and uniformly (the worst case for reuse). smooth: queries of a
64-token segment mostly share their selection (as in trained models). sink: every query selects the earliest blocks. real:
the model's selection for the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import nsa_lab.attention as attention
from nsa_lab.attention import geometry, reference
from nsa_lab.attention.compression import compress
from nsa_lab.attention.dispatch import ResolvedBackend, nsa_attention, score_and_select_blocks
from nsa_lab.attention.key_storage import round_keys
from nsa_lab.bench.harness import RandomInputs, make_leaves
from nsa_lab.config import ModelConfig, NSAConfig

SELECTION_KINDS = ("random", "smooth", "sink", "real")
_CHUNK = 4096


@dataclass(frozen=True)
class Part:
    """`run(*inputs)` returns one tensor. `useful_flops` counts its forward pass; 0 for a memory-bound part."""

    name: str
    backend: str
    run: Callable[..., Tensor]
    inputs: list[Tensor]
    useful_flops: float
    blocks: Tensor | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    """Branches and scores of the operator."""


def make_parts(
    T: int,
    B: int,
    H: int,
    G: int,
    D: int,
    nsa: NSAConfig,
    backends: Mapping[str, ResolvedBackend],
    device,
    dtype,
    seed: int = 0,
    Dv: int | None = None,
    model: ModelConfig | None = None,
) -> list[Part]:
    """Return the parts of `model`; default: compressed, choice, selected (per kind of selection), window, gate and whole.

    choice is the block selection. A part of an absent branch is missing, and so is the gate of a single branch. A model
    with a selection loss has the part selection loss. All parts use the same random inputs. Values have width `Dv`; None:
    `D`. `model`: branches, scores and indexer; its `nsa` is `nsa`, and its sizes of heads are not read. Default: all
    branches, and the scores of the compressed one.
    """
    Dv, model = Dv or D, model or ModelConfig(nsa=nsa)
    random = RandomInputs(device, dtype, seed)
    normal = random.normal
    backend = {part: resolved.backend for part, resolved in backends.items()}
    reads = geometry.mean_reads(T, nsa)
    flops_per_pair = 2 * (D + Dv) * H * B * T  # score and weighted value of one key per query

    q = normal(B, T, H, D)
    kv: dict[str, tuple[Tensor, Tensor]] = {}
    for branch in model.branches:
        if branch == "win" and "sel" in kv and model.shared_kv:
            kv[branch] = kv["sel"]
            continue
        S = geometry.num_compressed(T, nsa) if branch == "cmp" else T
        kv[branch] = normal(B, S, G, D), normal(B, S, G, Dv)
    outs = [normal(B, T, H, Dv) for _ in model.branches]
    gates = [random.gates(B, T, H, len(outs))] if len(outs) > 1 else []

    def compressed(q, k, v):
        return attention.compressed_attention(q, k, v, nsa, backend=backend["compressed"])[0]

    def select(q, k, lse=None):
        if lse is not None:
            return attention.select_blocks(q, k, lse, nsa, backend=backend["selection"])
        return score_and_select_blocks(q, prepare_index_keys(k, model, G), model.selection_nsa, backend=backends)

    def selected(q, k, v, blocks):
        return attention.selected_attention(q, k, v, blocks, nsa, backend=backend["selected"])[0]

    def window(q, k, v):
        return attention.window_attention(q, k, v, nsa, backend=backend["window"])[0]

    def selection_loss(q, k, k_sel, attention_q):
        keys, n_queries = prepare_index_keys(k, model, G), model.selection_queries
        nsa = model.selection_nsa
        return attention.selection_loss(q, keys, k_sel, nsa, attention_q=attention_q, n_queries=n_queries, backend=backends)

    names = list_whole_inputs(model)

    def whole(*inputs: Tensor) -> Tensor:
        blocks = select(*inputs[len(names) :]) if model.has_indexer else None
        _, *others = arrange_whole_inputs(model, inputs)
        return nsa_attention(inputs[0], *others, nsa=nsa, blocks=blocks, backend=backends)

    parts: list[Part] = []
    selection_flops, real_blocks, index_inputs = 0.0, None, []
    if "cmp" in kv:
        flops = flops_per_pair * reads["cmp"]
        parts.append(Part("compressed", backend["compressed"], compressed, make_leaves(q, *kv["cmp"]), flops, model=model))
    if model.scores:
        if model.has_indexer:
            n_keys, width = geometry.num_compressed(T, model.selection_nsa), model.index_width
            scoring = normal(B, T, G * model.indexer_heads, width), normal(B, n_keys, model.index_groups, width)
            index_inputs = [*scoring]
        else:
            scoring = q, kv["cmp" if model.scores == "compressed" else "sel"][0]
        select_inputs = [*scoring]
        with torch.no_grad():
            if model.scores == "compressed":
                lse = attention.compressed_attention(q, *kv["cmp"], nsa, backend=backend["compressed"])[1]
                select_inputs.append(lse)
            real_blocks = select(*select_inputs)
        # One score per query and index key.
        selection_reads = geometry.mean_reads(T, model.selection_nsa)["cmp"]
        selection_flops = 2 * scoring[0].shape[3] * scoring[0].shape[2] * B * T * selection_reads
        parts.append(Part("choice", backend["selection"], select, select_inputs, selection_flops, model=model))
        if model.has_selection_loss:
            loss_inputs = [*make_leaves(*scoring), kv["sel"][0], q]
            parts.append(Part("selection loss", backend["selection"], selection_loss, loss_inputs, 0.0, model=model))
        for kind in SELECTION_KINDS:
            blocks = real_blocks if kind == "real" else make_selection(kind, B, T, G, nsa, device, seed)
            inputs, flops = [*make_leaves(q, *kv["sel"]), blocks], flops_per_pair * reads["sel"]
            parts.append(Part(f"selected, {kind}", backend["selected"], selected, inputs, flops, blocks, model))
    if "win" in kv:
        flops = flops_per_pair * reads["win"]
        parts.append(Part("window", backend["window"], window, make_leaves(q, *kv["win"]), flops, model=model))
    if gates:
        gate = _get_gate(backends["combine"].backend)
        parts.append(Part("gate", backend["combine"], gate, make_leaves(*outs, *gates), 0.0, model=model))
    tensors = [q, *(x for pair in kv.values() for x in pair), *gates]
    parts.append(
        Part(
            "whole",
            "+".join(dict.fromkeys(backend.values())),
            whole,
            [*make_leaves(*tensors), *index_inputs],
            selection_flops + flops_per_pair * sum(reads[branch] for branch in model.branches),
            real_blocks,
            model,
        )
    )
    return parts


def prepare_index_keys(k: Tensor, model: ModelConfig, G: int) -> Tensor:
    """Return the keys that score the blocks, [B, N, G, D], from the keys that are an input of a part.

    Of an indexer: pooled index keys [B, N, index groups, D], which are rounded here. Of the mean key of each block: the
    keys of the selected branch, [B, T, G, D]. Of the compressed branch: its keys as they are.
    """
    if model.has_indexer:
        return round_keys(k, model.indexer_dtype).expand(-1, -1, G, -1)
    return compress(k, model.selection_nsa) if model.scores == "mean_key" else k


def list_whole_inputs(model: ModelConfig) -> list[str]:
    """Return the names of the inputs of the part whole that have a gradient, arguments of `nsa_attention`, in order."""
    keys_and_values = [f"{kind}_{branch}" for branch in model.branches for kind in "kv"]
    return ["q", *keys_and_values, *(["gates"] if len(model.branches) > 1 else [])]


def arrange_whole_inputs(model: ModelConfig, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the tensors of `nsa_attention` in its order from the inputs of the part whole; None for absent ones."""
    given = dict(zip(list_whole_inputs(model), inputs, strict=False))  # inputs of the indexer follow
    return [given.get(name) for name in list_whole_inputs(ModelConfig())]


def make_selection(kind: str, B: int, T: int, G: int, nsa: NSAConfig, device, seed: int = 0) -> Tensor:
    """Return blocks int32 [B, T, G, n_sel] of one kind, in the format of `select_blocks`."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    n = geometry.num_selection(T, nsa)
    blocks = []
    for first in range(0, T, _CHUNK):
        n_queries = min(_CHUNK, T - first)
        if kind == "sink":
            importance = -torch.arange(n, device=device, dtype=torch.float32).expand(B, n_queries, G, n)
        else:
            importance = torch.rand(B, n_queries, G, n, device=device, generator=generator)
        if kind == "smooth":
            n_segments = -(-n_queries // 64)
            shared = torch.rand(B, n_segments, G, n, device=device, generator=generator).repeat_interleave(64, 1)[
                :, :n_queries
            ]
            importance = shared + 0.05 * importance
        blocks.append(reference.select_by_importance(importance, nsa, first))
    return torch.cat(blocks, 1)


def _get_gate(backend: str) -> Callable[..., Tensor]:
    if backend == "triton":
        from nsa_lab.attention import kernels

        return kernels.combine
    return reference.combine
