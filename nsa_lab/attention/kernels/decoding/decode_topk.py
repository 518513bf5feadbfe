"""Block selection in decoding, from the scores of compressed keys (eq. 8 to 11). launch.py launches these kernels.

The kernel that reads the compressed keys stores the scores of all heads, because a probability needs the sum over all keys.
The importance of a block is then the sum of the probabilities of the few compressed keys that overlap it, so no matrix of
keys times blocks is needed. For an indexer, whose keys do not overlap, a log-sum-exp per block and head is stored instead,
and the heads are summed when the blocks are ranked. In both cases every competing block has a score. Each program that
attends to selected blocks ranks all blocks (`select_topk`), which saves the launch of a separate kernel.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# The outer of two nested `if`s is evaluated at compile time, so that code for absent inputs is not compiled.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.block_topk import (
    MIN_SCORE,
    NO_BLOCK,
    add_forced_blocks,
    compute_block_logsumexp,
    to_ordered_bits,
)
from nsa_lab.attention.kernels.decoding.kv_tiles import NO_PEAK, load_queries, load_sums
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.stored_keys import FP8, HARDWARE_FP8, scale_to_float16
from nsa_lab.attention.kernels.tiles import get_batch_and_group

EMPTY_KEY = tl.constexpr(-(2**63))
"""Sort key of an empty slot; less than the key of every block."""


# fmt: off
@triton.jit
def needs_scores(position, L_SEL: tl.constexpr, N_SEL: tl.constexpr):
    """Return True if there are more blocks than slots. Only then are scores needed."""
    return position // L_SEL + 1 > N_SEL


@triton.jit
def reduce_probabilities(scores_ptr, i, inside, peak, inverse_total, HEAD_MAX: tl.constexpr):
    """Return the probabilities of keys i, summed over heads, or their maximum; 0 where no head is `inside`."""
    scores = tl.load(scores_ptr + i[None, :], mask=inside, other=float("-inf"))
    p = tl.exp2(scores - peak[:, None]) * inverse_total[:, None]
    return tl.max(p, 0) if HEAD_MAX else tl.sum(p, 0)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_importance(
    scores_ptr, part_sums_ptr, lengths_ptr, importance_ptr,
    T, N, G, n_blocks, row_parts,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr,
    N_SEL: tl.constexpr, LOCAL: tl.constexpr, HEAD_MAX: tl.constexpr, BLOCK_MAX: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BLOCKS: tl.constexpr, STRIDES_PAD: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute the importance of BLOCKS selection blocks for one query, reduced over the heads of a group (eq. 9).

    HEAD_MAX, BLOCK_MAX: maximum over heads, or over the keys of a block, instead of the sum. A maximum over keys is for
    keys that do not overlap. Stores float32 [B, T, G, n_blocks]. A row has `row_parts` parts, of which the first PARTS
    belong to the compressed keys.
    """
    STRIDES: tl.constexpr = L_SEL // STRIDE
    REACH: tl.constexpr = L // STRIDE
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    pdl_wait(USE_PDL)
    first_block = tl.program_id(1) * BLOCKS
    if (first_block > position // L_SEL - LOCAL) | (not needs_scores(position, L_SEL, N_SEL)):
        return
    head = tl.arange(0, HEADS_PAD)
    part = tl.arange(0, PARTS_PAD)
    index = (row * HEADS + head)[:, None] * row_parts + part[None, :]
    part_peak, part_total = load_sums(part_sums_ptr, index, (head < HEADS)[:, None] & (part < PARTS)[None, :])
    peak = tl.max(part_peak, 1)
    total = tl.sum(part_total * tl.exp2(part_peak - peak[:, None]), 1)
    # Padding heads have no total and no probabilities.
    inverse_total = 1.0 / tl.where(head < HEADS, total, 1.0)
    stop = tl.minimum(count_visible_keys(position, L, STRIDE), N)
    j = first_block + tl.arange(0, BLOCKS)
    scores_ptr += (row * HEADS + head)[:, None] * N
    importance = tl.zeros([BLOCKS], tl.float32)
    # Keys that start before a block and overlap it.
    for stride_offset in tl.static_range(1 - REACH, 0):
        i = j * STRIDES + stride_offset
        inside = (head < HEADS)[:, None] & ((i >= 0) & (i < stop))[None, :]
        probabilities = reduce_probabilities(scores_ptr, i, inside, peak, inverse_total, HEAD_MAX)
        importance += probabilities * min(stride_offset + REACH, STRIDES)
    # Keys that start inside a block are adjacent.
    index = tl.arange(0, BLOCKS * STRIDES_PAD)
    stride_offset = index % STRIDES_PAD
    i = (first_block + index // STRIDES_PAD) * STRIDES + stride_offset
    inside = (head < HEADS)[:, None] & ((stride_offset < STRIDES) & (i < stop))[None, :]
    probabilities = reduce_probabilities(scores_ptr, i, inside, peak, inverse_total, HEAD_MAX)
    by_block = tl.reshape(probabilities * tl.minimum(STRIDES - stride_offset, REACH), [BLOCKS, STRIDES_PAD])
    if BLOCK_MAX:
        importance = tl.max(by_block, 1)
    else:
        importance += tl.sum(by_block, 1)
    tl.store(importance_ptr + row * n_blocks + j, importance, mask=j < n_blocks)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_logsumexp(
    q_ptr, k_ptr, lengths_ptr, logsumexp_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, row_tiles, n_blocks, scale_log2,
    STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, LOCAL: tl.constexpr, BLOCK_MAX: tl.constexpr,
    STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute the indexer score of BLOCKS blocks: the log2 of sum(exp(score)) over the index keys of a block.

    BLOCK_MAX: the maximum score instead. The HEADS heads of a group share its keys, and each has its own scores. Stores
    float32 [B, T, G HEADS, n_blocks]. The keys of a block are adjacent. The
    probabilities of a single head have the same denominator, so these scores give the same order (block_topk.py).
    """
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    before = tl.load(lengths_ptr + b)
    pdl_wait(USE_PDL)
    last_block = (before + T - 1) // L_SEL - LOCAL
    if (part * BLOCKS > last_block) | (not needs_scores(before + T - 1, L_SEL, N_SEL)):
        return
    q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
    q, t, head, inside = load_queries(q_base, stride_qt, stride_qh, tile, T, HEADS, DK, DK_PAD, ROWS)
    j = part * BLOCKS + tl.arange(0, BLOCKS)
    row_scale = scale_log2
    if (FORMAT == FP8) | (FORMAT == HARDWARE_FP8):
        if q.dtype != tl.float32:
            q, inverse = scale_to_float16(q)
            row_scale = scale_log2 * inverse[:, None]
    # Padding rows use the position of the last row: past it, the cache may be uninitialized.
    position = before + tl.minimum(t, T - 1)
    logsumexp = compute_block_logsumexp(
        q, k_ptr + b * stride_kb + g * stride_kg, stride_kn, position, part * BLOCKS, N, row_scale,
        STRIDE, STRIDE, STRIDES, STRIDES_AT_ONCE, DK, DK_PAD, ROWS, BLOCKS, BLOCK_MAX, FORMAT,
    )
    offsets = (((b * T + t) * G + g) * HEADS + head)[:, None] * n_blocks + j[None, :]
    tl.store(logsumexp_ptr + offsets, logsumexp, mask=inside[:, None] & (j < n_blocks)[None, :])


@triton.jit
def make_sort_keys(score, j, competes):
    """Return an int64 key per block j. The larger key has the higher score or, for equal scores, the lower index."""
    # A NaN score ranks last, so that the selected blocks are still a valid set.
    bits = to_ordered_bits(tl.where(score > MIN_SCORE, score, MIN_SCORE).to(tl.int32, bitcast=True))
    return tl.where(competes, (bits.to(tl.int64) << 32) | (j ^ NO_BLOCK).to(tl.int64), EMPTY_KEY)


@triton.jit
def find_topk(keys, N_FREE: tl.constexpr, SLOTS: tl.constexpr):
    """Return the N_FREE largest of the `keys`, which are distinct, in SLOTS slots; the other slots have EMPTY_KEY."""
    slot = tl.arange(0, SLOTS)
    best = tl.full([SLOTS], EMPTY_KEY, tl.int64)
    for rank in range(N_FREE):
        top = tl.max(keys, 0)
        best = tl.where(slot == rank, top, best)
        keys = tl.where(keys == top, EMPTY_KEY, keys)
    return best


@triton.jit
def load_scores(scores_ptr, head, j, stop, n_blocks, HEADS: tl.constexpr):
    """Return the scores of blocks j by head; -inf from `stop` on, and for heads that do not exist."""
    inside = (head < HEADS)[:, None] & (j < stop)[None, :]
    return tl.load(scores_ptr + head[:, None] * n_blocks + j[None, :], mask=inside, other=float("-inf"))


@triton.jit
def sum_over_blocks(scores_ptr, head, stop, n_blocks, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the peak of the scores of the blocks before `stop`, and the sum of exp2(score - peak), by head."""
    peak, total = tl.full([HEADS_PAD], NO_PEAK, tl.float32), tl.zeros([HEADS_PAD], tl.float32)
    for first_block in range(0, stop, BLOCKS):
        scores = load_scores(scores_ptr, head, first_block + tl.arange(0, BLOCKS), stop, n_blocks, HEADS)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None]), 1)
        peak = new_peak
    return peak, total


@triton.jit
def select_topk(
    scores_ptr, position, n_blocks,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Return the blocks of the query at `position`, int32 [N_SEL_PAD], with the result of `block_topk.nsa_block_topk`.

    `scores_ptr`: scores of this query and group. With several HEADS per group, they are log-sum-exps of all visible blocks,
    and the sum of the heads' probabilities ranks the blocks. Without scores all blocks fit into the slots. Each slot takes
    one reduction over BLOCKS blocks, one after another.
    """
    N_FREE: tl.constexpr = N_SEL - SINK - LOCAL
    own_block = position // L_SEL
    slot = tl.arange(0, N_SEL_PAD)
    last_free = own_block - LOCAL
    selected = tl.where(slot + SINK <= last_free, slot + SINK, NO_BLOCK)
    if scores_ptr is not None:
        if needs_scores(position, L_SEL, N_SEL):
            head = tl.arange(0, HEADS_PAD)
            peak, inverse_total = tl.zeros([HEADS_PAD], tl.float32), tl.zeros([HEADS_PAD], tl.float32)
            if HEADS > 1:
                peak, total = sum_over_blocks(scores_ptr, head, own_block + 1, n_blocks, HEADS, HEADS_PAD, BLOCKS)
                inverse_total = 1.0 / tl.where(head < HEADS, total, 1.0)
            best = tl.full([N_SEL_PAD], EMPTY_KEY, tl.int64)
            for first_block in range(SINK, last_free + 1, BLOCKS):
                j = first_block + tl.arange(0, BLOCKS)
                if HEADS > 1:
                    scores = load_scores(scores_ptr, head, j, last_free + 1, n_blocks, HEADS)
                    score = tl.sum(tl.exp2(scores - peak[:, None]) * inverse_total[:, None], 0)
                else:
                    score = tl.load(scores_ptr + j, mask=j <= last_free, other=MIN_SCORE)
                top = find_topk(make_sort_keys(score, j, j <= last_free), N_FREE, N_SEL_PAD)
                if first_block > SINK:
                    top = find_topk(tl.reshape(tl.join(best, top), [2 * N_SEL_PAD]), N_FREE, N_SEL_PAD)
                best = top
            selected = tl.where(best == EMPTY_KEY, NO_BLOCK, best.to(tl.int32) ^ NO_BLOCK)
    blocks = add_forced_blocks(selected[None, :], own_block + tl.zeros([1], tl.int32), N_SEL, N_SEL_PAD, SINK, LOCAL)
    return tl.reshape(blocks, [N_SEL_PAD])
# fmt: on
