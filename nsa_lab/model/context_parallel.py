"""Layers whose text is shared by several ranks: each computes its own queries over the keys of all (`ContextShard`).

Per layer there are two all-gathers: of index keys, if the layer has an indexer, and of keys and values, which are on their
way while blocks are selected. Both follow the convolution of keys and RoPE. The convolution reads the key before a chunk,
which another rank has, so a small all-gather of the last key of every chunk precedes it. Compression, which is cheap next
to attention, is computed on every rank for the whole text. In the backward pass each all-gather is an all-to-all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import compress, dense_attention, nsa_attention, score_and_select_blocks, selection_loss
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.context_parallel import ContextShard, PendingRows, slice_keys, split_queries
from nsa_lab.attention.layout import Layout
from nsa_lab.attention.selection_loss import HeldRows, select_held_rows
from nsa_lab.config import BRANCHES
from nsa_lab.model.head_projections import rotate_heads, split_heads, split_projection
from nsa_lab.model.layers import Rotary
from nsa_lab.model.ngrams import NgramEmbedding

if TYPE_CHECKING:
    from nsa_lab.model.attention_layers import DenseAttention, SparseAttention
    from nsa_lab.model.indexer import Indexer


def check_shard(shard: ContextShard, n_tokens: int) -> None:
    """Raise ValueError unless an input of `n_tokens` tokens holds all queries of `shard`."""
    if shard.n_queries != n_tokens:
        raise ValueError(
            f"span = {shard}: this rank has {shard.n_queries} tokens, but the input has {n_tokens}; pass shard.take(tokens)"
        )


def compute_ngram_rows(ngrams: NgramEmbedding, tokens: Tensor, shard: ContextShard) -> Tensor:
    """Return `NgramEmbedding.compute_rows` of this rank's tokens, int64 [B, n_queries]: [B, n_queries, n - 1].

    The tokens before each chunk come from other ranks, so the tokens of the text are gathered. Collective.
    """
    n_previous = ngrams.max_n - 1
    # Tokens before the text are arbitrary: their position excludes them.
    text = pad(shard.gather(tokens), (n_previous, 0))
    positions = shard.text.positions(tokens.device)
    rows = [
        ngrams.compute_rows(
            text[:, n_previous + part.start : n_previous + part.stop],
            positions[part],
            text[:, part.start : part.start + n_previous],
        )
        for part in shard.ranges
    ]
    return torch.cat(rows, dim=1)


class OwnProjections(NamedTuple):
    """Projections of this rank's tokens, rotated. Keys and values are those of every set and group."""

    q: Tensor
    """[B, T, H, d_k]"""
    keys_and_values: Tensor
    """[B, T, sets G (d_k + d_v)], all keys before all values."""
    index_q: Tensor | None
    """`IndexerOutput.q`"""
    index_k: Tensor | None
    """`IndexerOutput.k`, [B, T, index groups * D]"""


def attend_shard(
    layer: SparseAttention,
    x: Tensor,
    rotary: Rotary,
    shard: ContextShard,
    layouts: tuple[Layout, ...] | None,
    blocks: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output [B, T, H, d_v] of this rank's tokens, its share of the selection loss, and the selected blocks.

    x [B, T, C]: this rank's tokens. `rotary`, `layouts`: of the whole text. `blocks`: as in `SparseAttention.forward`.
    Collective over the group.
    """
    # Traced by torch.compile, except for the functions that read the shard.
    c, indexer = layer.config, layer.indexer
    own = _project(layer, indexer, x, rotary, shard, layouts)
    # Index keys first: blocks are selected while keys and values are on their way.
    pending_index = None if own.index_k is None else _start_gather(shard, own.index_k)
    pending = _start_gather(shard, own.keys_and_values)
    gates = layer.compute_gates(x)
    gates = None if gates is None else gates.to(own.q.dtype)
    scoring_q, scoring_k = own.q, None
    if indexer is not None and own.index_q is not None and pending_index is not None:
        index_k = _finish_gather(pending_index).unflatten(2, (-1, c.index_width))
        index_k = indexer.compress(index_k, rotary, None, layouts[-1] if layouts else None)
        scoring_q, scoring_k = own.index_q, index_k.expand(-1, -1, c.n_kv_groups, -1)
        if not (layer.training and layer.trains_densely):
            blocks = _select_blocks(layer, scoring_q, scoring_k, shard)
    by_branch, key_scoring_k = _split_branches(layer, _finish_gather(pending), layouts, needs_scoring=blocks is None)
    scoring_k = key_scoring_k if scoring_k is None else scoring_k
    k_sel, v_sel = by_branch[1]
    loss = None
    if layer.training and c.has_selection_loss and scoring_k is not None and k_sel is not None:
        layout = layouts[-1] if layouts else None
        nsa, backend, held = layer.selection_nsa, layer.backends or "auto", _select_held_rows(shard, c.selection_queries, x)
        loss = selection_loss(
            scoring_q, scoring_k, k_sel, nsa, attention_q=own.q, layout=layout, held=held, backend=backend
        )
    if layer.training and layer.trains_densely and k_sel is not None and v_sel is not None:
        return _attend_dense_pieces(own.q, k_sel, v_sel, shard), loss, x.new_empty(0, dtype=torch.int32)
    if blocks is None and scoring_k is not None and c.scores != "compressed":
        blocks = _select_blocks(layer, scoring_q, scoring_k, shard)
    out = _attend_pieces(layer, own.q, by_branch, gates, shard, blocks)
    return out, loss, blocks if c.indexer_every > 1 else None


def _project(
    layer: SparseAttention | DenseAttention,
    indexer: Indexer | None,
    x: Tensor,
    rotary: Rotary,
    shard: ContextShard,
    layouts: tuple[Layout, ...] | None,
) -> OwnProjections:
    """Project this rank's tokens x as `project_heads` and `Indexer.forward` do, each range after the token before it."""
    c = layer.config
    qkv, index_qk = layer.qkv(x), None if indexer is None else indexer.qk(x.detach())
    lengths, rotaries, starts = _split_tables(shard, rotary, layouts[0].is_document_start if layouts else None)
    previous, previous_index = [None for _ in lengths], [None for _ in lengths]
    if layer.convolution:
        qk, values = split_projection(qkv, c)
        rows = [qk[:, :, c.n_heads :].flatten(2)]
        if index_qk is not None:
            rows.append(index_qk[:, :, c.n_index_queries * c.index_width :])
        n_sets = len(c.kv_sets)
        ends = [end.split([part.shape[2] for part in rows], dim=2) for end in _find_previous(shard, torch.cat(rows, dim=2))]
        previous = [k.unflatten(2, (n_sets, values.shape[2] // n_sets, c.d_k)) for k, *_ in ends]
        if index_qk is not None:
            previous_index = [k.unflatten(2, (1, -1, c.index_width)) for _, k in ends]
    heads = [
        rotate_heads(split_heads(part, c, layer.convolution, *at_start), c, table)
        for part, table, *at_start in zip(qkv.split(lengths, dim=1), rotaries, starts, previous, strict=True)
    ]
    rows = [torch.cat([k.flatten(2) for k in (*part.keys, *part.values)], dim=2) for part in heads]
    q, keys_and_values = torch.cat([part.q for part in heads], dim=1), torch.cat(rows, dim=1)
    if indexer is None or index_qk is None:
        return OwnProjections(q, keys_and_values, None, None)
    outputs = [
        indexer.split_and_rotate(*inputs)
        for inputs in zip(index_qk.split(lengths, dim=1), rotaries, starts, previous_index, strict=True)
    ]
    index_q, index_k = (torch.cat(parts, dim=1) for parts in zip(*((o.q, o.k.flatten(2)) for o in outputs), strict=True))
    return OwnProjections(q, keys_and_values, index_q, index_k)


# Each batch has other pieces. Traced, their bounds would be constants, and every batch would be compiled again.
@disable_compile
def _split_tables(
    shard: ContextShard, rotary: Rotary, is_document_start: Tensor | None
) -> tuple[list[int], list[Rotary], list[Tensor | None]]:
    """Return the length of every range of this rank, and its rows of the RoPE tables and of `is_document_start`."""
    lengths = [part.stop - part.start for part in shard.ranges]
    rotaries = [(rotary[0][part], rotary[1][part]) for part in shard.ranges]
    return lengths, rotaries, [None if is_document_start is None else is_document_start[part] for part in shard.ranges]


@disable_compile
def _find_previous(shard: ContextShard, x: Tensor) -> tuple[Tensor, ...]:
    return shard.select_previous(shard.start_gather_ends(x).wait())


@disable_compile
def _start_gather(shard: ContextShard, x: Tensor) -> PendingRows:
    return shard.start_gather(x)


@disable_compile
def _finish_gather(pending: PendingRows) -> Tensor:
    return pending.wait()


@disable_compile
def _select_held_rows(shard: ContextShard, n_queries: int | None, x: Tensor) -> HeldRows:
    return select_held_rows(shard, n_queries, x.device)


KeysAndValues = tuple[Tensor | None, Tensor | None]
"""Of a branch; None if it does not exist."""


def _split_branches(
    layer: SparseAttention, keys_and_values: Tensor, layouts: tuple[Layout, ...] | None, *, needs_scoring: bool
) -> tuple[tuple[KeysAndValues, ...], Tensor | None]:
    """Return keys and values of the branches cmp, sel and win, and compressed keys of a branch that score the blocks.

    `keys_and_values`: as in `OwnProjections`, of the whole text. No keys of a branch score the blocks if none are selected,
    or if an indexer or an earlier layer has selected them.
    """
    c = layer.config
    layout, selection_layout = (layouts[0], layouts[-1]) if layouts else (None, None)
    n_heads = len(c.kv_sets) * c.n_kv_groups
    keys, values = keys_and_values.split([n_heads * c.d_k, n_heads * c.d_v], dim=2)
    sets = (x.unflatten(2, (n_heads, width)).split(c.n_kv_groups, dim=2) for x, width in ((keys, c.d_k), (values, c.d_v)))
    by_branch = {name: pair for names, *pair in zip(c.kv_sets, *sets, strict=True) for name in names}
    if "cmp" in by_branch:
        own_keys, own_values = by_branch["cmp"]
        by_branch["cmp"] = [
            compress(own_keys, c.nsa, layer.phi_k, layout=layout),
            compress(own_values, c.nsa, layer.phi_v, layout=layout),
        ]
    branches = tuple((by_branch[name][0], by_branch[name][1]) if name in by_branch else (None, None) for name in BRANCHES)
    (k_cmp, _), (k_sel, _), _ = branches
    scoring_k = None
    if needs_scoring and c.scores == "compressed":
        scoring_k = k_cmp
    elif needs_scoring and c.scores == "mean_key" and k_sel is not None:
        scoring_k = compress(k_sel, layer.selection_nsa, layout=selection_layout)
    return branches, scoring_k


@disable_compile
def _select_blocks(layer: SparseAttention, q: Tensor, k: Tensor, shard: ContextShard) -> Tensor:
    nsa, backend = layer.selection_nsa, layer.backends or "auto"
    selected = [
        score_and_select_blocks(
            q[:, piece.query_rows], k[:, piece.compressed_rows(shard.text, nsa)], nsa, backend=backend, span=piece.span
        )
        for piece in shard.pieces
    ]
    return torch.cat(selected, dim=1)


@disable_compile
def _attend_pieces(
    layer: SparseAttention,
    q: Tensor,
    by_branch: tuple[KeysAndValues, ...],
    gates: Tensor | None,
    shard: ContextShard,
    blocks: Tensor | None,
) -> Tensor:
    nsa, backend, pieces = layer.config.nsa, layer.backends or "auto", shard.pieces
    compressed_rows = [piece.compressed_rows(shard.text, nsa) for piece in pieces]
    key_rows = [piece.key_rows for piece in pieces]
    compressed, selected, window = by_branch
    inputs = zip(
        split_queries(q, pieces),
        *(slice_keys(x, compressed_rows) for x in compressed),
        *(slice_keys(x, key_rows) for x in (*selected, *window)),
        split_queries(gates, pieces),
        split_queries(blocks, pieces),
        strict=True,
    )
    outs: list[Tensor] = []
    for piece, tensors in zip(pieces, inputs, strict=True):
        own_q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, own_gates, own_blocks = tensors
        branches = own_q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, own_gates
        outs.append(nsa_attention(*branches, nsa, blocks=own_blocks, backend=backend, span=piece.span))
    return torch.cat(outs, dim=1)


def attend_dense_shard(
    layer: DenseAttention, x: Tensor, rotary: Rotary, shard: ContextShard, layouts: tuple[Layout, ...] | None
) -> Tensor:
    """Return causal attention of this rank's tokens, [B, T, H, d_v]; arguments as in `attend_shard`. Collective."""
    c = layer.config
    own = _project(layer, None, x, rotary, shard, layouts)
    text = _finish_gather(_start_gather(shard, own.keys_and_values))
    k, values = text.split([c.n_kv_groups * c.d_k, c.n_kv_groups * c.d_v], dim=2)
    k, values = k.unflatten(2, (-1, c.d_k)), values.unflatten(2, (-1, c.d_v))
    return _attend_dense_pieces(own.q, k, values, shard, layer.backends["dense"].backend)


@disable_compile
def _attend_dense_pieces(q: Tensor, k: Tensor, v: Tensor, shard: ContextShard, backend: str = "torch") -> Tensor:
    """Return causal attention of this rank's queries to the keys of the text."""
    pieces = shard.pieces
    key_rows = [piece.key_rows for piece in pieces]
    inputs = zip(split_queries(q, pieces), slice_keys(k, key_rows), slice_keys(v, key_rows), strict=True)
    outs = [
        dense_attention(*tensors, backend=backend, span=piece.span) for piece, tensors in zip(pieces, inputs, strict=True)
    ]
    return torch.cat(outs, dim=1)
