"""Where a key lies in the cache, and the attention of a tile of rows to the keys of one part.

A row is (query, head), as everywhere; a part is a share of the keys that a tile sees. Nothing that lies past a sequence's
length is read.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.tiles import load_rows_masked

NO_PEAK = tl.constexpr(-3.0e38)
"""Of what has seen nothing: finite, so that a wholly masked tile gives exp2(-inf - peak) = 0 and never inf - inf."""


# fmt: off
@triton.jit
def get_block_offset(block, stride_n, L_SEL: tl.constexpr):
    """Elements from the first key of a sequence and group to the first of a selection block. A cache in pages would look
    its page up here."""
    return block.to(tl.int64) * (stride_n * L_SEL)


@triton.jit
def get_slot_offsets(n, stride_n, slots):
    """Elements from slot 0 of a ring to those that hold the keys n. What never wraps is a ring too."""
    return (n % slots).to(tl.int64) * stride_n


@triton.jit
def get_part_range(first, stop, part, parts, KEYS: tl.constexpr):
    """The keys [start, stop) of a part: as many whole tiles of [first, stop) as others, the last ones fewer or none."""
    keys = tl.cdiv(tl.cdiv(stop - first, KEYS), parts) * KEYS
    start = first + part * keys
    return start, tl.minimum(start + keys, stop)


@triton.jit
def load_queries(
    q_base, stride_qt, stride_qh, tile, T, HEADS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """(q, t, head, inside) of a tile's rows; those that do not exist are zero."""
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < T * HEADS
    t, head = row // HEADS, row % HEADS
    offsets = t.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = load_rows_masked(q_base, offsets, tl.arange(0, DK_PAD), inside, DK, DK_PAD)
    return q, t, head, inside


@triton.jit
def init_sums(ROWS: tl.constexpr, DV_PAD: tl.constexpr):
    """acc, peak and total of an online softmax that has seen nothing."""
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    return acc, tl.full([ROWS], NO_PEAK, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def compute_scores(q, k):
    """q [ROWS, D] times each of k [KEYS, D]: [ROWS, KEYS].

    In float32 a wide head is summed in stretches: one chain of 256 additions rounds 2.5 times as much as four of 64.
    """
    STRETCHES: tl.constexpr = q.shape[1] // 64 if q.dtype == tl.float32 else 1  # pyright: ignore[reportAssignmentType]
    # One of two branches, and no early return: before Triton 3.7 what follows a return is compiled all the same.
    if STRETCHES > 1:
        q_stretches = tl.permute(tl.reshape(q, [q.shape[0], STRETCHES, 64]), [1, 0, 2])
        k_stretches = tl.permute(tl.reshape(k, [k.shape[0], STRETCHES, 64]), [1, 2, 0])
        scores = tl.sum(tl.dot(q_stretches, k_stretches, input_precision="ieee"), 0)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return scores


@triton.jit
def add_tile(acc, peak, total, scores, v):
    """The sums after one more tile; scores in units of log2, -inf where they do not count."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    p = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total * shrink + tl.sum(p, 1)


@triton.jit
def store_scores(scores_ptr, rows, n, scores, inside, stop, N):
    """Of a tile's rows to its keys n, for the choice."""
    pointers = scores_ptr + rows[:, None] * N + n[None, :]
    tl.store(pointers, scores, mask=inside[:, None] & (n < stop)[None, :])


@triton.jit
def store_sums(part_sums_ptr, place, peak, total, inside):
    """Peak and total of each row's part, side by side. One LSE in their stead would be rounded by its own size."""
    tl.store(part_sums_ptr + 2 * place, peak, mask=inside)
    tl.store(part_sums_ptr + 2 * place + 1, total, mask=inside)


@triton.jit
def load_sums(part_sums_ptr, place, inside):
    """What `store_sums` left; of parts that are not `inside`, that they saw nothing."""
    peak = tl.load(part_sums_ptr + 2 * place, mask=inside, other=NO_PEAK)
    return peak, tl.load(part_sums_ptr + 2 * place + 1, mask=inside, other=0.0)


@triton.jit
def store_part(part_out_ptr, part_sums_ptr, place, acc, peak, total, inside, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """All sums of each row's part; without any keys peak and total alone."""
    store_sums(part_sums_ptr, place, peak, total, inside)
    columns = tl.arange(0, DV_PAD)
    pointers = part_out_ptr + place[:, None] * DV + columns[None, :]
    # Also where the total is NaN, which must show.
    tl.store(pointers, acc, mask=(inside & (total != 0.0))[:, None] & (columns < DV)[None, :])


@triton.jit
def attend_range(
    q, k_base, v_base, stride_kn, stride_vn, position, start, stop, slots, period, reach, near,
    scores_ptr, score_rows, scored, N, scale_log2,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """acc, peak and total of keys [start, stop), each of which a query sees once it has ended, at `n * period + reach`, and
    while it is one of the `near` latest. Where there is a `scores_ptr`, it takes the scores of rows that are `scored`."""
    acc, peak, total = init_sums(ROWS, DV_PAD)
    for first in range(start, stop, KEYS):
        n = first + tl.arange(0, KEYS)
        k = load_rows_masked(k_base, get_slot_offsets(n, stride_kn, slots), tl.arange(0, DK_PAD), n < stop, DK, DK_PAD)
        v = load_rows_masked(v_base, get_slot_offsets(n, stride_vn, slots), tl.arange(0, DV_PAD), n < stop, DV, DV_PAD)
        scores = compute_scores(q, k) * scale_log2
        if scores_ptr is not None:
            store_scores(scores_ptr, score_rows, n, scores, scored, stop, N)
        seen = (n * period + reach)[None, :] <= position[:, None]
        seen = seen & (n[None, :] > position[:, None] - near) & (n < stop)[None, :]
        acc, peak, total = add_tile(acc, peak, total, tl.where(seen, scores, float("-inf")), v)
    return acc, peak, total


@triton.jit
def attend_blocks(
    q, k_base, v_base, stride_kn, stride_vn, blocks_ptr, position, start, stop, N, scale_log2, L_SEL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """acc, peak and total of the keys up to `position` in the chosen blocks [start, stop) of one query."""
    TILES: tl.constexpr = (L_SEL + KEYS - 1) // KEYS
    acc, peak, total = init_sums(ROWS, DV_PAD)
    for step in range(start * TILES, stop * TILES):
        block = tl.load(blocks_ptr + step // TILES)
        within = step % TILES * KEYS + tl.arange(0, KEYS)
        n = block * L_SEL + within
        seen = (within < L_SEL) & (n <= position) & (n < N)
        k_block = k_base + get_block_offset(block, stride_kn, L_SEL)
        v_block = v_base + get_block_offset(block, stride_vn, L_SEL)
        k = load_rows_masked(k_block, within * stride_kn, tl.arange(0, DK_PAD), seen, DK, DK_PAD)
        v = load_rows_masked(v_block, within * stride_vn, tl.arange(0, DV_PAD), seen, DV, DV_PAD)
        scores = compute_scores(q, k) * scale_log2
        acc, peak, total = add_tile(acc, peak, total, tl.where(seen[None, :], scores, float("-inf")), v)
    return acc, peak, total
# fmt: on
