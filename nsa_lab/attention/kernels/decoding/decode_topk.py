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
from nsa_lab.attention.kernels.block_scores import finish_block_logsumexp
from nsa_lab.attention.kernels.block_topk import MIN_SCORE, NO_BLOCK, add_forced_blocks, to_ordered_bits
from nsa_lab.attention.kernels.decoding.kv_tiles import NO_PEAK, load_sums
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait, prefetch_to_l2
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.stored_keys import (
    MXFP4,
    PLAIN,
    get_float16_factor,
    load_mxfp4_halves,
    load_stored_rows,
)
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


@triton.jit
def load_query_chunk(
    q_rows, inside, factor, first, CHUNK: tl.constexpr, CHUNK_PAD: tl.constexpr, TO_FLOAT16: tl.constexpr
):
    """Load CHUNK channels of the queries from `first` on, [CHUNK_PAD, ROWS]; times `factor` in float16 with TO_FLOAT16."""
    channels = tl.arange(0, CHUNK_PAD)
    mask = inside[None, :] & (channels < CHUNK)[:, None]
    q = tl.load(q_rows[None, :] + first + channels[:, None], mask=mask, other=0.0)
    if TO_FLOAT16:
        q = (q.to(tl.float32) * factor[None, :]).to(tl.float16)
    return q


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_logsumexp(
    q_ptr, k_ptr, lengths_ptr, logsumexp_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kg,
    T, N, B, G, row_tiles, n_blocks, scale_log2,
    STRIDE_KN: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK_MAX: tl.constexpr, STRIDES: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    FORMAT: tl.constexpr, CHUNK: tl.constexpr, CHUNK_PAD: tl.constexpr, ROW_BYTES: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compute the indexer score of BLOCKS blocks: the log2 of sum(exp(score)) over the index keys of a block.

    BLOCK_MAX: the maximum score instead. The HEADS heads of a group share its keys, and each has its own scores. Stores
    float32 [B, T, G HEADS, n_blocks]. The keys of a block are adjacent. The probabilities of a single head have the same
    denominator, so these scores give the same order (block_scores.py).
    """
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    before = tl.load(lengths_ptr + b)
    first_block = part * BLOCKS
    if USE_PDL:  # the keys of the first two steps
        key = first_block * STRIDES + tl.arange(0, 2 * BLOCKS_AT_ONCE * STRIDES_AT_ONCE)
        keys_ptr = k_ptr + b * stride_kb + g * stride_kg + key.to(tl.int64) * STRIDE_KN
        prefetch_to_l2(keys_ptr, (key < N) & (key * STRIDE < before + T))
    pdl_wait(USE_PDL)
    last_block = (before + T - 1) // L_SEL - LOCAL
    if (first_block > last_block) | (not needs_scores(before + T - 1, L_SEL, N_SEL)):
        return
    if FORMAT == MXFP4:  # tell the compiler by what the strides are divisible
        stride_kb, stride_kg = stride_kb // ROW_BYTES * ROW_BYTES, stride_kg // ROW_BYTES * ROW_BYTES
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < T * HEADS
    # Padding rows use the position of the last row: past it, the cache may be uninitialized.
    t, head = tl.minimum(row // HEADS, T - 1), row % HEADS
    position = before + t
    q_rows = q_ptr + b * stride_qb + g * HEADS * stride_qh + t.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    channels = tl.arange(0, DK_PAD)
    q = tl.load(q_rows[None, :] + channels[:, None], mask=inside[None, :] & (channels < DK)[:, None], other=0.0)
    scale = tl.full([ROWS], 1.0, tl.float32) * scale_log2
    factor = tl.full([ROWS], 1.0, tl.float32)
    TO_FLOAT16: tl.constexpr = FORMAT != PLAIN and q.dtype != tl.float32  # pyright: ignore[reportAssignmentType]
    if TO_FLOAT16:
        factor = get_float16_factor(q)
        q = (q.to(tl.float32) * factor[None, :]).to(tl.float16)
        scale /= factor
    # The rows of a product that a warp computes, 16 adjacent ones, are keys of the same blocks: sums do not cross warps.
    ADJACENT: tl.constexpr = STRIDES_AT_ONCE if STRIDES_AT_ONCE < 16 else 16
    key = tl.arange(0, BLOCKS_AT_ONCE * STRIDES_AT_ONCE)
    block_of_key = key // ADJACENT % BLOCKS_AT_ONCE
    stride_of_key = key // (ADJACENT * BLOCKS_AT_ONCE) * ADJACENT + key % ADJACENT
    key = block_of_key * STRIDES + stride_of_key
    n_visible = (position + 1) // STRIDE
    k_base = k_ptr + b * stride_kb + g * stride_kg
    for j0 in range(first_block, tl.minimum(first_block + BLOCKS, last_block + 1), BLOCKS_AT_ONCE):
        # Each block has a separate peak: relative to the peak of another block, its sum could underflow.
        peak = tl.full([BLOCKS_AT_ONCE, ROWS], NO_PEAK, tl.float32)
        total = tl.zeros([BLOCKS_AT_ONCE, ROWS], tl.float32)
        for s0 in range(0, STRIDES, STRIDES_AT_ONCE):
            first = j0 * STRIDES + s0
            k_tile = k_base + tl.cast(first, tl.int64) * STRIDE_KN
            exists = key < N - first
            if FORMAT == MXFP4:
                scores = tl.zeros([BLOCKS_AT_ONCE * STRIDES_AT_ONCE, ROWS], tl.float32)
                for chunk in tl.static_range(DK // 2 // CHUNK):
                    low, high, low_scale, high_scale = load_mxfp4_halves(
                        k_tile, key * STRIDE_KN, chunk * CHUNK, exists, DK // 2, CHUNK, CHUNK_PAD, ROW_BYTES % 2 == 0
                    )
                    low_q = load_query_chunk(q_rows, inside, factor, chunk * CHUNK, CHUNK, CHUNK_PAD, TO_FLOAT16)
                    high_q = load_query_chunk(q_rows, inside, factor, DK // 2 + chunk * CHUNK, CHUNK, CHUNK_PAD, TO_FLOAT16)
                    scores += tl.dot(low.to(low_q.dtype), low_q, input_precision="ieee") * low_scale[:, None]
                    scores += tl.dot(high.to(high_q.dtype), high_q, input_precision="ieee") * high_scale[:, None]
            else:
                k = load_stored_rows(k_tile, key * STRIDE_KN, channels, exists, DK, DK_PAD, FORMAT, q.dtype)
                scores = tl.dot(k, q, input_precision="ieee")
            seen = (stride_of_key < STRIDES - s0)[:, None] & (key[:, None] < (n_visible - first)[None, :])
            # Axis 0 is in the registers of a thread, axis 2 in the threads of a warp.
            scores = tl.where(seen, scores, float("-inf"))
            scores = tl.reshape(scores, [STRIDES_AT_ONCE // ADJACENT, BLOCKS_AT_ONCE, ADJACENT, ROWS])
            new_peak = tl.maximum(peak, tl.max(tl.max(scores, 0), 1) * scale[None, :])
            if not BLOCK_MAX:
                p = tl.exp2(scores * scale[None, None, None, :] - new_peak[None, :, None, :])
                total = total * tl.exp2(peak - new_peak) + tl.sum(tl.sum(p, 0), 1)
            peak = new_peak
        j = j0 + tl.arange(0, BLOCKS_AT_ONCE)
        offsets = (((b * T + t) * G + g) * HEADS + head)[None, :] * n_blocks + j[:, None]
        result = finish_block_logsumexp(peak, total, BLOCK_MAX)
        tl.store(logsumexp_ptr + offsets, result, mask=inside[None, :] & (j < n_blocks)[:, None])


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
