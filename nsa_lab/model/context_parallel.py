"""Layers whose text is shared by several ranks: each computes its own queries over the keys of all (`ContextShard`).

Each rank convolves and rotates the keys of its tokens. Two all-gathers per layer follow: first of index keys, or of keys
and values of the compressed branch; then of all other keys and values, which arrive while the first select blocks or are
compressed. Every rank compresses all gathered keys: this is linear in the length of the text and cheap next
to attention. Before a convolution, a small all-gather exchanges the last row of every chunk. The backward pass has an
all-to-all for each all-gather.
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
from nsa_lab.config import BRANCHES, ModelConfig
from nsa_lab.model.layers import Rotary, ShortConvolution, convolve_keys, rotate
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
    n_sampled = c.selection_queries if layer.training and c.has_selection_loss else 0
    keys = (k,) if index_k is None else (k, index_k)
    own_rotary, pending_rows, held = _start_exchange(shard, rotary, keys if layer.convolution else (), n_sampled)
    # While the last rows of the chunks are on their way.
    if indexer is not None and index_q is not None:
        index_q = indexer.rotate_queries(index_q, own_rotary)
    # The same steps as in `SparseAttention.project` and `Indexer.forward`.
    starts = layouts[0].is_document_start if layouts else None
    layout, selection_layout = (layouts[0], layouts[-1]) if layouts else (None, None)
    chunks = _split_into_chunks(shard, keys, pending_rows, own_rotary, starts)
    k = torch.cat([_convolve_and_rotate(layer.convolution, chunk, len(c.kv_sets)) for chunk in chunks], dim=1)
    if indexer is not None:
        index_parts = [
            indexer.prepare_keys(chunk.keys[1], chunk.rotary, chunk.is_document_start, chunk.previous_keys[1])
            for chunk in chunks
        ]
        index_k = torch.cat(index_parts, dim=1)
    sets = _pair_by_set(k, values, c.n_kv_groups)
    first = None if index_k is None else index_k.flatten(2)
    if first is None and c.kv_sets[0] == ("cmp",) and len(sets) > 1:
        first = torch.cat(sets.pop(0), dim=2)
    pending_first, pending_sets = _start_gathers(shard, first, torch.cat([x for pair in sets for x in pair], dim=2))
    # While the first keys are on their way.
    gates = layer.compute_gates(x)
    gates = None if gates is None else gates.to(q.dtype)
    q = rotate(q, own_rotary)
    learns_densely = layer.training and layer.trains_densely and "sel" in c.branches
    scoring_q, scoring_k = q, None
    by_branch: dict[str, KeysAndValues] = dict.fromkeys(BRANCHES, (None, None))
    # While the other keys and values are on their way.
    if indexer is not None and index_q is not None and pending_first is not None:
        index_k = _finish_gather(pending_first).unflatten(2, (-1, c.index_width))
        compressed = indexer.compress(index_k, rotary, None, selection_layout)
        scoring_q, scoring_k = index_q, compressed.expand(-1, -1, c.n_kv_groups, -1)
        if not learns_densely:
            blocks = _select_blocks(layer, scoring_q, scoring_k, shard)
    elif pending_first is not None:
        ((k, v),) = _finish_sets(pending_first, c)
        by_branch["cmp"] = _compress(layer, k, v, layout)
    for names, (k, v) in zip(c.kv_sets[-len(sets) :], _finish_sets(pending_sets, c), strict=True):
        by_branch.update(dict.fromkeys(names, (k, v)))
        if "cmp" in names:
            by_branch["cmp"] = _compress(layer, k, v, layout)
    k_sel, v_sel = by_branch["sel"]
    if blocks is None and scoring_k is None:
        scoring_k, _ = by_branch["cmp"]
        if c.scores == "mean_key" and k_sel is not None:
            scoring_k = compress(k_sel, layer.selection_nsa, layout=selection_layout)
    loss = None
    if held is not None and scoring_k is not None and k_sel is not None:
        nsa, backend = layer.selection_nsa, layer.backends or "auto"
        loss = selection_loss(
            scoring_q, scoring_k, k_sel, nsa, attention_q=q, layout=selection_layout, held=held, backend=backend
        )
    if learns_densely and k_sel is not None and v_sel is not None:
        return _attend_dense_pieces(q, k_sel, v_sel, shard), loss, q.new_empty(0, dtype=torch.int32)
    if c.scores == "mean_key" and scoring_k is not None:
        blocks = _select_blocks(layer, q, scoring_k, shard)
    out = _attend_pieces(layer, q, by_branch, gates, shard, blocks)
    return out, loss, blocks if c.indexer_every > 1 else None


class Chunk(NamedTuple):
    """Adjacent tokens of a rank, of which several kinds of keys are convolved and rotated."""

    keys: tuple[Tensor, ...]
    """[B, n, heads, D] of every kind."""
    previous_keys: tuple[Tensor | None, ...]
    """[B, 1, heads, D] of the token before; None without a convolution."""
    rotary: Rotary
    is_document_start: Tensor | None
    """bool [n], as in `Layout`; None without a convolution."""


# Each batch has other pieces. Traced, their bounds would be constants, and every batch would be compiled again.
@disable_compile
def _start_exchange(
    shard: ContextShard, rotary: Rotary, keys: tuple[Tensor, ...], n_queries: int | None = 0
) -> tuple[Rotary, PendingRows | None, HeldRows | None]:
    """Return the RoPE tables of this rank's tokens, the last rows of chunks that are being gathered, and sampled queries.

    `keys`: the kinds of keys [B, n_queries, heads, D] that are convolved. `n_queries`: as in `selection_loss`; 0: no
    queries are sampled.
    """
    pending = shard.start_gather_previous(*keys) if keys else None
    held = None if n_queries == 0 else select_held_rows(shard, n_queries, rotary[0].device)
    return (shard.take(rotary[0], dim=0), shard.take(rotary[1], dim=0)), pending, held


@disable_compile
def _split_into_chunks(
    shard: ContextShard,
    keys: tuple[Tensor, ...],
    pending: PendingRows | None,
    rotary: Rotary,
    is_document_start: Tensor | None,
) -> list[Chunk]:
    """Return the keys of this rank by chunk; all at once if none are convolved. `is_document_start`: of the text."""
    if pending is None:
        return [Chunk(keys, (None,) * len(keys), rotary, None)]
    n_chunks = len(shard.ranges)
    starts = [None] * n_chunks if is_document_start is None else shard.split(shard.take(is_document_start, dim=0), dim=0)
    by_kind = shard.take_previous(pending).split([x.shape[2] * x.shape[3] for x in keys], dim=2)
    previous = [x.unflatten(2, like.shape[2:]).split(1, dim=1) for x, like in zip(by_kind, keys, strict=True)]
    tables = zip(*(shard.split(table, dim=0) for table in rotary), strict=True)
    rows = zip(*map(shard.split, keys), strict=True)
    return [Chunk(*chunk) for chunk in zip(rows, zip(*previous, strict=True), tables, starts, strict=True)]


def _convolve_and_rotate(convolution: ShortConvolution | None, chunk: Chunk, n_sets: int) -> Tensor:
    """Return the keys of heads of a chunk, its first kind, [B, n, sets G, d_k]."""
    k, previous = chunk.keys[0], chunk.previous_keys[0]
    if convolution is not None:
        previous = None if previous is None else previous.unflatten(2, (n_sets, -1))
        k = convolve_keys(convolution, k.unflatten(2, (n_sets, -1)), chunk.is_document_start, previous).flatten(2, 3)
    return rotate(k, chunk.rotary)


def _pair_by_set(k: Tensor, v: Tensor, n_groups: int) -> list[tuple[Tensor, Tensor]]:
    """Return keys [B, n, G d_k] and values [B, n, G d_v] of each set, for k and v [B, n, sets G, .]."""
    pairs = zip(k.split(n_groups, dim=2), v.split(n_groups, dim=2), strict=True)
    return [(keys.flatten(2), values.flatten(2)) for keys, values in pairs]


@disable_compile
def _start_gathers(shard: ContextShard, first: Tensor | None, others: Tensor) -> tuple[PendingRows | None, PendingRows]:
    """Start to gather `first`, then `others`, which arrive while the first are used."""
    return None if first is None else shard.start_gather(first), shard.start_gather(others)


@disable_compile
def _finish_gather(pending: PendingRows) -> Tensor:
    return pending.wait()


@disable_compile
def _finish_sets(pending: PendingRows, config: ModelConfig) -> list[tuple[Tensor, Tensor]]:
    """Return keys [B, T, G, d_k] and values [B, T, G, d_v] of the whole text, of every set that was gathered."""
    joined, widths = pending.wait(), [config.n_kv_groups * config.d_k, config.n_kv_groups * config.d_v]
    n_sets = joined.shape[2] // sum(widths)
    parts = [x.unflatten(2, (config.n_kv_groups, -1)) for x in joined.split(widths * n_sets, dim=2)]
    return list(zip(parts[::2], parts[1::2], strict=True))


KeysAndValues = tuple[Tensor | None, Tensor | None]
"""Of a branch; None if it does not exist."""


def _compress(layer: SparseAttention, k: Tensor, v: Tensor, layout: Layout | None) -> tuple[Tensor, Tensor]:
    nsa = layer.config.nsa
    return compress(k, nsa, layer.phi_k, layout=layout), compress(v, nsa, layer.phi_v, layout=layout)


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
    by_branch: dict[str, KeysAndValues],
    gates: Tensor | None,
    shard: ContextShard,
    blocks: Tensor | None,
) -> Tensor:
    nsa, backend, pieces = layer.config.nsa, layer.backends or "auto", shard.pieces
    compressed_rows = [piece.compressed_rows(shard.text, nsa) for piece in pieces]
    key_rows = [piece.key_rows for piece in pieces]
    compressed, selected, window = (by_branch[name] for name in BRANCHES)
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
    own_rotary, pending_rows, _ = _start_exchange(shard, rotary, (k,) if layer.convolution else ())
    starts = layouts[0].is_document_start if layouts else None
    chunks = _split_into_chunks(shard, (k,), pending_rows, own_rotary, starts)
    k = torch.cat([_convolve_and_rotate(layer.convolution, chunk, 1) for chunk in chunks], dim=1)
    _, pending = _start_gathers(shard, None, torch.cat([k.flatten(2), values.flatten(2)], dim=2))
    q = rotate(q, own_rotary)
    ((k, v),) = _finish_sets(pending, c)
    return _attend_dense_pieces(q, k, v, shard, layer.backends["dense"].backend)


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
