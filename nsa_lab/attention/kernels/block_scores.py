"""Scores of selection blocks for an indexer, in Triton: the log-sum-exp of the keys of each block, by head.

An indexer has no LSE, and its keys do not overlap. Recomputing the scores after a pass for the LSE would take every
exponential twice. Instead `nsa_block_scores` computes the log-sum-exp of the keys of each block and from these the LSE. The
probability of a block is then exp(its log-sum-exp - LSE), so block_topk.py ranks blocks without reading keys. One head per
group needs no LSE: it is the same for all blocks of a query, so the blocks are ranked by their log-sum-exps, or by the
maximum score.

The workspace holds the results of a limited number of queries, so longer sequences are scored in several pieces.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels import kernel_names, launch_table
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.launch_utils import ceil_div, get_strides, padded_width
from nsa_lab.attention.kernels.packed_tiles import count_tiles, find_document_of_tile
from nsa_lab.attention.kernels.tiles import get_reversed_tile, load_rows


# fmt: off
@triton.jit
def _compute_block_logsumexp(
    q, k_base, stride_kn, n_visible, j0, N, scale_log2,
    STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    QUERIES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_MAX: tl.constexpr, MASKED: tl.constexpr,
):
    """Return log2(sum(exp(score))) over the keys of each selection block j0, j0 + 1, ...: [QUERIES, BLOCKS].

    `n_visible`: number of keys that each query attends to; -inf if it attends to no key of a block. Without MASKED it
    attends to all of them. BLOCK_MAX: the maximum score. STRIDES_AT_ONCE keys of every block are scored at a time. The
    columns of the score tile are stride-major: column s*BLOCKS + jj is key s of block j0 + jj.
    """
    column = tl.arange(0, STRIDES_AT_ONCE * BLOCKS)
    # Each selection block has a separate peak: relative to the peak of another block, its sum could underflow.
    peak = tl.full([QUERIES, BLOCKS], -3.0e38, tl.float32)
    total = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for s0 in range(0, STRIDES, STRIDES_AT_ONCE):
        s = s0 + column // BLOCKS
        i = (j0 + column % BLOCKS) * STRIDES + s
        k_rows = (tl.minimum(i, N - 1) if MASKED else i).to(tl.int64) * stride_kn
        k = load_rows(k_base, k_rows, tl.arange(0, DK_PAD), DK, DK_PAD)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = (s < STRIDES)[None, :] & (i[None, :] < n_visible[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        scores = tl.reshape(scores, [QUERIES, STRIDES_AT_ONCE, BLOCKS])
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        if not BLOCK_MAX:
            total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores * scale_log2 - new_peak[:, None, :]), 1)
        peak = new_peak
    return finish_block_logsumexp(peak, total, BLOCK_MAX)


@triton.jit
def finish_block_logsumexp(peak, total, BLOCK_MAX: tl.constexpr):
    """Return log2(total) + peak, or the peak with BLOCK_MAX; -inf for a block without keys."""
    if BLOCK_MAX:
        result = tl.where(peak > -3.0e38, peak, float("-inf"))
    else:
        is_nonempty = total > 0.0
        result = tl.where(is_nonempty, tl.log2(tl.where(is_nonempty, total, 1.0)) + peak, float("-inf"))
    return result


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_scores(
    q_ptr, k_ptr, scores_ptr, lse_ptr, q_bounds_ptr, k_bounds_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, n_documents, first_query, first_tile, n_blocks, scale_log2,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, LOCAL: tl.constexpr,
    STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    QUERIES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_MAX: tl.constexpr,
):
    """Compute the log-sum-exp of each selection block, in units of log2, for QUERIES queries of one head.

    BLOCK_MAX: the maximum score instead. The keys, one for every STRIDE tokens, do not overlap. Stores float32
    [tiles, B, H, n_blocks, QUERIES] and, unless `lse_ptr` is None, the LSE of all blocks [tiles, B, H, QUERIES]. Without it
    the LOCAL latest blocks have no scores. Neither have tiles whose queries have no more than N_SEL blocks.
    """
    tile, b, h = get_reversed_tile(B, G * HEADS)
    row = (tile * B + b) * (G * HEADS) + h
    tile += first_tile
    if q_bounds_ptr is not None:
        _, tile, first, T, first_key, N = find_document_of_tile(
            q_bounds_ptr, k_bounds_ptr, n_documents, tile, 1, QUERIES
        )
        q_ptr += first * stride_qt
        k_ptr += first_key * stride_kn
    query = tl.arange(0, QUERIES)
    t = tl.minimum(tile * QUERIES + query, T - 1)
    position, first_t, last_t = t, tile * QUERIES, tl.minimum(tile * QUERIES + QUERIES - 1, T - 1)
    if first_query is not None:
        position, first_t, last_t = t + first_query, first_t + first_query, last_t + first_query
    own_block = last_t // L_SEL
    if (tile * QUERIES >= T) | (own_block < N_SEL):
        return
    q_base = q_ptr + b * stride_qb + h * stride_qh
    q = load_rows(q_base, t.to(tl.int64) * stride_qt, tl.arange(0, DK_PAD), DK, DK_PAD)
    k_base = k_ptr + b * stride_kb + h // HEADS * stride_kg
    stop = own_block + 1
    if lse_ptr is None:
        stop -= LOCAL
    n_visible = (position + 1) // STRIDE
    # All queries of the tile attend to all keys of the first blocks.
    n_unmasked = tl.minimum((first_t + 1) // L_SEL, stop) // BLOCKS * BLOCKS
    peak, sum_of_blocks = tl.full([QUERIES], -3.0e38, tl.float32), tl.zeros([QUERIES], tl.float32)
    for MASKED in tl.static_range(2):
        for j0 in range(n_unmasked if MASKED else 0, stop if MASKED else n_unmasked, BLOCKS):
            score = _compute_block_logsumexp(
                q, k_base, stride_kn, n_visible, j0, N, scale_log2,
                STRIDES, STRIDES_AT_ONCE, DK, DK_PAD, QUERIES, BLOCKS, BLOCK_MAX,
                (MASKED == 1) | (STRIDES % STRIDES_AT_ONCE > 0),
            )
            j = j0 + tl.arange(0, BLOCKS)
            offsets = (row * n_blocks + j)[None, :] * QUERIES + query[:, None]
            tl.store(scores_ptr + offsets, score, mask=(j < n_blocks)[None, :])
            if lse_ptr is not None:
                new_peak = tl.maximum(peak, tl.max(score, 1))
                p = tl.exp2(score - new_peak[:, None])
                sum_of_blocks = sum_of_blocks * tl.exp2(peak - new_peak) + tl.sum(p, 1)
                peak = new_peak
    if lse_ptr is not None:
        tl.store(lse_ptr + row * QUERIES + query, peak + tl.log2(sum_of_blocks))


@triton.jit
def load_block_scores(
    scores_ptr, lse_ptr, row, offset, j, stop, n_blocks,
    HEADS: tl.constexpr, TILE_QUERIES: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Return scores [QUERIES, BLOCKS] of blocks j before `stop`, for QUERIES queries of one tile.

    They are the log-sum-exps of the only head, or the probabilities of a block summed over HEADS heads. `row`: the first
    head. `offset`: the first query within the tile of TILE_QUERIES.
    """
    query = offset + tl.arange(0, QUERIES)
    score = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for head in range(HEADS):
        offsets = ((row + head) * n_blocks + j)[None, :] * TILE_QUERIES + query[:, None]
        logsumexp = tl.load(scores_ptr + offsets, mask=(j < stop)[None, :], other=float("-inf"))
        if lse_ptr is None:
            score = logsumexp
        else:
            score += tl.exp2(logsumexp - tl.load(lse_ptr + (row + head) * TILE_QUERIES + query)[:, None])
    return score
# fmt: on


class RankedTiles(NamedTuple):
    """Consecutive tiles of queries whose blocks are ranked by one launch."""

    first_tile: int
    n_tiles: int
    scores: Tensor | None
    """Results of `nsa_block_scores` for these tiles. None: keys are scored when their blocks are ranked."""
    lse: Tensor | None
    """With `scores`, the LSE of each tile; None for one head per group. Otherwise the LSE of each query."""


# fmt: off
def score_blocks(
    q: Tensor, k: Tensor, n_blocks: int, d: int, l_sel: int, n_sel: int, local_blocks: int, block_max: bool,
    bounds: tuple[Tensor | None, Tensor | None, int | None], first: int,
) -> Iterator[RankedTiles]:
    """Score up to `n_blocks` blocks for q [B, T, H, Dk], a piece at a time. The next piece overwrites the last one.

    k: [B, N, G, Dk], a key for every `d` tokens. `bounds`: of packed documents, from `split_bounds`. `first`: position of
    query 0. Blocks that the ranking does not read have no scores; see `nsa_block_scores`.
    """
    B, T, H, Dk = q.shape
    N, G = k.shape[1:3]
    q_bounds, k_bounds, n_documents = bounds
    tile = launch_table.block_scores(q.dtype, Dk, q.device)
    n_strides = l_sel // d
    strides_at_once = min(padded_width(n_strides), tile.keys)
    n_tiles = count_tiles(T, tile.rows, n_documents)
    tiles_at_once = min(ceil_div(launch_table.BLOCK_SCORES_PROGRAMS, B * H), n_tiles)
    scores = q.new_empty(tiles_at_once, B, H, n_blocks, tile.rows, dtype=torch.float32)
    lse = scores.new_empty(tiles_at_once, B, H, tile.rows) if H > G else None
    for first_tile in range(0, n_tiles, tiles_at_once):
        count = min(tiles_at_once, n_tiles - first_tile)
        nsa_block_scores[(count * B * H,)](
            q, k, scores, lse, q_bounds, k_bounds, *get_strides(q, k),
            T, N, B, G, n_documents, first or None, first_tile, n_blocks, Dk**-0.5 * kernel_names.LOG2E,
            HEADS=H // G, STRIDE=d, L_SEL=l_sel, N_SEL=n_sel, LOCAL=local_blocks,
            STRIDES=n_strides, STRIDES_AT_ONCE=strides_at_once, DK=Dk, DK_PAD=padded_width(Dk),
            QUERIES=tile.rows, BLOCKS=tile.keys // strides_at_once, BLOCK_MAX=block_max,
            **tile.compile_options(),
        )
        yield RankedTiles(first_tile, count, scores, lse)
# fmt: on
