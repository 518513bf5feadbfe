"""Backward kernels of attention over a band of keys: dq, dk and dv, sums of dk/dv chunks. launch.py launches them."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import (
    get_key_range,
    get_query_range,
    get_row_tile,
    get_step_range,
    is_in_band,
    name_by_branch,
)
from nsa_lab.attention.kernels.band.forward import compute_tile_scores
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.packed_tiles import find_document_of_tile
from nsa_lab.attention.kernels.tiles import (
    LOG2E,
    add_product_compensated,
    dot_transposed,
    get_batch_and_group,
    get_reversed_tile,
    load_consecutive_parts,
    load_parts,
    load_parts_masked,
    row_offsets,
    store_parts,
    zero_parts,
)


# fmt: off
@triton.jit
def _accumulate_dq(
    dq, dq_rest, q, q_rest, do, do_rest, lse_log2, delta, k_base, v_base, stride_kn, stride_vn,
    t, start, left, full, stop, N, scale_log2,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):
    for step in range(start if MASKED else left, stop - full + left if MASKED else full, KEYS):
        scores, k, k_rest, v, v_rest = compute_tile_scores(
            q, q_rest, k_base, v_base, stride_kn, stride_vn, t, step, left, full, N,
            L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, KEYS, MASKED,
        )
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        dp = dot_transposed(do, do_rest, v, v_rest, DV_REST)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
        if DK_REST > 0:
            dq_rest = tl.dot(ds, k_rest, dq_rest, input_precision="ieee")
    return dq, dq_rest


@triton.jit
def _compute_delta(
    q, q_rest, do, do_rest, lse_log2, k_base, v_base, stride_kn, stride_vn, t, start, stop, N, scale_log2,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """Return delta, the sum of p * dp over the keys of a row, from the same products from which it is later subtracted.

    In exact arithmetic delta is sum(out * do). In float32 the rounded values differ by more than the error of plain float32
    if a row has few keys: for a single key, ds must be p * (dp - dp) = 0. In half precision the difference is far below the
    rounding error.
    """
    delta, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for step in range(start, stop, KEYS):
        scores, _k, _, v, v_rest = compute_tile_scores(
            q, q_rest, k_base, v_base, stride_kn, stride_vn, t, step, start, start, N,
            L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, KEYS, True,
        )
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        # The same operand order as in the dk/dv kernel: the summation order may depend on it.
        dp = tl.trans(dot_transposed(v, v_rest, do, do_rest, DV_REST))
        delta += tl.sum(tl.where(p == 0.0, 0.0, p * dp), 1)
        total += tl.sum(p, 1)
    # The p of a row sum to 1 up to the rounding of its lse, or to 0 if the row attends to nothing.
    return delta / tl.where(total == 0.0, 1.0, total)


@triton.jit
def get_first_stat(first, document, STATS_PAD: tl.constexpr):
    """Return the stats offset of a document at row `first`, a multiple of 16, with STATS_PAD free before it."""
    return (first // 16 + document * (STATS_PAD // 16 + 1)) * 16


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS, repr=name_by_branch("dq"))
def nsa_band_dq(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, dq_ptr, stats_ptr,
    q_bounds_ptr, k_bounds_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_dob, stride_dot, stride_doh, stride_stats,
    T, N, B, G, n_documents, first_query, scale_log2, scale,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STATS_PAD: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_DELTA: tl.constexpr, ADD: tl.constexpr, ONE_LOOP: tl.constexpr,
):
    """Compute dq of one tile of rows, and the stats of its rows that the dk/dv kernel reads.

    stats is [B, H, 2, > T + STATS_PAD]: lse_log2, then delta, each contiguous along the queries, in the order in which the
    dk/dv kernel loads them. The STATS_PAD entries after the last query make p = 0, because the last tile of that kernel can
    extend past it.
    HAS_DELTA: delta is given and out is not read; in float32 delta is computed here in any case. ADD: add to dq instead of
    overwriting it. ONE_LOOP: see `launch_table.Tile`.
    """
    tile, b, g = get_reversed_tile(B, G)
    if q_bounds_ptr is not None:
        document, tile, first, T, first_key, N = find_document_of_tile(
            q_bounds_ptr, k_bounds_ptr, n_documents, tile, HEADS, ROWS
        )
        if tile * ROWS >= T * HEADS:
            return
        q_ptr += first * stride_qt
        do_ptr += first * stride_dot
        dq_ptr += first * (G * HEADS * DK)
        lse_ptr += first * (G * HEADS)
        stats_ptr += get_first_stat(first, document, STATS_PAD)
        if HAS_DELTA:
            delta_ptr += first * (G * HEADS)
        else:
            out_ptr += first * (G * HEADS * DV)
            if HAS_DLSE:
                dlse_ptr += first * (G * HEADS)
        k_ptr += first_key * stride_kn
        v_ptr += first_key * stride_vn
    t, head, t_first, t_last = get_row_tile(tile, T, HEADS, ROWS)
    inside = tile * ROWS + tl.arange(0, ROWS) < T * HEADS
    # Offset of the tile in 64 bits, and offsets of its rows relative to it in 32 bits.
    origin = (b * T + t_first) * (G * HEADS) + g * HEADS
    own_t = t - t_first
    offsets = own_t * (G * HEADS) + head
    q_base = q_ptr + b * stride_qb + tl.cast(t_first, tl.int64) * stride_qt + g * HEADS * stride_qh
    q, q_rest = load_parts(q_base, row_offsets(own_t, head, stride_qt, stride_qh, False), DK, DK_PART, DK_REST)
    do_base = do_ptr + b * stride_dob + tl.cast(t_first, tl.int64) * stride_dot + g * HEADS * stride_doh
    do, do_rest = load_parts(do_base, row_offsets(own_t, head, stride_dot, stride_doh, False), DV, DV_PART, DV_REST)
    lse = tl.load(lse_ptr + origin + offsets)
    # A row that attends to nothing has lse = -inf. With +inf instead, all its p = exp2(s - inf) are 0.
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    position = t
    if first_query is not None:
        position += first_query
        t_first += first_query
        t_last += first_query
    start, left, full, stop = get_key_range(t_first, t_last, L, STRIDE, W, KEYS)
    if do.dtype == tl.float32:
        delta = _compute_delta(
            q, q_rest, do, do_rest, lse_log2, k_base, v_base, stride_kn, stride_vn, position, start, stop, N, scale_log2,
            L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, KEYS,
        )
    elif HAS_DELTA:
        delta = tl.load(delta_ptr + origin + offsets)
    else:
        out, out_rest = load_parts(out_ptr + origin * DV, offsets * DV, DV, DV_PART, DV_REST)
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        if DV_REST > 0:
            delta += tl.sum(do_rest.to(tl.float32) * out_rest.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + origin + offsets)
    group_stats = stats_ptr + (b * G + g) * HEADS * 2 * stride_stats
    stats = group_stats + head.to(tl.int64) * 2 * stride_stats + t
    tl.store(stats, lse_log2, mask=inside)
    tl.store(stats + stride_stats, delta, mask=inside)
    if tile * ROWS + ROWS >= T * HEADS:
        stats_pad = group_stats + T + tl.arange(0, STATS_PAD)
        for _ in range(HEADS):
            tl.store(stats_pad, tl.full([STATS_PAD], float("inf"), tl.float32))
            tl.store(stats_pad + stride_stats, tl.zeros([STATS_PAD], tl.float32))
            stats_pad += 2 * stride_stats

    dq, dq_rest = zero_parts(ROWS, DK_PART, DK_REST)
    if ONE_LOOP:
        left, full = start, start
    for MASKED in tl.static_range(1 if ONE_LOOP else 0, 2):
        dq, dq_rest = _accumulate_dq(
            dq, dq_rest, q, q_rest, do, do_rest, lse_log2, delta, k_base, v_base, stride_kn, stride_vn,
            position, start, left, full, stop, N, scale_log2,
            L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, KEYS, MASKED == 1,
        )
    dq_base = dq_ptr + origin * DK
    dq *= scale
    dq_rest *= scale
    if ADD:
        previous_dq, previous_dq_rest = load_parts_masked(dq_base, offsets * DK, inside, DK, DK_PART, DK_REST)
        dq += previous_dq.to(tl.float32)
        dq_rest += previous_dq_rest.to(tl.float32)
    store_parts(dq_base, offsets * DK, dq, dq_rest, inside, DK, DK_PART, DK_REST)


@triton.jit
def _accumulate_dkv(
    dk, dk_rest, dk_error, dk_rest_error, dv, dv_rest, dv_error, dv_rest_error, k, k_rest, v, v_rest, i,
    q_base, do_base, stats_base,
    stride_qt, stride_qh, stride_dot, stride_doh, stride_stats,
    t_origin, tiles, tile_shift, start, left, right, stop, N, T, first_query, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
):
    """Accumulate dk and dv over the steps [start, stop) except [left, right).

    Step x processes head x % HEADS of query tile x // HEADS, in tiles of ROWS queries from t_origin. With a window, tiles
    are rotated by `tile_shift`: after the last of `tiles` comes the first. TAIL: some masked tile extends past the last
    query; there the last query is repeated and the stats make p = 0.
    """
    PAST_END: tl.constexpr = MASKED and TAIL
    GAP: tl.constexpr = MASKED and W == 0
    for step in range(start, stop - (right - left) if GAP else stop):
        x = step + tl.where(step < left, 0, right - left) if GAP else step
        tile = x // HEADS
        if W > 0:
            tile += tile_shift
            tile -= tl.where(tile >= tiles, tiles, 0)
        tile_t = t_origin + tile * ROWS
        head = tl.cast(x % HEADS, tl.int64)
        q_head = q_base + head * stride_qh
        q, q_rest = load_consecutive_parts(q_head, stride_qt, tile_t, T, DK, DK_PART, DK_REST, ROWS, PAST_END)
        do_head = do_base + head * stride_doh
        do, do_rest = load_consecutive_parts(do_head, stride_dot, tile_t, T, DV, DV_PART, DV_REST, ROWS, PAST_END)
        stats = stats_base + head * 2 * stride_stats + tl.multiple_of(tile_t, 16) + tl.arange(0, ROWS)
        lse_log2 = tl.load(stats)
        delta = tl.load(stats + stride_stats)
        scores = dot_transposed(k, k_rest, q, q_rest, DK_REST)
        # Before the exponentials, so that the compiler interleaves them with the tensor-core instructions of this product.
        dp = dot_transposed(v, v_rest, do, do_rest, DV_REST)
        if MASKED:
            position = tile_t + tl.arange(0, ROWS)
            if first_query is not None:
                position += first_query
            scores = tl.where(is_in_band(i[:, None], position[None, :], N, L, STRIDE, W), scores, float("-inf"))
        p = tl.exp2(scores * scale_log2 - lse_log2[None, :])
        dv, dv_error = add_product_compensated(dv, dv_error, p.to(do.dtype), do)
        if DV_REST > 0:
            dv_rest, dv_rest_error = add_product_compensated(dv_rest, dv_rest_error, p.to(do.dtype), do_rest)
        ds = p * (dp - delta[None, :])
        dk, dk_error = add_product_compensated(dk, dk_error, ds.to(q.dtype), q)
        if DK_REST > 0:
            dk_rest, dk_rest_error = add_product_compensated(dk_rest, dk_rest_error, ds.to(q.dtype), q_rest)
    return dk, dk_rest, dk_error, dk_rest_error, dv, dv_rest, dv_error, dv_rest_error


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS, repr=name_by_branch("dkv"))
def nsa_band_dkv(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, q_bounds_ptr, k_bounds_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_dob, stride_dot, stride_doh, stride_stats,
    T, N, B, G, n_documents, first_query, chunk_steps, scale_log2, scale,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):
    """Compute dk and dv of one key tile from one chunk of its queries: [chunks, B, N, G, D] in the dtype of the pointers.

    Concurrent programs have different key tiles. They are scheduled so that they reach the same query tile at the same
    time, and all but one of them find its q and do in the L2 cache. Without a window, a chunk has the same queries for all
    key tiles. With a window, every key tile has about the same number n of query tiles: each program starts with the query
    tile whose number is a multiple of n, continues to its last one, and then processes the tiles before the first.
    """
    chunk = tl.num_programs(1) - 1 - tl.program_id(1)  # the last queries attend to most keys
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    N_all = N
    if q_bounds_ptr is not None:
        document, tile, first_key, N, first, T = find_document_of_tile(
            k_bounds_ptr, q_bounds_ptr, n_documents, tile, 1, KEYS
        )
        if tile * KEYS >= N:
            return
        k_ptr += first_key * stride_kn
        v_ptr += first_key * stride_vn
        dk_ptr += first_key * (G * DK)
        dv_ptr += first_key * (G * DV)
        q_ptr += first * stride_qt
        do_ptr += first * stride_dot
        stats_ptr += get_first_stat(first, document, ROWS)
    i_first = tile * KEYS
    i_last = tl.minimum(i_first + KEYS, N) - 1
    t_start, t_full, t_full_stop, t_stop = get_query_range(i_first, i_last, T, first_query, L, STRIDE, W)
    t_origin, all_start, all_stop = get_step_range(t_start, t_stop, W, HEADS, ROWS)
    start = tl.maximum(chunk * chunk_steps, all_start)
    stop = tl.minimum((chunk + 1) * chunk_steps, all_stop)
    if start < stop:
        # In the query tiles [inner, outer) every query attends to every key; the other tiles are masked. With a window, the
        # steps start inside [inner, outer], so the masked tiles are consecutive, and [inner, outer) is set to them instead.
        tiles = all_stop // HEADS
        inner = tl.minimum(tl.cdiv(t_full - t_origin, ROWS), tiles)
        outer = tl.maximum(tl.minimum(tl.maximum(t_full_stop - t_origin, 0) // ROWS, tiles), inner)
        tile_shift = 0
        if W > 0:
            tile_shift = tl.minimum(tl.maximum((tiles - t_origin // ROWS % tiles) % tiles, inner), outer)
            inner, outer = outer - tile_shift, tiles - tile_shift + inner
        inner = tl.minimum(tl.maximum(inner * HEADS, start), stop)
        outer = tl.minimum(tl.maximum(outer * HEADS, inner), stop)

        i = i_first + tl.arange(0, KEYS)
        k_base = k_ptr + b * stride_kb + g * stride_kg
        k, k_rest = load_consecutive_parts(k_base, stride_kn, i_first, N, DK, DK_PART, DK_REST, KEYS, True)
        v_base = v_ptr + b * stride_vb + g * stride_vg
        v, v_rest = load_consecutive_parts(v_base, stride_vn, i_first, N, DV, DV_PART, DV_REST, KEYS, True)
        q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
        do_base = do_ptr + b * stride_dob + g * HEADS * stride_doh
        stats_base = stats_ptr + (b * G + g) * HEADS * 2 * stride_stats
        dk, dk_rest = zero_parts(KEYS, DK_PART, DK_REST)
        dv, dv_rest = zero_parts(KEYS, DV_PART, DV_REST)
        dk_error, dk_rest_error, dv_error, dv_rest_error = dk, dk_rest, dv, dv_rest
        # With a window: steps [start, inner), then [inner, outer) with masks, then [outer, stop). Without a window, the
        # steps in the middle need no mask and come last; the first loop processes the diagonal and the last queries.
        for loop in tl.static_range(3 if W > 0 else 2):
            left, right, loop_stop = start, start, stop
            if W > 0:
                if loop == 0:
                    loop_stop = inner
                if loop == 1:
                    loop_stop = outer
            else:
                if loop == 0:
                    left, right = inner, outer
                if loop == 1:
                    start, left, right, loop_stop = inner, inner, inner, outer
            dk, dk_rest, dk_error, dk_rest_error, dv, dv_rest, dv_error, dv_rest_error = _accumulate_dkv(
                dk, dk_rest, dk_error, dk_rest_error, dv, dv_rest, dv_error, dv_rest_error, k, k_rest, v, v_rest, i,
                q_base, do_base, stats_base,
                stride_qt, stride_qh, stride_dot, stride_doh, stride_stats,
                t_origin, tiles, tile_shift, start, left, right, loop_stop, N, T, first_query, scale_log2,
                HEADS, L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, (loop == 1) == (W > 0), TAIL,
            )
            start = loop_stop

        offsets = ((chunk * B + b) * N_all + i) * G + g  # int64: b is
        store_parts(dk_ptr, offsets * DK, dk * scale, dk_rest * scale, i < N, DK, DK_PART, DK_REST)
        store_parts(dv_ptr, offsets * DV, dv, dv_rest, i < N, DV, DV_PART, DV_REST)


@triton.jit
def _sum_slice(
    chunk_ptr, sum_ptr, first_chunk, chunks, chunk_rows, row, inside,
    WIDTH: tl.constexpr, PAD: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Sum rows `row` of a float32 tensor [chunks, chunk_rows, WIDTH] over chunks from first_chunk on, in order."""
    columns = tl.arange(0, PAD)
    offsets = row[:, None] * WIDTH + columns[None, :]
    mask = inside[:, None] & (columns[None, :] < WIDTH)
    ahead = tl.arange(0, AT_ONCE)
    total = tl.zeros([row.shape[0], PAD], tl.float32)
    for first in range(first_chunk, chunks, AT_ONCE):
        chunk = first + ahead
        pointers = chunk_ptr + (chunk.to(tl.int64) * chunk_rows * WIDTH)[:, None, None] + offsets[None, :, :]
        total += tl.sum(tl.load(pointers, mask=mask[None, :, :] & (chunk < chunks)[:, None, None], other=0.0), 0)
    tl.store(sum_ptr + offsets, total.to(sum_ptr.dtype.element_ty), mask=mask)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS, repr=name_by_branch("sum_chunks"))
def nsa_band_sum_chunks(
    chunk_dk_ptr, chunk_dv_ptr, dk_ptr, dv_ptr, q_bounds_ptr, k_bounds_ptr,
    T, N, B, G, n_documents, first_query, chunk_steps,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Sum the chunks of dk and dv for SLICE keys: [chunks, B, N, G, D] float32 -> [B, N, G, D]."""
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    N_all = N
    if q_bounds_ptr is not None:
        _, tile, first, N, _, T = find_document_of_tile(k_bounds_ptr, q_bounds_ptr, n_documents, tile, 1, SLICE)
        if tile * SLICE >= N:
            return
        chunk_dk_ptr += first * (G * DK)
        chunk_dv_ptr += first * (G * DV)
        dk_ptr += first * (G * DK)
        dv_ptr += first * (G * DV)
    i_slice = tile * SLICE
    i_first = i_slice // KEYS * KEYS
    i_last = tl.minimum(i_first + KEYS, N) - 1
    t_start, _, _, t_stop = get_query_range(i_first, i_last, T, first_query, L, STRIDE, W)
    _, start, stop = get_step_range(t_start, t_stop, W, HEADS, ROWS)
    first_chunk = start // chunk_steps
    chunks = tl.cdiv(stop, chunk_steps)
    i = i_slice + tl.arange(0, SLICE)
    row = (b * N + i) * G + g
    _sum_slice(chunk_dk_ptr, dk_ptr, first_chunk, chunks, B * N_all * G, row, i < N, DK, DK_PAD, AT_ONCE)
    _sum_slice(chunk_dv_ptr, dv_ptr, first_chunk, chunks, B * N_all * G, row, i < N, DV, DV_PAD, AT_ONCE)
# fmt: on
