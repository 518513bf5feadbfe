"""Layers whose text is shared by several ranks: each computes its own queries over the keys of all (`ContextShard`).

Per layer there is one all-gather of the projected keys, values and index keys, before the convolution of keys, RoPE and
compression. Every rank repeats these on the whole text: they are linear in its length and cheap next to attention, and the
tokens at the ends of a chunk then need nothing from their neighbours. The backward pass has one all-to-all. The gates and
RoPE of queries overlap with both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_lab.attention import compress, dense_attention, nsa_attention, score_and_select_blocks, selection_loss
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.context_parallel import ContextShard, PendingRows, slice_keys, split_queries
from nsa_lab.attention.layout import Layout
from nsa_lab.attention.selection_loss import HeldRows, select_held_rows
from nsa_lab.config import BRANCHES
from nsa_lab.model.layers import Rotary, convolve_keys, rotate
from nsa_lab.model.ngrams import NgramEmbedding

if TYPE_CHECKING:
    from nsa_lab.model.attention_layers import DenseAttention, SparseAttention


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


def attend_shard(
    layer: SparseAttention,
    qk: Tensor,
    values: Tensor,
    x: Tensor,
    rotary: Rotary,
    shard: ContextShard,
    layouts: tuple[Layout, ...] | None,
    blocks: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output [B, T, H, d_v] of this rank's tokens, its share of the selection loss, and the selected blocks.

    qk [B, T, H + sets G, d_k] and values [B, T, sets G, d_v]: the projections of x [B, T, C], as from `split_projection`.
    `rotary`, `layouts`: of the whole text. `blocks`: as in `SparseAttention.forward`. Collective over the group.
    """
    # Traced by torch.compile, except for the functions that read the shard.
    c, indexer = layer.config, layer.indexer
    q, k = qk.split([c.n_heads, values.shape[2]], dim=2)
    index_q, index_k = indexer.split(indexer.qk(x.detach())) if indexer is not None else (None, None)
    rows = [part.flatten(2) for part in (k, values, index_k) if part is not None]
    trains = layer.training and c.has_selection_loss
    own_rotary, pending, held = _start_gather(shard, rotary, torch.cat(rows, dim=2), c.selection_queries if trains else 0)
    # While the keys are on their way.
    gates = layer.compute_gates(x)
    gates = None if gates is None else gates.to(q.dtype)
    q = rotate(q, own_rotary)
    if indexer is not None and index_q is not None:
        index_q = indexer.rotate_queries(index_q, own_rotary)
    k, values, *index_rows = _finish_gather(pending).split([part.shape[2] for part in rows], dim=2)
    k, values = k.unflatten(2, (-1, c.d_k)), values.unflatten(2, (-1, c.d_v))
    # The same steps as in `SparseAttention.project` and `Indexer.forward`, for the keys of the whole text.
    starts = layouts[0].is_document_start if layouts else None
    if layer.convolution:
        by_set = k.unflatten(2, (len(c.kv_sets), c.n_kv_groups))
        k = convolve_keys(layer.convolution, by_set, starts, None).flatten(2, 3)
    keys = rotate(k, rotary)
    if indexer is not None and index_rows:
        index_k = indexer.prepare_keys(index_rows[0].unflatten(2, (-1, c.index_width)), rotary, starts)
    by_branch, scoring_k = _compress_keys(layer, keys, values, index_k, rotary, layouts, needs_scoring=blocks is None)
    scoring_q = q if index_q is None else index_q
    k_sel, v_sel = by_branch[1]
    loss = None
    if held is not None and scoring_k is not None and k_sel is not None:
        layout = layouts[-1] if layouts else None
        nsa, backend = layer.selection_nsa, layer.backends or "auto"
        loss = selection_loss(scoring_q, scoring_k, k_sel, nsa, attention_q=q, layout=layout, held=held, backend=backend)
    if layer.training and layer.trains_densely and k_sel is not None and v_sel is not None:
        return _attend_dense_pieces(q, k_sel, v_sel, shard), loss, q.new_empty(0, dtype=torch.int32)
    if scoring_k is not None and c.scores != "compressed":
        blocks = _select_blocks(layer, scoring_q, scoring_k, shard)
    out = _attend_pieces(layer, q, by_branch, gates, shard, blocks)
    return out, loss, blocks if c.indexer_every > 1 else None


# Each batch has other pieces. Traced, their bounds would be constants, and every batch would be compiled again.
@disable_compile
def _start_gather(
    shard: ContextShard, rotary: Rotary, x: Tensor, n_queries: int | None = 0
) -> tuple[Rotary, PendingRows, HeldRows | None]:
    """Return the RoPE tables of this rank's tokens, the rows that are being gathered, and the sampled queries of this rank.

    `n_queries`: as in `selection_loss`; 0: no queries are sampled.
    """
    pending = shard.start_gather(x)
    held = None if n_queries == 0 else select_held_rows(shard, n_queries, x.device)
    return (shard.take(rotary[0], dim=0), shard.take(rotary[1], dim=0)), pending, held


@disable_compile
def _finish_gather(pending: PendingRows) -> Tensor:
    return pending.wait()


KeysAndValues = tuple[Tensor | None, Tensor | None]
"""Of a branch; None if it does not exist."""


def _compress_keys(
    layer: SparseAttention,
    keys: Tensor,
    values: Tensor,
    index_k: Tensor | None,
    rotary: Rotary,
    layouts: tuple[Layout, ...] | None,
    *,
    needs_scoring: bool,
) -> tuple[tuple[KeysAndValues, ...], Tensor | None]:
    """Return keys and values of the branches cmp, sel and win, and compressed keys that score the blocks.

    `keys` [B, T, sets G, d_k], `values`, `index_k`: of the whole text, rotated. No keys score the blocks if none are
    selected, or if an earlier layer has selected them.
    """
    c = layer.config
    layout, selection_layout = (layouts[0], layouts[-1]) if layouts else (None, None)
    sets = (x.split(c.n_kv_groups, dim=2) for x in (keys, values))
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
    if layer.indexer is not None and index_k is not None:
        compressed = layer.indexer.compress(index_k, rotary, None, selection_layout)
        scoring_k = compressed.expand(-1, -1, c.n_kv_groups, -1)
    elif needs_scoring and c.scores == "compressed":
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
    layer: DenseAttention,
    qk: Tensor,
    values: Tensor,
    rotary: Rotary,
    shard: ContextShard,
    layouts: tuple[Layout, ...] | None,
) -> Tensor:
    """Return causal attention of this rank's tokens, [B, T, H, d_v]; arguments as in `attend_shard`. Collective."""
    c = layer.config
    q, k = qk.split([c.n_heads, values.shape[2]], dim=2)
    rows = k.flatten(2), values.flatten(2)
    own_rotary, pending, _ = _start_gather(shard, rotary, torch.cat(rows, dim=2))
    q = rotate(q, own_rotary)
    k, values = _finish_gather(pending).split([part.shape[2] for part in rows], dim=2)
    k, values = k.unflatten(2, (-1, c.d_k)), values.unflatten(2, (-1, c.d_v))
    if layer.convolution:
        starts = layouts[0].is_document_start if layouts else None
        k = convolve_keys(layer.convolution, k.unsqueeze(2), starts, None).squeeze(2)
    return _attend_dense_pieces(q, rotate(k, rotary), values, shard, layer.backends["dense"].backend)


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
