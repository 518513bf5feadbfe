"""Selected attention, backward: one pass over the inverted index, and two sums.

The pass keeps a kv block resident, streams the queries that chose it, recomputes their probabilities from the saved LSE
and gives dK and dV in registers and a partial dQ a (query, block) pair. What a block's work items leave for dK and dV, and
what a query's blocks leave for dQ, is then summed in a fixed order: no floating-point atomics, so the same input always
gives the same bits.
"""

import inspect

import triton
import triton.language as tl

from nsa_lab.attention.kernels.selected_forward import (
    PIECE_SIZES,
    _load_rows,
    _load_tile,
    _pair_numbers,
    _row_numbers,
    _row_offsets,
)

_CAN_DISABLE_LICM = tl.constexpr("disable_licm" in inspect.signature(tl.range.__init__).parameters)  # from Triton 3.5 on


@triton.jit
def _delta_kernel(
    out, grad_out, grad_lse, delta, rows, T, H, out_stride_b, out_stride_t, out_stride_h,
    grad_stride_b, grad_stride_t, grad_stride_h, HAS_GRAD_LSE: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * grad_out) - grad_lse a (batch, query, head): the term of dS that every key of a row shares."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head = row % H
    t = row // H % T
    batch = row // H // T
    columns = tl.arange(0, DV_PAD)
    o = _load_tile(out, batch * out_stride_b + t * out_stride_t + head * out_stride_h, columns, inside, DV, DV_PAD)
    at = batch * grad_stride_b + t * grad_stride_t + head * grad_stride_h
    g = _load_tile(grad_out, at, columns, inside, DV, DV_PAD)
    value = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        value -= tl.load(grad_lse + row, mask=inside, other=0.0)
    tl.store(delta + row, value, mask=inside)


@triton.jit
def _load_halves(base, offsets, WIDTH: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr):
    """Columns [0, PART) and [PART, PADDED) of rows that all exist; where PART is all of them, the same columns twice."""
    columns = tl.arange(0, PART)
    first = _load_rows(base, offsets, columns, WIDTH, PADDED)
    second = first
    if PART < PADDED:
        second = _load_rows(base, offsets, PART + columns, WIDTH, PADDED)
    return first, second


@triton.jit
def _load_key_halves(base, offsets, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr):
    """As `_load_halves`, zero outside."""
    columns = tl.arange(0, PART)
    first = _load_tile(base, offsets, columns, inside, WIDTH, PADDED)
    second = first
    if PART < PADDED:
        second = _load_tile(base, offsets, PART + columns, inside, WIDTH, PADDED)
    return first, second


@triton.jit
def _store_halves(
    base, row, first, second, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Rows `row` of a [rows, WIDTH] matrix."""
    columns = tl.arange(0, PART)
    pointers = base + (row * WIDTH)[:, None] + columns[None, :]
    tl.store(pointers, first.to(base.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])
    if PART < PADDED:
        mask = inside[:, None] & (PART + columns < WIDTH)[None, :]
        tl.store(pointers + PART, second.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _product_over_columns(a, a_rest, b, b_rest, TWO: tl.constexpr, PRECISION: tl.constexpr):
    product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if TWO:
        product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision=PRECISION)
    return product


@triton.jit
def _add_product(total, rest, a, b, b_rest, TWO: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b and, where there are two halves, rest + a b_rest."""
    total = tl.dot(a, b, total, input_precision=PRECISION)
    if TWO:
        rest = tl.dot(a, b_rest, rest, input_precision=PRECISION)
    return total, rest


@triton.jit
def _entry_numbers(first_row, last_row, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Which entry of the work item each row is of. Where a tile holds whole entries, they are clamped and not the rows."""
    if ROWS % HEADS == 0:
        entry = first_row // HEADS + tl.arange(0, ROWS) // HEADS
        return tl.maximum(tl.minimum(entry, last_row // HEADS - 1), 0).to(tl.uint32)
    return _row_numbers(first_row, last_row, ROWS) // HEADS


@triton.jit
def _pairs_of(
    entry, first_row, last_row, HEADS: tl.constexpr, N_SEL: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """(pair number, head, query) of ROWS rows."""
    if ROWS % HEADS == 0:
        head = (tl.arange(0, ROWS) % HEADS).to(tl.uint32)
        number = entry.to(tl.int64 if WIDE else tl.uint32)
        return number * HEADS + head, head, number // N_SEL
    pair, head = _pair_numbers(entry, first_row, last_row, HEADS, ROWS, WIDE)
    return pair, head, pair // (N_SEL * HEADS)


@triton.jit
def _backward_tile(
    q, grad_out, lse, delta, entries, entry, part_dq, k_tile, k_rest, v_tile, v_rest, dk, dk_rest, dv, dv_rest, key,
    keys_inside, start, last_row, first_query, q_stride_t, q_stride_h, grad_stride_t, grad_stride_h, lse_stride_t, scale,
    scale_log2, DIAGONAL: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, K_PART: tl.constexpr, V_PART: tl.constexpr, ROWS: tl.constexpr,
    ALL_KEYS: tl.constexpr, WIDE: tl.constexpr, SCALED_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds ROWS rows to dk and dv, stores their partial dq, and loads the entries of the next."""
    TWO_K: tl.constexpr = K_PART < DK_PAD
    TWO_V: tl.constexpr = V_PART < DV_PAD
    # The order of loads is that of the forward pass, for the same reason.
    pair, head, t = _pairs_of(entry, start, last_row, HEADS, N_SEL, ROWS, WIDE)
    live = start + tl.arange(0, ROWS) < last_row
    q_tile, q_rest = _load_halves(q, _row_offsets(t, head, q_stride_t, q_stride_h, WIDE), DK, DK_PAD, K_PART)
    g_offsets = _row_offsets(t, head, grad_stride_t, grad_stride_h, WIDE)
    g_tile, g_rest = _load_halves(grad_out, g_offsets, DV, DV_PAD, V_PART)
    lse_offsets = _row_offsets(t, head, lse_stride_t, 1, WIDE)
    row_lse = tl.load(lse + lse_offsets) * 1.4426950408889634
    row_delta = tl.load(delta + lse_offsets)
    entry = tl.load(entries + _entry_numbers(start + ROWS, last_row, HEADS, ROWS))
    # Never so, and no machine code; as in the forward pass, a second reader of the tiles.
    if TWO_K and start >= last_row:
        _store_halves(part_dq, tl.arange(0, ROWS), q_tile, q_rest, live, DK, DK_PAD, K_PART)
    if TWO_V and start >= last_row:
        _store_halves(part_dq, tl.arange(0, ROWS), g_tile, g_rest, live, DV, DV_PAD, V_PART)
    scores = _product_over_columns(q_tile, q_rest, k_tile, k_rest, TWO_K, PRECISION)
    dp = _product_over_columns(g_tile, g_rest, v_tile, v_rest, TWO_V, PRECISION)
    # An infinite LSE makes p = 0 in the rows past the end.
    p = tl.exp2(scores * scale_log2 - tl.where(live, row_lse, float("inf"))[:, None])
    if DIAGONAL:
        p = tl.where(key[None, :] <= (first_query + t.to(tl.int32))[:, None], p, 0.0)
    if not ALL_KEYS:
        p = tl.where(keys_inside[None, :], p, 0.0)
    dv, dv_rest = _add_product(dv, dv_rest, tl.trans(p.to(g_tile.dtype)), g_tile, g_rest, TWO_V, PRECISION)
    if SCALED_V:
        row_delta *= scale
    ds = (p * (dp - row_delta[:, None])).to(q_tile.dtype)
    if TWO_K and ROWS % HEADS == 0:  # read again, from a cache, rather than held in registers since the tile was copied
        again = tl.load(entries + _entry_numbers(start, last_row, HEADS, ROWS))
        pair, _, _ = _pairs_of(again, start, last_row, HEADS, N_SEL, ROWS, WIDE)
    dk, dk_rest = _add_product(dk, dk_rest, tl.trans(ds), q_tile, q_rest, TWO_K, PRECISION)
    columns = tl.arange(0, K_PART)
    for part in tl.static_range(2 if TWO_K else 1):
        dq = tl.dot(ds, k_tile if part == 0 else k_rest, input_precision=PRECISION)
        if not SCALED_V:
            dq *= scale
        inside = live[:, None]
        if DK != DK_PAD:
            inside = inside & (part * K_PART + columns < DK)[None, :]
        pointers = part_dq + (pair * DK)[:, None] + (part * K_PART + columns)[None, :]
        # As in the forward pass, the first to leave the L2 cache.
        tl.store(pointers, dq.to(part_dq.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    return dk, dk_rest, dv, dv_rest, entry


@triton.jit
def _backward_rows(
    q, grad_out, lse, delta, entries, part_dq, k_tile, k_rest, v_tile, v_rest, dk, dk_rest, dv, dv_rest, key, keys_inside,
    first_row, last_row, first_query, q_stride_t, q_stride_h, grad_stride_t, grad_stride_h, lse_stride_t, scale, scale_log2,
    DIAGONAL: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, K_PART: tl.constexpr, V_PART: tl.constexpr, ROWS: tl.constexpr,
    ALL_KEYS: tl.constexpr, WIDE: tl.constexpr, SCALED_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows [first_row, last_row) of a work item."""
    entry = tl.load(entries + _entry_numbers(first_row, last_row, HEADS, ROWS))
    # In halves, what LLVM would move out of the loop (offsets, addresses of tiles) costs more in spilled registers than
    # working it out again: 19 loads from local memory a tile, in front of the products.
    if _CAN_DISABLE_LICM and K_PART < DK_PAD:
        for start in tl.range(first_row, last_row, ROWS, disable_licm=True):
            dk, dk_rest, dv, dv_rest, entry = _backward_tile(
                q, grad_out, lse, delta, entries, entry, part_dq, k_tile, k_rest, v_tile, v_rest, dk, dk_rest, dv, dv_rest,
                key, keys_inside, start, last_row, first_query, q_stride_t, q_stride_h, grad_stride_t, grad_stride_h,
                lse_stride_t, scale, scale_log2, DIAGONAL, HEADS, N_SEL, DK, DV, DK_PAD, DV_PAD, K_PART, V_PART, ROWS,
                ALL_KEYS, WIDE, SCALED_V, PRECISION,
            )  # fmt: skip
    else:
        for start in range(first_row, last_row, ROWS):
            dk, dk_rest, dv, dv_rest, entry = _backward_tile(
                q, grad_out, lse, delta, entries, entry, part_dq, k_tile, k_rest, v_tile, v_rest, dk, dk_rest, dv, dv_rest,
                key, keys_inside, start, last_row, first_query, q_stride_t, q_stride_h, grad_stride_t, grad_stride_h,
                lse_stride_t, scale, scale_log2, DIAGONAL, HEADS, N_SEL, DK, DV, DK_PAD, DV_PAD, K_PART, V_PART, ROWS,
                ALL_KEYS, WIDE, SCALED_V, PRECISION,
            )  # fmt: skip
    return dk, dk_rest, dv, dv_rest


@triton.jit(do_not_specialize=PIECE_SIZES)
def _backward_kernel(
    q, k, v, grad_out, lse, delta, entries, starts, work, order, part_dq, part_dkv, grad_k, grad_v, T, keys, G, all_groups,
    n_blocks, first_query, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_g, v_stride_b, v_stride_t,
    v_stride_g, grad_stride_b, grad_stride_t, grad_stride_h, lse_stride_b, lse_stride_t, scale, rest, scale_log2,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, SCALED_V: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
    N_SEL: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one work item, and the partial dQ of its pairs. grad_k and grad_v have rows for `all_groups`.

    A block with one item, when its queries come in one piece (WHOLE), is final and goes straight to grad_k and grad_v.
    With SCALED_V the softmax scale is scale * rest, and scale a power of two: V carries that without rounding, so that dS
    comes out scaled by it. The rest is for the sums: here dK's, in the finish kernel dQ's. Without it both are the whole.
    Tiles wider than PART columns are worked on in two halves: with all of a 128-wide dQ beside dK and dV a thread is out of
    registers, and ptxas then makes every tensor-core instruction wait for the one before.
    """
    K_PART: tl.constexpr = DK_PAD if DK_PAD < PART else PART
    V_PART: tl.constexpr = DV_PAD if DV_PAD < PART else PART
    item = tl.program_id(0)
    if order is not None:
        item = tl.load(order + item)
    index_row = tl.load(work + item)
    if index_row < 0:
        return
    start = tl.load(starts + index_row)
    stop = tl.load(starts + index_row + 1)
    chunk = item - (start // CHUNK + index_row)
    first_entry = start + chunk * CHUNK
    rows = (tl.minimum(stop - first_entry, CHUNK) * HEADS).to(tl.int32)
    batch = (index_row // n_blocks // G).to(tl.int64)
    group = index_row // n_blocks % G
    local = tl.arange(0, SIZE_PAD)
    key = index_row % n_blocks * SIZE + local
    keys_inside = local < SIZE
    loaded = keys_inside & (key < keys)
    key_wide = key.to(tl.int64)
    k_base = k + batch * k_stride_b + group * k_stride_g
    v_base = v + batch * v_stride_b + group * v_stride_g
    k_tile, k_rest = _load_key_halves(k_base, key_wide * k_stride_t, loaded, DK, DK_PAD, K_PART)
    v_tile, v_rest = _load_key_halves(v_base, key_wide * v_stride_t, loaded, DV, DV_PAD, V_PART)
    dk = tl.zeros([SIZE_PAD, K_PART], tl.float32)
    dv = tl.zeros([SIZE_PAD, V_PART], tl.float32)
    dk_rest = dk
    dv_rest = dv
    q_base = q + batch * q_stride_b + group * HEADS * q_stride_h
    grad_base = grad_out + batch * grad_stride_b + group * HEADS * grad_stride_h
    lse_base = lse + batch * lse_stride_b + group * HEADS
    delta_base = delta + batch * lse_stride_b + group * HEADS
    pair_base = (index_row // n_blocks).to(tl.int64) * T * (N_SEL * HEADS * DK)
    if SCALED_V:
        v_tile = (v_tile * scale).to(v_tile.dtype)
        v_rest = (v_rest * scale).to(v_rest.dtype)
    # As in the forward pass: only the first SIZE entries of a block can lie inside it.
    diagonal = 0
    if chunk * CHUNK < SIZE:
        diagonal = tl.minimum(tl.cdiv((SIZE - chunk * CHUNK).to(tl.int32) * HEADS, ROWS) * ROWS, rows)
        dk, dk_rest, dv, dv_rest = _backward_rows(
            q_base, grad_base, lse_base, delta_base, entries + first_entry, part_dq + pair_base,
            k_tile, k_rest, v_tile, v_rest, dk, dk_rest, dv, dv_rest, key, keys_inside, 0, diagonal, first_query,
            q_stride_t, q_stride_h, grad_stride_t, grad_stride_h, lse_stride_t, scale, scale_log2,
            True, HEADS, N_SEL, DK, DV, DK_PAD, DV_PAD, K_PART, V_PART, ROWS, SIZE == SIZE_PAD, WIDE, SCALED_V, PRECISION,
        )  # fmt: skip
    dk, dk_rest, dv, dv_rest = _backward_rows(
        q_base, grad_base, lse_base, delta_base, entries + first_entry, part_dq + pair_base,
        k_tile, k_rest, v_tile, v_rest, dk, dk_rest, dv, dv_rest, key, keys_inside, diagonal, rows, first_query,
        q_stride_t, q_stride_h, grad_stride_t, grad_stride_h, lse_stride_t, scale, scale_log2,
        False, HEADS, N_SEL, DK, DV, DK_PAD, DV_PAD, K_PART, V_PART, ROWS, SIZE == SIZE_PAD, WIDE, SCALED_V, PRECISION,
    )  # fmt: skip
    dk *= rest
    dk_rest *= rest
    if WHOLE and stop - start <= CHUNK:
        inside = keys_inside & (key < keys)
        row = (batch * keys + key_wide) * all_groups + group
        _store_halves(grad_k, row, dk, dk_rest, inside, DK, DK_PAD, K_PART)
        _store_halves(grad_v, row, dv, dv_rest, inside, DV, DV_PAD, V_PART)
    else:
        base = part_dkv + item.to(tl.int64) * SIZE * (DK + DV)
        _store_halves(base, local, dk, dk_rest, keys_inside, DK, DK_PAD, K_PART)
        _store_halves(base + SIZE * DK, local, dv, dv_rest, keys_inside, DV, DV_PAD, V_PART)


@triton.jit(do_not_specialize=PIECE_SIZES)
def _finish_kernel(
    part_dq, blocks, grad_q, part_dkv, starts, sums, grad_k, grad_v, T, keys, G, all_groups, n_blocks, first_query,
    grad_stride_b, grad_stride_t, rest, tiles, reductions, parts,
    FIRST: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
    N_SEL: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The two sums in one launch: the few long ones over work items start first and hide behind the many short ones."""
    program = tl.program_id(0)
    if program < reductions:
        _reduce_items(part_dkv, starts, sums, grad_k, grad_v, keys, G, all_groups, n_blocks, program // parts,
                      program % parts, FIRST, LAST, CHUNK, SIZE, DK, DV, TILE, DEPTH)  # fmt: skip
    else:
        _sum_pairs(part_dq, blocks, grad_q, T, G, first_query, grad_stride_b, grad_stride_t, rest,
                   (program - reductions) // tiles, (program - reductions) % tiles,
                   ADD, HEADS, N_SEL, SIZE, DK, DK_PAD, ROWS)  # fmt: skip


@triton.jit
def _reduce_items(
    part, starts, sums, grad_k, grad_v, keys, G, all_groups, n_blocks, index_row, part_number,
    FIRST: tl.constexpr, LAST: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """dK and dV of TILE elements of one kv block, from its work items in their order.

    When the queries come in several pieces, `sums` carries the float32 sums from the FIRST piece to the LAST.
    """
    ITEM: tl.constexpr = SIZE * (DK + DV)
    start = tl.load(starts + index_row)
    stop = tl.load(starts + index_row + 1)
    if (not FIRST or not LAST) or stop - start > CHUNK:  # Triton 3.2 takes no chain of three
        items = tl.maximum(tl.cdiv(stop - start, CHUNK), 1).to(tl.int32)
        first_item = start // CHUNK + index_row
        element = part_number * TILE + tl.arange(0, TILE)
        depth = tl.arange(0, DEPTH)
        total = tl.zeros([TILE], tl.float32)
        for i in range(0, items, DEPTH):
            inside = (i + depth < items)[:, None] & (element < ITEM)[None, :]
            values = tl.load(part + (first_item + i + depth)[:, None] * ITEM + element[None, :], mask=inside, other=0.0)
            total += tl.sum(values, 0)
        at_sum = index_row.to(tl.int64) * ITEM + element
        if not FIRST:
            total += tl.load(sums + at_sum, mask=element < ITEM, other=0.0)
        if LAST:
            head = (index_row // n_blocks // G).to(tl.int64) * keys * all_groups + index_row // n_blocks % G
            first_key = index_row % n_blocks * SIZE
            of_k = element < SIZE * DK
            key = first_key + element // DK
            at = (head + key.to(tl.int64) * all_groups) * DK + element % DK
            tl.store(grad_k + at, total.to(grad_k.dtype.element_ty), mask=of_k & (key < keys))
            element_v = element - SIZE * DK
            key = first_key + element_v // DV
            at = (head + key.to(tl.int64) * all_groups) * DV + element_v % DV
            of_v = (element_v >= 0) & (element < ITEM)
            tl.store(grad_v + at, total.to(grad_v.dtype.element_ty), mask=of_v & (key < keys))
        else:
            tl.store(sums + at_sum, total, mask=element < ITEM)


@triton.jit
def _sum_pairs(
    part_dq, blocks, grad_q, T, G, first_query, grad_stride_b, grad_stride_t, rest, index_row, tile,
    ADD: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr,
    DK_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dQ of ROWS (query, head) rows: the sum over the blocks that their queries chose, and with ADD what grad_q holds."""
    row = tile * ROWS + tl.arange(0, ROWS)
    t = row // HEADS
    head = row % HEADS
    index_row = index_row.to(tl.int64)
    batch = index_row // G
    group = index_row % G
    inside = t < T
    choice = blocks + ((batch * T + t) * G + group) * N_SEL
    pair = (index_row * T + t) * N_SEL * HEADS + head
    columns = tl.arange(0, DK_PAD)
    total = tl.zeros([ROWS, DK_PAD], tl.float32)
    for slot in tl.static_range(N_SEL):
        block = tl.load(choice + slot, mask=inside, other=-1)
        live = (block >= 0) & (block.to(tl.int64) * SIZE <= first_query + t)
        total += _load_tile(part_dq, (pair + slot * HEADS) * DK, columns, live, DK, DK_PAD)
    at = batch * grad_stride_b + t.to(tl.int64) * grad_stride_t + (group * HEADS + head) * DK
    mask = inside[:, None] & (columns < DK)[None, :]
    pointers = grad_q + at[:, None] + columns[None, :]
    total *= rest
    if ADD:
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(grad_q.dtype.element_ty), mask=mask)
