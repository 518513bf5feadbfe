"""Addresses of keys in the cache, and attention of a tile of rows to the keys of one part.

A row is a (query, head) pair. A part is a share of the keys that a tile attends to. Nothing past the length of a sequence
is read.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.stored_keys import load_stored_rows
from nsa_lab.attention.kernels.tiles import load_rows_masked

NO_PEAK = tl.constexpr(-3.0e38)
"""Initial peak. It is finite, so that a fully masked tile gives exp2(-inf - peak) = 0 and never inf - inf."""


# fmt: off
@triton.jit
def get_slot_offsets(n, stride_n, slots):
    """Return the offsets of keys n in a ring of `slots` slots. A buffer that never wraps is also a ring."""
    return (n % slots).to(tl.int64) * stride_n


@triton.jit
def get_part_range(first, stop, part, parts, KEYS: tl.constexpr):
    """Return the keys [start, stop) of a part. Parts have equal numbers of whole tiles, the last ones fewer or none."""
    keys = tl.cdiv(tl.cdiv(stop - first, KEYS), parts) * KEYS
    start = first + part * keys
    return start, tl.minimum(start + keys, stop)


@triton.jit
def load_queries(
    q_base, stride_qt, stride_qh, tile, T, HEADS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return (q, t, head, inside) of the rows of a tile; q is zero in rows that do not exist."""
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < T * HEADS
    t, head = row // HEADS, row % HEADS
    offsets = t.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q = load_rows_masked(q_base, offsets, tl.arange(0, DK_PAD), inside, DK, DK_PAD)
    return q, t, head, inside


@triton.jit
def init_sums(ROWS: tl.constexpr, DV_PAD: tl.constexpr):
    """Return the initial acc, peak and total of an online softmax."""
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    return acc, tl.full([ROWS], NO_PEAK, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def compute_scores(q, k):
    """Return q [ROWS, D] @ k [KEYS, D]^T: [ROWS, KEYS].

    In float32, wide heads are summed in slices of 64 columns: one chain of 256 additions has 2.5 times the rounding error
    of four chains of 64.
    """
    N_SLICES: tl.constexpr = q.shape[1] // 64 if q.dtype == tl.float32 else 1  # pyright: ignore[reportAssignmentType]
    # Two branches instead of an early return: before Triton 3.7, code after a return is compiled anyway.
    if N_SLICES > 1:
        q_slices = tl.permute(tl.reshape(q, [q.shape[0], N_SLICES, 64]), [1, 0, 2])
        k_slices = tl.permute(tl.reshape(k, [k.shape[0], N_SLICES, 64]), [1, 2, 0])
        scores = tl.sum(tl.dot(q_slices, k_slices, input_precision="ieee"), 0)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return scores


@triton.jit
def add_tile(acc, peak, total, scores, v):
    """Return acc, peak and total after one more tile. Scores are in units of log2, -inf where masked."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    p = tl.exp2(scores - new_peak[:, None])
    rescale = tl.exp2(peak - new_peak)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_peak, total * rescale + tl.sum(p, 1)


@triton.jit
def store_scores(scores_ptr, rows, n, scores, inside, stop, N):
    """Store the scores of a tile's rows with keys n, for block selection."""
    pointers = scores_ptr + rows[:, None] * N + n[None, :]
    tl.store(pointers, scores, mask=inside[:, None] & (n < stop)[None, :])


@triton.jit
def store_sums(part_sums_ptr, offsets, peak, total, inside):
    """Store the peak and total of each row's part, adjacent. A single LSE instead would lose precision if it is large."""
    tl.store(part_sums_ptr + 2 * offsets, peak, mask=inside)
    tl.store(part_sums_ptr + 2 * offsets + 1, total, mask=inside)


@triton.jit
def load_sums(part_sums_ptr, offsets, inside):
    """Load what `store_sums` stored; the initial values for parts that are not `inside`."""
    peak = tl.load(part_sums_ptr + 2 * offsets, mask=inside, other=NO_PEAK)
    return peak, tl.load(part_sums_ptr + 2 * offsets + 1, mask=inside, other=0.0)


@triton.jit
def store_part(part_out_ptr, part_sums_ptr, offsets, acc, peak, total, inside, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """Store acc, peak and total of each row's part. A part without keys stores only peak and total."""
    store_sums(part_sums_ptr, offsets, peak, total, inside)
    columns = tl.arange(0, DV_PAD)
    pointers = part_out_ptr + offsets[:, None] * DV + columns[None, :]
    # A NaN total is stored as well, so that it reaches the output.
    tl.store(pointers, acc, mask=(inside & (total != 0.0))[:, None] & (columns < DV)[None, :])


@triton.jit
def attend_range(
    q, k_base, v_base, stride_kn, stride_vn, position, start, stop, stride, key_end, scores_ptr, score_rows, store_rows, N,
    scale_log2,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return acc, peak and total of attention to the keys [start, stop).

    Key n ends at position n * stride + key_end. A query attends to keys that end at or before its position. If `scores_ptr`
    is given, the scores of rows in the mask `store_rows` are stored there. FORMAT: how the keys are stored. Without
    `v_base`, the keys are the values.
    """
    acc, peak, total = init_sums(ROWS, DV_PAD)
    for first in range(start, stop, KEYS):
        n = first + tl.arange(0, KEYS)
        k_rows, v_rows = n.to(tl.int64) * stride_kn, n.to(tl.int64) * stride_vn
        k = load_stored_rows(k_base, k_rows, tl.arange(0, DK_PAD), n < stop, DK, DK_PAD, FORMAT, q.dtype)
        v = k
        if v_base is not None:
            v = load_rows_masked(v_base, v_rows, tl.arange(0, DV_PAD), n < stop, DV, DV_PAD)
        scores = compute_scores(q, k) * scale_log2
        if scores_ptr is not None:
            store_scores(scores_ptr, score_rows, n, scores, store_rows, stop, N)
        seen = ((n * stride + key_end)[None, :] <= position[:, None]) & (n < stop)[None, :]
        acc, peak, total = add_tile(acc, peak, total, tl.where(seen, scores, float("-inf")), v)
    return acc, peak, total
# fmt: on
