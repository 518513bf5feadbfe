"""Attention of new tokens over what a layer has kept of the tokens before them: decoding, and prefill in chunks.

In plain torch here, or by the kernels of kernels/decoding/. In torch, rows of one length are computed together, over views
that end where those sequences do. So what a step costs follows what it reads, whatever room the cache has and however long
the neighbours are, and what was never written is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from nsa_lab.attention import fp32_selection, geometry, kernels, reference, torch_backend
from nsa_lab.attention.dispatch import resolve_backend
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.attention.layout import Span
from nsa_lab.attention.torch_backend import (
    CHUNK_BYTES,
    get_accumulation_dtype,
    get_selection_dtype,
    sum_over_selection_blocks,
)
from nsa_lab.config import NSAConfig

CACHED_BACKENDS = ("torch", "triton")
# So many queries at once gather their own blocks; more read the past together, as a prompt does.
MAX_GATHER_QUERIES = 8


def cached_attention(
    q: Tensor,
    gates: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    nsa: NSAConfig,
    *,
    index_q: Tensor | None = None,
    selection_nsa: NSAConfig | None = None,
    backend: str = "torch",
) -> Tensor:
    """The gated sum of the three branches (eq. 5) for S >= 1 new tokens of each sequence -> [B, S, H, d_v].

    q [B, S, H, d_k] and gates [B, S, H, 3] (cmp, sel, win) are of tokens whose keys are in the cache already. `lengths`,
    int32 [B] on q's device, are the tokens of each sequence before these: query s of row b stands at lengths[b] + s.
    `index_q` [B, S, G, .] and `choice_nsa` are an indexer's queries, and the geometry of `cache.k_index`; without them
    the compressed branch's own scores choose (eq. 8, 9). What a query gets that stands past the cache's last row, and so is
    padding, means nothing. No gradients. What is not finite in a chunk may reach all
    queries of its sequence in it.

    `backend`: torch, on every device, waits on the host for the lengths; triton does not, and can be captured in a CUDA
    graph.

    Raises ValueError for a ring that is too small and for an indexer's queries without its keys, NotImplementedError for
    another backend and for a shape that the kernels do not take, BackendError where they cannot run.
    """
    _check_cache(q, cache, nsa, index_q, selection_nsa)
    _check_backend("cached_attention", backend)
    if backend == "triton":
        resolve_backend(q.device, q.dtype, nsa, backend=backend)
        return kernels.cached_attention(q, gates, cache, lengths, nsa, index_q=index_q, selection_nsa=selection_nsa)

    def attend(rows: slice, queries: slice, start: int) -> Tensor:
        at = rows, queries
        index = None if index_q is None else index_q[at]
        return _attend_branches(q[at], gates[at], cache.slice_batch(rows), start, nsa, index, selection_nsa or nsa)

    return _attend_equal_lengths(attend, q, cache.k_sel, cache.v_sel, lengths)


def cached_dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, backend: str = "torch") -> Tensor:
    """Causal attention for S >= 1 new tokens of each sequence, for the dense twin -> [B, S, H, d_v].

    q [B, S, H, d_k]; k [B, capacity, G, d_k] and v [B, capacity, G, d_v] hold those of the new tokens already; `lengths`
    and `backend` as in `cached_attention`. Rows beyond a sequence's length are never read. Raises NotImplementedError for
    another backend and for a shape that the kernels do not take.
    """
    _check_backend("cached_dense_attention", backend)
    if backend == "triton":
        return kernels.cached_dense_attention(q, k, v, lengths)

    def attend(rows: slice, queries: slice, start: int) -> Tensor:
        return _attend_dense(q[rows, queries], k[rows], v[rows], start)

    return _attend_equal_lengths(attend, q, k, v, lengths)


def _check_backend(function: str, backend: str) -> None:
    if backend not in CACHED_BACKENDS:
        raise NotImplementedError(f"{function}: backend = {backend!r}: expected {' or '.join(CACHED_BACKENDS)}")


@torch.no_grad()
def _attend_equal_lengths(
    attend: Callable[[slice, slice, int], Tensor], q: Tensor, k: Tensor, v: Tensor, lengths: Tensor
) -> Tensor:
    """[B, S, H, d_v], put together of what `attend` gives for neighbouring rows of one length and their queries that stand
    within the cache; those past its end can only be padding."""
    found: list[Tensor] = []
    for rows, start in _group_equal_lengths(lengths):
        queries = max(min(q.shape[1], k.shape[1] - start), 0)
        inside = [attend(rows, slice(queries), start).to(q.dtype)] if queries else []
        if queries < q.shape[1]:
            inside.append(q.new_zeros(rows.stop - rows.start, q.shape[1] - queries, q.shape[2], v.shape[3]))
        found.append(_concatenate(inside))
    return _concatenate(found, dim=0)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """`cached_dense_attention` of sequences that all have `start` tokens before these, some queries at a time."""
    B, S, H, _ = q.shape
    size = max(CHUNK_BYTES[q.device.type] // (B * H * (start + S) * q.itemsize), 1)
    parts: list[Tensor] = []
    for first in range(start, start + S, size):
        last = min(first + size, start + S)
        seen = None
        if last - first > 1:
            seen = geometry.positions(0, last, q.device) <= geometry.positions(first, last, q.device)[:, None]
        past_k, past_v = (x[:, :last].transpose(1, 2) for x in (k, v))
        parts.append(_attend_grouped(q[:, first - start : last - start], past_k, past_v, seen))
    return _concatenate(parts)


def _attend_grouped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attention [B, C, H, d_v] of q [B, C, H, D] over keys k [B, G, n, D] and values v that `seen`, bool [C, n], lets each
    query see; None: all."""
    mask = None if visible is None else visible.repeat_interleave(q.shape[2] // k.shape[1], dim=0)
    return _from_group_rows(scaled_dot_product_attention(_to_group_rows(q, k.shape[1]), k, v, attn_mask=mask), q)


def _concatenate(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _check_cache(
    q: Tensor, cache: LayerCache, nsa: NSAConfig, index_q: Tensor | None, selection_nsa: NSAConfig | None
) -> None:
    least, ring = geometry.ring_slots(q.shape[1], nsa), cache.k_win.shape[1]
    if ring < least:
        raise ValueError(
            f"cached_attention: k_win is a ring of {ring} slots, and {q.shape[1]} queries with w = {nsa.w} read {least}; "
            "make the ring larger, or give fewer queries at once"
        )
    if len({index_q is None, selection_nsa is None, cache.k_index is None}) > 1:
        raise ValueError("cached_attention: index_q, choice_nsa and cache.k_index belong together; give all three or none")


def _group_equal_lengths(lengths: Tensor) -> Iterator[tuple[slice, int]]:
    """Neighbouring rows of one length, and that length. On a GPU the host waits for the lengths, which kernels need not."""
    begin = 0
    for length, run in groupby(cast("list[int]", lengths.tolist())):  # pyright: ignore[reportUnknownMemberType]
        end = begin + len(list(run))
        yield slice(begin, end), length
        begin = end


def _attend_branches(
    q: Tensor,
    gates: Tensor,
    cache: LayerCache,
    start: int,
    nsa: NSAConfig,
    index_q: Tensor | None,
    selection_nsa: NSAConfig,
) -> Tensor:
    """`cached_attention` of sequences that all have `start` tokens before these, some queries at a time."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _split_queries(q, start, nsa, selection_nsa):
        some, first = q[:, rows], start + rows.start
        p, out_cmp = _attend_compressed(some, cache.k_cmp, cache.v_cmp, first, nsa)
        chooser = some, cache.k_cmp
        if index_q is not None and cache.k_index is not None:
            chooser = index_q[:, rows], cache.k_index
            p = _compute_probabilities(*chooser, first, selection_nsa)
        out_win = _attend_window(some, cache.k_win, cache.v_win, first, nsa)
        found.append((out_cmp, _select_blocks(p, *chooser, first, nsa, selection_nsa), out_win))
    out_cmp, blocks, out_win = map(_concatenate, zip(*found, strict=True))
    select = _attend_selected_by_gather if q.shape[1] <= MAX_GATHER_QUERIES else _attend_selected_by_chunk
    return reference.combine(out_cmp, select(q, cache.k_sel, cache.v_sel, blocks, start, nsa), out_win, gates)


def _split_queries(q: Tensor, start: int, nsa: NSAConfig, selection_nsa: NSAConfig) -> Iterator[slice]:
    """Queries whose scores take a bounded number of bytes, one after another."""
    B, S, H, _ = q.shape
    compressed = max(geometry.num_compressed(start + S, of) for of in (nsa, selection_nsa))
    size = max(CHUNK_BYTES[q.device.type] // (8 * B * H * (compressed + nsa.w)), 1)
    return (slice(first, min(first + size, S)) for first in range(0, S, size))


def _get_score_dtype(q: Tensor, first: int, nsa: NSAConfig) -> torch.dtype:
    """In which `_shares` multiplies queries and keys: the choice's dtype, or float32 where that is tried before.

    Of many queries in one call, some would be in doubt nearly always.
    """
    n = geometry.num_compressed(first + q.shape[1], nsa)
    return (
        torch.float32
        if q.shape[1] <= MAX_GATHER_QUERIES and fp32_selection.can_score_in_fp32(q, n)
        else get_selection_dtype(q.dtype)
    )


def _attend_compressed(q: Tensor, k: Tensor, v: Tensor, first: int, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """`_shares`, and the compressed branch's output [B, C, H, d_v]."""
    p = _compute_probabilities(q, k, first, nsa)
    out = p.to(get_accumulation_dtype(q.dtype)).flatten(2, 3) @ v[:, : p.shape[-1]].transpose(1, 2).to(
        get_accumulation_dtype(q.dtype)
    )
    return p, _from_group_rows(out, q)


def _compute_probabilities(
    q: Tensor, k: Tensor, first: int, nsa: NSAConfig, score_dtype: torch.dtype | None = None
) -> Tensor:
    """What queries [B, C, H, D] at `first`, ... give each compressed block that one of them sees: [B, G, C, h, N].

    In the dtype of the definition's choice, of scores computed in `products`, or `_products`; 0 for a query that sees
    nothing.
    """
    n = geometry.num_compressed(first + q.shape[1], nsa)
    scores = _compute_scores(q, k[:, :n], score_dtype or _get_score_dtype(q, first, nsa))
    # What the first query sees, all of them see: one query has nothing to hide.
    seen_by_all = geometry.num_compressed(first + 1, nsa)
    if seen_by_all == n:
        return scores.softmax(-1, dtype=get_selection_dtype(q.dtype))
    hidden = ~geometry.sees_compressed(geometry.positions(first, first + q.shape[1], q.device), n, nsa)
    hidden = hidden[:, None, seen_by_all:]  # [C, 1, rest]
    scores[..., seen_by_all:].masked_fill_(hidden, float("-inf"))
    p = scores.softmax(-1, dtype=get_selection_dtype(q.dtype))
    p[..., seen_by_all:].masked_fill_(hidden, 0.0)
    return p


def _select_blocks(p: Tensor, q: Tensor, k: Tensor, first: int, nsa: NSAConfig, selection_nsa: NSAConfig) -> Tensor:
    """The blocks int32 [B, C, G, n_sel] of queries at `first`, ..., by their shares p [B, G, C, ., N] (eq. 9 to 11).

    q and k are those that the shares are of: a near-tie falls the way of the definition's dtype, whatever theirs was.
    """
    importance = _compute_importance(p, first, nsa, selection_nsa)
    if q.shape[1] > MAX_GATHER_QUERIES:
        return reference.select_by_importance(importance.float(), nsa, first=first)
    tried = _get_score_dtype(q, first, selection_nsa) != get_selection_dtype(q.dtype)
    doubt = fp32_selection.compute_error_factor(q, k[:, : p.shape[-1]]) if tried else fp32_selection.FP64_ERROR_FACTOR
    blocks, clear = fp32_selection.select_certain_blocks(importance, doubt, nsa, first)
    if clear.all():
        return blocks
    in_doubt = (~clear).flatten(1).any(1).nonzero().flatten()
    for row in cast("list[int]", in_doubt.tolist()):  # pyright: ignore[reportUnknownMemberType]
        one = slice(row, row + 1)
        if tried:
            p = _compute_probabilities(q[one], k[one], first, selection_nsa, get_selection_dtype(q.dtype))
            importance[one] = _compute_importance(p, first, nsa, selection_nsa)
        blocks[one] = reference.select_by_importance(importance[one].float(), nsa, first=first)
    return blocks


def _compute_importance(p: Tensor, first: int, nsa: NSAConfig, selection_nsa: NSAConfig) -> Tensor:
    """Of every selection block [B, C, G, blocks], by the shares p [B, G, C, ., N] of queries at `first`, ..."""
    return sum_over_selection_blocks(p.sum(3), geometry.num_selection(first + p.shape[2], nsa), selection_nsa).transpose(
        1, 2
    )


def _attend_selected_by_gather(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: int, nsa: NSAConfig) -> Tensor:
    """The selected branch's output [B, C, H, d_v]: every query gathers the tokens of its own blocks."""
    B, N, G, _ = k.shape
    wide, parts = get_accumulation_dtype(q.dtype), list[Tensor]()
    # Rows of k and v as matrices: whole rows are copied several times as fast as by an index into each dimension.
    tables = k.flatten(0, 2), v.flatten(0, 2)
    block_0 = _index_first_block(B, N, G, nsa.l_sel, q.device)
    tokens = torch.add(block_0, blocks.unsqueeze(-1), alpha=nsa.l_sel * G).flatten(3)
    for at in range(q.shape[1]):
        # Blocks ascend and the query's own is the last of them, and alone is cut short.
        read = tokens[:, at, :, : geometry.selected_keys(first + at, nsa)].contiguous()
        own_k, own_v = (embedding(read, table).to(wide) for table in tables)
        parts.append(_attend_grouped(q[:, at : at + 1].to(wide), own_k, own_v))
    return _concatenate(parts).to(q.dtype)


@lru_cache(maxsize=16)
def _index_first_block(B: int, N: int, G: int, l_sel: int, device: torch.device) -> Tensor:
    """Where the tokens of block 0 lie in x.flatten(0, 2), x [B, N, G, D]: int64 [B, 1, G, 1, l_sel].

    The same in all layers and steps: kept for these, and not to be written to.
    """
    with torch.inference_mode(False):  # what is kept has to serve every caller
        rows = torch.arange(B)[:, None, None] * (N * G) + torch.arange(G)[:, None] + torch.arange(l_sel) * G
        return rows[:, None, :, None].to(device)


def _attend_selected_by_chunk(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: int, nsa: NSAConfig) -> Tensor:
    """As `_selected`, of queries that have much of what they read in common."""
    span = Span.chunk(first, q.shape[1])
    return torch_backend.selected_attention(q, k[:, : span.n_keys], v[:, : span.n_keys], blocks, nsa, span=span)[0]


def _attend_window(q: Tensor, k: Tensor, v: Tensor, first: int, nsa: NSAConfig) -> Tensor:
    """The window branch's output [B, C, H, d_v], of rings k, v."""
    last, wide = first + q.shape[1], get_accumulation_dtype(q.dtype)
    begin = max(first - nsa.w + 1, 0)
    seen = None
    if q.shape[1] > 1:
        near, t = geometry.positions(begin, last, q.device), geometry.positions(first, last, q.device)[:, None]
        seen = (near <= t) & (near > t - nsa.w)
    near_k, near_v = (_unroll_ring(ring, begin, last).transpose(1, 2).to(wide) for ring in (k, v))
    return _attend_grouped(q.to(wide), near_k, near_v, seen).to(q.dtype)


def _unroll_ring(ring: Tensor, begin: int, end: int) -> Tensor:
    """Tokens `begin` .. `end`-1 of a ring [B, R, G, D], in their order."""
    slots = ring.shape[1]
    at = begin % slots
    if at + end - begin <= slots:
        return ring[:, at : at + end - begin]
    return torch.cat([ring[:, at:], ring[:, : at + end - begin - slots]], dim=1)


def _compute_scores(q: Tensor, k: Tensor, wide: torch.dtype) -> Tensor:
    """Scaled products of q [B, C, H, D] and k [B, n, G, D]: [B, G, C, h, n]."""
    rows = _to_group_rows(q.to(wide), k.shape[2]) * q.shape[-1] ** -0.5
    if k.dtype == wide:
        return torch.unflatten(rows @ k.permute(0, 2, 3, 1), 2, (q.shape[1], -1))
    # Keys that have to be converted stay in the cache meanwhile.
    some = max(CHUNK_BYTES[q.device.type] // (2 * k.shape[0] * k.shape[2] * k.shape[3] * wide.itemsize), 1)
    parts = [rows @ part.to(wide).permute(0, 2, 3, 1) for part in torch.split(k, some, dim=1)]
    return torch.unflatten(_concatenate(parts, dim=-1), 2, (q.shape[1], -1))


def _to_group_rows(x: Tensor, groups: int) -> Tensor:
    """[B, C, H, D] -> [B, G, C*h, D]: the heads of a group are rows of one matrix, which reads its keys and values once."""
    if x.shape[1] == 1:  # lies so already
        return x.reshape(len(x), groups, -1, x.shape[3])
    return torch.unflatten(x, 2, (groups, -1)).transpose(1, 2).flatten(2, 3)


def _from_group_rows(out: Tensor, q: Tensor) -> Tensor:
    """[B, G, C*h, D] -> [B, C, H, D], as q [B, C, H, .] has it."""
    if q.shape[1] == 1:
        return out.reshape(len(out), 1, -1, out.shape[3]).to(q.dtype)
    return torch.unflatten(out, 2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3).to(q.dtype)
