"""Attention of new tokens over a layer's key/value cache: decoding, and prefill in chunks.

The backends are plain torch (this file) and the kernels in kernels/decoding/. In torch, sequences of equal length are
computed together, over views of the cache that end at that length. The cost of a step therefore depends on the tokens that
it attends to, not on the capacity of the cache or the length of other sequences, and unwritten cache rows are never read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from nsa_lab.attention import fp32_selection, geometry, input_checks, kernels, reference, torch_backend
from nsa_lab.attention.dispatch import check_triton_runs
from nsa_lab.attention.key_storage import decode_keys
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.attention.layout import Span
from nsa_lab.attention.reference import get_definition_dtype
from nsa_lab.attention.torch_backend import (
    CHUNK_BYTES,
    compute_importance,
    from_group_rows,
    get_accumulation_dtype,
    to_group_rows,
)
from nsa_lab.config import NSAConfig

CACHED_BACKENDS = ("torch", "triton")
# Up to this many queries gather their own blocks. More queries, as in prefill, attend to the past together under a mask.
MAX_GATHER_QUERIES = 8


def cached_attention(
    q: Tensor,
    gates: Tensor | None,
    cache: LayerCache,
    lengths: Tensor,
    nsa: NSAConfig,
    *,
    index_q: Tensor | None = None,
    selection_nsa: NSAConfig | None = None,
    backend: str = "torch",
) -> Tensor:
    """Return the output of `attend_and_select`, [B, S, H, d_v]."""
    return attend_and_select(q, gates, cache, lengths, nsa, index_q=index_q, selection_nsa=selection_nsa, backend=backend)[
        0
    ]


def attend_and_select(
    q: Tensor,
    gates: Tensor | None,
    cache: LayerCache,
    lengths: Tensor,
    nsa: NSAConfig,
    *,
    index_q: Tensor | None = None,
    selection_nsa: NSAConfig | None = None,
    blocks: Tensor | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """Return the gated sum of the branches (eq. 5) for S >= 1 new tokens of each sequence, and their selected blocks.

    [B, S, H, d_v], and int32 [B, S, G, n_sel]; None without a selected branch.

    q [B, S, H, d_k] and gates [B, S, H, branches], in the order cmp, sel, win (None for a single branch), belong to tokens
    whose keys are in the cache already. `lengths`, int32 [B] on q's device: the number of tokens of each sequence before
    the new ones, so query s of row b is at position lengths[b] + s. `index_q` [B, S, H', .] and `selection_nsa`: queries
    that score `cache.k_index`, and `nsa` with the geometry of these keys, for an indexer or mean keys. `blocks`: the
    selected blocks. Without either, the scores of the compressed branch select the blocks (eq. 8, 9).

    Queries at positions past the last row of the cache are padding; their output is undefined. There are no gradients. A
    non-finite value in a chunk can affect all queries of its sequence in that chunk.

    `backend`: "torch" runs on every device and synchronizes with the host to read `lengths`; "triton" does not synchronize
    and can be captured in a CUDA graph.

    Raise ValueError if the window ring is too small or queries for selection come without their keys, NotImplementedError
    for another backend or a shape that the kernels do not support, and BackendError if the kernels cannot run.
    """
    _check_cache(q, gates, cache, nsa, index_q, selection_nsa, blocks)
    _check_backend("cached_attention", backend)
    if backend == "triton":
        check_triton_runs(q.device, q.dtype)
        return kernels.cached_attention(
            q, gates, cache, lengths, nsa, index_q=index_q, selection_nsa=selection_nsa, blocks=blocks
        )

    def attend(rows: slice, queries: slice, start: int) -> tuple[Tensor, Tensor | None]:
        chunk_gates, indexer_queries, given_blocks = (
            x if x is None else x[rows, queries] for x in (gates, index_q, blocks)
        )
        return _attend_branches(
            q[rows, queries],
            chunk_gates,
            cache.slice_batch(rows),
            start,
            nsa,
            indexer_queries,
            selection_nsa or nsa,
            given_blocks,
        )

    return _attend_equal_lengths(attend, q, lengths, _get_capacity(cache, nsa))


def _get_capacity(cache: LayerCache, nsa: NSAConfig) -> int:
    """Return the number of tokens that fit in the cache, or a larger number for which no row is missing."""
    if cache.k_sel is not None:
        return cache.k_sel.shape[1]
    return sys.maxsize if cache.k_cmp is None else geometry.max_length(cache.k_cmp.shape[1], nsa)


def cached_dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, backend: str = "torch") -> Tensor:
    """Return causal attention of the dense baseline for S >= 1 new tokens of each sequence, [B, S, H, d_v].

    q [B, S, H, d_k]; k [B, capacity, G, d_k] and v [B, capacity, G, d_v] contain the new tokens already. `lengths` and
    `backend` as in `cached_attention`. Rows beyond a sequence's length are never read. Raise NotImplementedError for
    another backend or a shape that the kernels do not support.
    """
    _check_backend("cached_dense_attention", backend)
    if backend == "triton":
        return kernels.cached_dense_attention(q, k, v, lengths)

    def attend(rows: slice, queries: slice, start: int) -> tuple[Tensor, None]:
        return _attend_dense(q[rows, queries], k[rows], v[rows], start), None

    return _attend_equal_lengths(attend, q, lengths, k.shape[1])[0]


def _check_backend(function: str, backend: str) -> None:
    if backend not in CACHED_BACKENDS:
        raise NotImplementedError(f"{function}: backend = {backend!r}: expected {' or '.join(CACHED_BACKENDS)}")


@torch.no_grad()
def _attend_equal_lengths(
    attend: Callable[[slice, slice, int], tuple[Tensor, Tensor | None]],
    q: Tensor,
    lengths: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor | None]:
    """Apply `attend` to each run of rows with equal length. Return the outputs [B, S, H, d_v] and the blocks.

    Queries at positions past the `capacity` are padding and get zeros and no blocks.
    """
    outputs: list[Tensor] = []
    all_blocks: list[Tensor] = []
    for rows, start in _group_equal_lengths(lengths):
        n_valid = max(min(q.shape[1], capacity - start), 0)
        # Without a valid query, one is computed for the shapes of its results.
        output, blocks = attend(rows, slice(max(n_valid, 1)), min(start, capacity - 1))
        outputs.append(_pad_queries(output.to(q.dtype), n_valid, q.shape[1], 0))
        if blocks is not None:
            all_blocks.append(_pad_queries(blocks, n_valid, q.shape[1], -1))
    return _concatenate(outputs, dim=0), _concatenate(all_blocks, dim=0) if all_blocks else None


def _pad_queries(x: Tensor, n_valid: int, n_queries: int, value: int) -> Tensor:
    """Return the first `n_valid` queries of x [B, S, ...], padded to `n_queries`."""
    if n_valid == n_queries:
        return x
    return pad(x[:, :n_valid], (0, 0, 0, 0, 0, n_queries - n_valid), value=value)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Compute `cached_dense_attention` for sequences that all have `start` earlier tokens, in chunks of queries."""
    B, S, H, _ = q.shape
    size = max(CHUNK_BYTES[q.device.type] // (B * H * (start + S) * q.itemsize), 1)
    outputs: list[Tensor] = []
    for chunk_start in range(start, start + S, size):
        chunk_end = min(chunk_start + size, start + S)
        mask = None
        if chunk_end - chunk_start > 1:
            mask = (
                geometry.positions(0, chunk_end, q.device) <= geometry.positions(chunk_start, chunk_end, q.device)[:, None]
            )
        past_k, past_v = (x[:, :chunk_end].transpose(1, 2) for x in (k, v))
        outputs.append(_attend_grouped(q[:, chunk_start - start : chunk_end - start], past_k, past_v, mask))
    return _concatenate(outputs)


def _attend_grouped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return attention [B, C, H, d_v] of q [B, C, H, D] over keys k [B, G, n, D] and values v [B, G, n, d_v].

    `visible`, bool [C, n]: the keys that each query attends to; None: all.
    """
    mask = None if visible is None else visible.repeat_interleave(q.shape[2] // k.shape[1], dim=0)
    out = scaled_dot_product_attention(to_group_rows(q, k.shape[1]), k, v, attn_mask=mask)
    return from_group_rows(out, q.shape[2] // k.shape[1])


def _concatenate(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _check_cache(
    q: Tensor,
    gates: Tensor | None,
    cache: LayerCache,
    nsa: NSAConfig,
    index_q: Tensor | None,
    selection_nsa: NSAConfig | None,
    blocks: Tensor | None,
) -> None:
    input_checks.check_gate_columns(q, gates, sum(k is not None for k in (cache.k_cmp, cache.k_sel, cache.k_win)))
    if cache.k_win is not None:
        required, ring = geometry.ring_slots(q.shape[1], nsa), cache.k_win.shape[1]
        # A ring with a slot for every token never wraps.
        if ring < required and (cache.k_sel is None or ring < cache.k_sel.shape[1]):
            raise ValueError(
                f"cached_attention: k_win is a ring of {ring} slots, {q.shape[1]} queries with w = {nsa.w} need "
                f"{required}; use a larger ring or fewer queries per call"
            )
    if len({index_q is None, selection_nsa is None, cache.k_index is None}) > 1:
        raise ValueError(
            "cached_attention: index_q, selection_nsa and cache.k_index belong together; give all three or none"
        )
    if cache.k_sel is not None and cache.k_cmp is None and index_q is None and blocks is None:
        raise ValueError(
            "cached_attention: a cache without a compressed branch: expected blocks or index_q, which select blocks, got "
            "neither; pass one of them"
        )


def _group_equal_lengths(lengths: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield runs of adjacent rows with equal length, and that length. On a GPU this synchronizes with the host."""
    start = 0
    for length, run in groupby(cast("list[int]", lengths.tolist())):  # pyright: ignore[reportUnknownMemberType]
        end = start + len(list(run))
        yield slice(start, end), length
        start = end


def _attend_branches(
    q: Tensor,
    gates: Tensor | None,
    cache: LayerCache,
    start: int,
    nsa: NSAConfig,
    index_q: Tensor | None,
    selection_nsa: NSAConfig,
    blocks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `attend_and_select` for sequences that all have `start` earlier tokens, in chunks of queries."""
    k_index = cache.k_index
    if index_q is not None and k_index is not None:
        k_index = k_index[:, : geometry.num_compressed(start + q.shape[1], selection_nsa)]
        if k_index.dtype.itemsize == 1:
            k_index = decode_keys(k_index, index_q.shape[3], index_q.dtype)
    outs: dict[str, list[Tensor]] = {"cmp": [], "sel": [], "win": []}
    selections: list[Tensor] = []
    for rows in _split_queries(q, start, nsa, selection_nsa):
        chunk_q, chunk_start, scoring, p = q[:, rows], start + rows.start, None, None
        if cache.k_cmp is not None and cache.v_cmp is not None:
            p, out = _attend_compressed(chunk_q, cache.k_cmp, cache.v_cmp, chunk_start, nsa)
            outs["cmp"].append(out)
            scoring = chunk_q, cache.k_cmp
        if index_q is not None and k_index is not None:
            scoring = index_q[:, rows], k_index
            p = _compute_probabilities(*scoring, chunk_start, selection_nsa)
        if cache.k_sel is not None and blocks is None:
            assert scoring is not None and p is not None, "_check_cache requires scores"
            selections.append(_select_blocks(p, *scoring, chunk_start, nsa, selection_nsa))
        if cache.k_win is not None and cache.v_win is not None:
            outs["win"].append(_attend_window(chunk_q, cache.k_win, cache.v_win, chunk_start, nsa))
    if cache.k_sel is not None and cache.v_sel is not None:
        blocks = _concatenate(selections) if selections else blocks
        assert blocks is not None, "selected above or given"
        attend_selected = _attend_selected_by_gather if q.shape[1] <= MAX_GATHER_QUERIES else _attend_selected_by_chunk
        outs["sel"].append(attend_selected(q, cache.k_sel, cache.v_sel, blocks, start, nsa))
    branches = [_concatenate(parts) for parts in outs.values() if parts]
    return branches[0] if gates is None else reference.combine(*branches, gates), blocks


def _split_queries(q: Tensor, start: int, nsa: NSAConfig, selection_nsa: NSAConfig) -> Iterator[slice]:
    """Return slices of queries; the scores of each slice take at most `CHUNK_BYTES`."""
    B, S, H, _ = q.shape
    n_compressed = max(geometry.num_compressed(start + S, config) for config in (nsa, selection_nsa))
    size = max(CHUNK_BYTES[q.device.type] // (8 * B * H * (n_compressed + nsa.w)), 1)
    return (slice(first, min(first + size, S)) for first in range(0, S, size))


def _get_score_dtype(q: Tensor, first: int, nsa: NSAConfig) -> torch.dtype:
    """Return the dtype in which `_compute_probabilities` multiplies queries and keys.

    It is the dtype of the definition's selection, or float32 if the selection is first tried in float32. With many queries
    in one call, at least one selection would nearly always be uncertain, so float32 is not tried.
    """
    n = geometry.num_compressed(first + q.shape[1], nsa)
    return (
        torch.float32
        if q.shape[1] <= MAX_GATHER_QUERIES and fp32_selection.can_score_in_fp32(q, n)
        else get_definition_dtype(q.dtype)
    )


def _attend_compressed(q: Tensor, k: Tensor, v: Tensor, first: int, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """Return the probabilities of `_compute_probabilities` and the output of the compressed branch, [B, C, H, d_v]."""
    p = _compute_probabilities(q, k, first, nsa)
    out = p.to(get_accumulation_dtype(q.dtype)).flatten(2, 3) @ v[:, : p.shape[-1]].transpose(1, 2).to(
        get_accumulation_dtype(q.dtype)
    )
    return p, from_group_rows(out, p.shape[3]).to(q.dtype)


def _compute_probabilities(
    q: Tensor, k: Tensor, first: int, nsa: NSAConfig, score_dtype: torch.dtype | None = None
) -> Tensor:
    """Return the softmax of queries [B, C, H, D] at `first`, ... over the visible compressed blocks, [B, G, C, h, N].

    Scores are computed in `score_dtype` (None: `_get_score_dtype`), the softmax in the dtype of the definition's selection.
    A query that sees no block gets zeros.
    """
    n = geometry.num_compressed(first + q.shape[1], nsa)
    scores = _compute_key_scores(q, k[:, :n], score_dtype or _get_score_dtype(q, first, nsa))
    # Blocks visible to the first query are visible to all. With one query, nothing has to be masked.
    visible_to_all = geometry.num_compressed(first + 1, nsa)
    if visible_to_all == n:
        return scores.softmax(-1, dtype=get_definition_dtype(q.dtype))
    hidden = ~geometry.sees_compressed(geometry.positions(first, first + q.shape[1], q.device), n, nsa)
    hidden = hidden[:, None, visible_to_all:]  # [C, 1, rest]
    scores[..., visible_to_all:].masked_fill_(hidden, float("-inf"))
    p = scores.softmax(-1, dtype=get_definition_dtype(q.dtype))
    p[..., visible_to_all:].masked_fill_(hidden, 0.0)
    return p


def _select_blocks(p: Tensor, q: Tensor, k: Tensor, first: int, nsa: NSAConfig, selection_nsa: NSAConfig) -> Tensor:
    """Return the selected blocks, int32 [B, C, G, n_sel], of queries at positions `first`, ... (eq. 9 to 11).

    p [B, G, C, ., N] are the probabilities of q over k. If an importance is too close to decide in the dtype of p, the
    row is computed again in the dtype of the definition, so that the result is the definition's.
    """
    importance = _compute_importance(p, first, nsa, selection_nsa)
    if q.shape[1] > MAX_GATHER_QUERIES:
        return reference.select_by_importance(importance.float(), nsa, first=first)
    is_fp32 = _get_score_dtype(q, first, selection_nsa) != get_definition_dtype(q.dtype)
    error_factor = (
        fp32_selection.compute_error_factor(q, k[:, : p.shape[-1]]) if is_fp32 else fp32_selection.FP64_ERROR_FACTOR
    )
    blocks, is_certain = fp32_selection.select_certain_blocks(importance, error_factor, nsa, first)
    if is_certain.all():
        return blocks
    uncertain_rows = (~is_certain).flatten(1).any(1).nonzero().flatten()
    for row in cast("list[int]", uncertain_rows.tolist()):  # pyright: ignore[reportUnknownMemberType]
        sample = slice(row, row + 1)
        if is_fp32:
            p = _compute_probabilities(q[sample], k[sample], first, selection_nsa, get_definition_dtype(q.dtype))
            importance[sample] = _compute_importance(p, first, nsa, selection_nsa)
        blocks[sample] = reference.select_by_importance(importance[sample].float(), nsa, first=first)
    return blocks


def _compute_importance(p: Tensor, first: int, nsa: NSAConfig, selection_nsa: NSAConfig) -> Tensor:
    """Return the importance of every selection block, [B, C, G, blocks], from probabilities p [B, G, C, ., N]."""
    return compute_importance(p, geometry.num_selection(first + p.shape[2], nsa), selection_nsa).transpose(1, 2)


def _attend_selected_by_gather(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: int, nsa: NSAConfig) -> Tensor:
    """Return the output of the selected branch, [B, C, H, d_v]; each query gathers the tokens of its blocks."""
    B, N, G, _ = k.shape
    acc_dtype, parts = get_accumulation_dtype(q.dtype), list[Tensor]()
    # k and v as matrices: copying whole rows is several times faster than indexing each dimension.
    tables = k.flatten(0, 2), v.flatten(0, 2)
    block_0 = _index_first_block(B, N, G, nsa.l_sel, q.device)
    tokens = torch.add(block_0, blocks.unsqueeze(-1), alpha=nsa.l_sel * G).flatten(3)
    for query in range(q.shape[1]):
        # Blocks ascend, and the last one is the query's own, the only one that can be incomplete.
        rows = tokens[:, query, :, : geometry.selected_keys(first + query, nsa)].contiguous()
        selected_k, selected_v = (embedding(rows, table).to(acc_dtype) for table in tables)
        parts.append(_attend_grouped(q[:, query : query + 1].to(acc_dtype), selected_k, selected_v))
    return _concatenate(parts).to(q.dtype)


@lru_cache(maxsize=16)
def _index_first_block(B: int, N: int, G: int, l_sel: int, device: torch.device) -> Tensor:
    """Return the rows of block 0's tokens in x.flatten(0, 2), x [B, N, G, D]: int64 [B, 1, G, 1, l_sel].

    The same in all layers and steps, so it is cached. Do not write to it.
    """
    with torch.inference_mode(False):  # the cached tensor serves callers in and outside of inference mode
        rows = torch.arange(B)[:, None, None] * (N * G) + torch.arange(G)[:, None] + torch.arange(l_sel) * G
        return rows[:, None, :, None].to(device)


def _attend_selected_by_chunk(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: int, nsa: NSAConfig) -> Tensor:
    """Return the output of the selected branch for many queries, which share most of the keys that they attend to."""
    span = Span.chunk(first, q.shape[1])
    return torch_backend.selected_attention(q, k[:, : span.n_keys], v[:, : span.n_keys], blocks, nsa, span=span)[0]


def _attend_window(q: Tensor, k: Tensor, v: Tensor, first: int, nsa: NSAConfig) -> Tensor:
    """Return the output of the window branch, [B, C, H, d_v]; k and v are rings."""
    end, acc_dtype = first + q.shape[1], get_accumulation_dtype(q.dtype)
    start = max(first - nsa.w + 1, 0)
    mask = None
    if q.shape[1] > 1:
        positions, t = geometry.positions(start, end, q.device), geometry.positions(first, end, q.device)[:, None]
        mask = (positions <= t) & (positions > t - nsa.w)
    near_k, near_v = (_unroll_ring(ring, start, end).transpose(1, 2).to(acc_dtype) for ring in (k, v))
    return _attend_grouped(q.to(acc_dtype), near_k, near_v, mask).to(q.dtype)


def _unroll_ring(ring: Tensor, begin: int, end: int) -> Tensor:
    """Return tokens `begin` .. `end`-1 of a ring [B, R, G, D], in order of position."""
    n_slots = ring.shape[1]
    first_slot = begin % n_slots
    if first_slot + end - begin <= n_slots:
        return ring[:, first_slot : first_slot + end - begin]
    return torch.cat([ring[:, first_slot:], ring[:, : first_slot + end - begin - n_slots]], dim=1)


def _compute_key_scores(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scaled dot products of q [B, C, H, D] and k [B, n, G, D], [B, G, C, h, n], in `dtype`."""
    rows = to_group_rows(q.to(dtype), k.shape[2]) * q.shape[-1] ** -0.5
    if k.dtype == dtype:
        return torch.unflatten(rows @ k.permute(0, 2, 3, 1), 2, (q.shape[1], -1))
    # Convert keys in chunks that stay in the CPU cache.
    chunk_size = max(CHUNK_BYTES[q.device.type] // (2 * k.shape[0] * k.shape[2] * k.shape[3] * dtype.itemsize), 1)
    parts = [rows @ part.to(dtype).permute(0, 2, 3, 1) for part in torch.split(k, chunk_size, dim=1)]
    return torch.unflatten(_concatenate(parts, dim=-1), 2, (q.shape[1], -1))
