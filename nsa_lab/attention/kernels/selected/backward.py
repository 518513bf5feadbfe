"""Backward kernels of selected attention: one pass over the inverted index, and two sums.

The pass keeps a kv block resident, streams the queries that selected it, recomputes their probabilities from the saved LSE,
sums dk and dv in registers and stores a partial dq for each pair. The partial dk and dv of a block's work items, and the
partial dq of a query's blocks, are then summed in a fixed order: no floating-point atomics, so equal inputs give equal
bits.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import inspect

import triton
import triton.language as tl

from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.selected.forward import (
    count_diagonal_rows,
    get_pair_indices,
    get_row_indices,
    get_row_pairs,
    get_work_item,
)
from nsa_lab.attention.kernels.selected.inverted_index import get_block_keys, get_first_entry, load_selection
from nsa_lab.attention.kernels.tiles import (
    LOG2E,
    add_product_parts,
    dot_transposed,
    load_parts,
    load_parts_masked,
    load_rows_masked,
    row_offsets,
    store_parts,
    zero_parts,
)

_CAN_DISABLE_LICM = tl.constexpr("disable_licm" in inspect.signature(tl.range.__init__).parameters)  # from Triton 3.5 on


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_delta(
    out_ptr, do_ptr, dlse_ptr, delta_ptr,
    n_rows, T, H,
    stride_outb, stride_outt, stride_outh, stride_dob, stride_dot, stride_doh,
    HAS_DLSE: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute delta = sum(out * do) - dlse of every (batch, query, head) row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    head = row % H
    t = row // H % T
    b = row // H // T
    columns = tl.arange(0, DV_PAD)
    offsets = b * stride_outb + t * stride_outt + head * stride_outh
    out = load_rows_masked(out_ptr, offsets, columns, inside, DV, DV_PAD)
    offsets = b * stride_dob + t * stride_dot + head * stride_doh
    do = load_rows_masked(do_ptr, offsets, columns, inside, DV, DV_PAD)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row, mask=inside, other=0.0)
    tl.store(delta_ptr + row, delta, mask=inside)


@triton.jit
def _get_entry_indices(row_start, row_stop, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the entry of each row within a work item. If a tile holds whole entries, these are clamped, not the rows."""
    if ROWS % HEADS == 0:
        entry = row_start // HEADS + tl.arange(0, ROWS) // HEADS
        return tl.maximum(tl.minimum(entry, row_stop // HEADS - 1), 0).to(tl.uint32)
    return get_row_indices(row_start, row_stop, ROWS) // HEADS


@triton.jit
def _get_pairs(
    entry, row_start, row_stop, HEADS: tl.constexpr, N_SEL: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    """Return (pair, head, query) of ROWS rows."""
    if ROWS % HEADS == 0:
        head = (tl.arange(0, ROWS) % HEADS).to(tl.uint32)
        entry_index = entry.to(tl.int64 if WIDE else tl.uint32)
        return entry_index * HEADS + head, head, entry_index // N_SEL
    pair, head = get_pair_indices(entry, row_start, row_stop, HEADS, ROWS, WIDE)
    return pair, head, pair // (N_SEL * HEADS)


@triton.jit
def _store_pair_dq(
    pair_dq_base, pair, ds, k, inside, scale_ds,
    FIRST: tl.constexpr, COLUMNS: tl.constexpr, DK: tl.constexpr, SCALED_V: tl.constexpr,
):
    """Store columns FIRST .. FIRST+COLUMNS-1 of the partial dq of rows that are `inside`."""
    dq = tl.dot(ds, k, input_precision="ieee")
    if not SCALED_V:
        dq *= scale_ds
    columns = FIRST + tl.arange(0, COLUMNS)
    mask = inside[:, None]
    if FIRST + COLUMNS > DK:
        mask = mask & (columns < DK)[None, :]
    pointers = pair_dq_base + (pair * DK)[:, None] + columns[None, :]
    # Evicted first from the L2 cache, as in the forward pass.
    tl.store(pointers, dq.to(pair_dq_base.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _backward_tile(
    q_base, do_base, lse_base, delta_base, entries_base, entry, pair_dq_base,
    k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, key, inside_block,
    start, row_stop, first_query, stride_qt, stride_qh, stride_dot, stride_doh, stride_lset, scale_ds, scale_log2,
    DIAGONAL: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr, ROWS: tl.constexpr,
    ALL_KEYS: tl.constexpr, WIDE: tl.constexpr, SCALED_V: tl.constexpr,
):
    """Add ROWS rows to dk and dv, store their partial dq, and load the entries of the next tile."""
    # The loads are in the order of the forward pass, for the same reason.
    pair, head, t = _get_pairs(entry, start, row_stop, HEADS, N_SEL, ROWS, WIDE)
    inside = start + tl.arange(0, ROWS) < row_stop
    q, q_rest = load_parts(q_base, row_offsets(t, head, stride_qt, stride_qh, WIDE), DK, DK_PART, DK_REST)
    do, do_rest = load_parts(do_base, row_offsets(t, head, stride_dot, stride_doh, WIDE), DV, DV_PART, DV_REST)
    lse_offsets = row_offsets(t, head, stride_lset, 1, WIDE)
    lse_log2 = tl.load(lse_base + lse_offsets) * LOG2E
    delta = tl.load(delta_base + lse_offsets)
    entry = tl.load(entries_base + _get_entry_indices(start + ROWS, row_stop, HEADS, ROWS))
    # See the forward pass: these stores never run and produce no machine code, but are a second reader of the tiles.
    if DK_REST > 0 and start >= row_stop:
        store_parts(pair_dq_base, tl.arange(0, ROWS) * DK, q, q_rest, inside, DK, DK_PART, DK_REST)
    if DV_REST > 0 and start >= row_stop:
        store_parts(pair_dq_base, tl.arange(0, ROWS) * DV, do, do_rest, inside, DV, DV_PART, DV_REST)
    scores = dot_transposed(q, q_rest, k, k_rest, DK_REST)
    dp = dot_transposed(do, do_rest, v, v_rest, DV_REST)
    # An infinite LSE makes p = 0 in rows past the end.
    p = tl.exp2(scores * scale_log2 - tl.where(inside, lse_log2, float("inf"))[:, None])
    if DIAGONAL:
        p = tl.where(key[None, :] <= (first_query + t.to(tl.int32))[:, None], p, 0.0)
    if not ALL_KEYS:
        p = tl.where(inside_block[None, :], p, 0.0)
    dv, dv_rest = add_product_parts(dv, dv_rest, tl.trans(p.to(do.dtype)), do, do_rest, DV_REST)
    if SCALED_V:
        delta *= scale_ds
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    # Loaded again (from cache) instead of being held in registers.
    if DK_REST > 0 and ROWS % HEADS == 0:
        entry_again = tl.load(entries_base + _get_entry_indices(start, row_stop, HEADS, ROWS))
        pair, _, _ = _get_pairs(entry_again, start, row_stop, HEADS, N_SEL, ROWS, WIDE)
    dk, dk_rest = add_product_parts(dk, dk_rest, tl.trans(ds), q, q_rest, DK_REST)
    _store_pair_dq(pair_dq_base, pair, ds, k, inside, scale_ds, 0, DK_PART, DK, SCALED_V)
    if DK_REST > 0:
        _store_pair_dq(pair_dq_base, pair, ds, k_rest, inside, scale_ds, DK_PART, DK_REST, DK, SCALED_V)
    return dk, dk_rest, dv, dv_rest, entry


@triton.jit
def _backward_rows(
    q_base, do_base, lse_base, delta_base, entries_base, pair_dq_base,
    k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, key, inside_block,
    row_start, row_stop, first_query, stride_qt, stride_qh, stride_dot, stride_doh, stride_lset, scale_ds, scale_log2,
    DIAGONAL: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr, ROWS: tl.constexpr,
    ALL_KEYS: tl.constexpr, WIDE: tl.constexpr, SCALED_V: tl.constexpr,
):
    """Process the rows [row_start, row_stop) of a work item."""
    entry = tl.load(entries_base + _get_entry_indices(row_start, row_stop, HEADS, ROWS))
    # With tiles in two parts, LLVM would hoist tile offsets and addresses out of the loop, and their registers would spill:
    # 19 loads from local memory per tile, before the products. Recomputing them is cheaper. The two loops differ only in
    # `disable_licm`, which Triton has from 3.5 on; the argument must be a literal.
    if _CAN_DISABLE_LICM and DK_REST > 0:
        for start in tl.range(row_start, row_stop, ROWS, disable_licm=True):
            dk, dk_rest, dv, dv_rest, entry = _backward_tile(
                q_base, do_base, lse_base, delta_base, entries_base, entry, pair_dq_base,
                k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, key, inside_block,
                start, row_stop, first_query, stride_qt, stride_qh, stride_dot, stride_doh, stride_lset,
                scale_ds, scale_log2,
                DIAGONAL, HEADS, N_SEL, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, ALL_KEYS, WIDE, SCALED_V,
            )
    else:
        for start in range(row_start, row_stop, ROWS):
            dk, dk_rest, dv, dv_rest, entry = _backward_tile(
                q_base, do_base, lse_base, delta_base, entries_base, entry, pair_dq_base,
                k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, key, inside_block,
                start, row_stop, first_query, stride_qt, stride_qh, stride_dot, stride_doh, stride_lset,
                scale_ds, scale_log2,
                DIAGONAL, HEADS, N_SEL, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, ALL_KEYS, WIDE, SCALED_V,
            )
    return dk, dk_rest, dv, dv_rest


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_backward(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, entries_ptr, starts_ptr, work_ptr, order_ptr,
    pair_dq_ptr, item_dkv_ptr, dk_ptr, dv_ptr, bounds_ptr,
    T, N, G, G_all, n_blocks, first_query, n_documents,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_dob, stride_dot, stride_doh, stride_lseb, stride_lset,
    scale_ds, scale_dk, scale_log2,
    ONE_PIECE: tl.constexpr, WIDE: tl.constexpr, SCALED_V: tl.constexpr, ITEM_ENTRIES: tl.constexpr,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute dk and dv of one work item, and the partial dq of its pairs. dk_ptr and dv_ptr have rows for G_all groups.

    If a block has a single item and the queries are in ONE_PIECE, its result is final and stored to dk_ptr and dv_ptr; all
    others are stored to item_dkv_ptr.

    The softmax scale is split into factors: the partial dq contain scale_ds, and dk is multiplied by scale_dk. With
    SCALED_V, scale_ds is a power of two and scale_ds * scale_dk is the softmax scale: v is multiplied by scale_ds without
    rounding, so ds contains this factor for both dq and dk. Without SCALED_V, scale_ds and scale_dk are both the softmax
    scale, and dq is multiplied by scale_ds.

    Tiles are split into two parts at narrower widths than in other kernels: with a full 128-wide dq in addition to dk and
    dv a thread runs out of registers, and ptxas then makes every tensor-core instruction wait for the previous one.
    """
    item, index_row = get_work_item(work_ptr, order_ptr)
    if index_row < 0:
        return
    start = tl.load(starts_ptr + index_row)
    stop = tl.load(starts_ptr + index_row + 1)
    first_entry, before = get_first_entry(item, start, index_row, ITEM_ENTRIES)
    rows = (tl.minimum(stop - first_entry, ITEM_ENTRIES) * HEADS).to(tl.int32)
    b = (index_row // n_blocks // G).to(tl.int64)
    g = index_row // n_blocks % G
    local = tl.arange(0, BLOCK_PAD)
    first_key, stop_key = get_block_keys(index_row % n_blocks, N, bounds_ptr, n_documents, BLOCK)
    key = first_key + local
    inside_block = local < BLOCK
    inside = inside_block & (key < stop_key)
    n = key.to(tl.int64)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    k, k_rest = load_parts_masked(k_base, n * stride_kn, inside, DK, DK_PART, DK_REST)
    v, v_rest = load_parts_masked(v_base, n * stride_vn, inside, DV, DV_PART, DV_REST)
    dk, dk_rest = zero_parts(BLOCK_PAD, DK_PART, DK_REST)
    dv, dv_rest = zero_parts(BLOCK_PAD, DV_PART, DV_REST)
    q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
    do_base = do_ptr + b * stride_dob + g * HEADS * stride_doh
    lse_base = lse_ptr + b * stride_lseb + g * HEADS
    delta_base = delta_ptr + b * stride_lseb + g * HEADS
    pair_base = (index_row // n_blocks).to(tl.int64) * T * (N_SEL * HEADS * DK)
    if SCALED_V:
        v = (v * scale_ds).to(v.dtype)
        v_rest = (v_rest * scale_ds).to(v_rest.dtype)
    diagonal = 0
    if before < BLOCK:
        diagonal = count_diagonal_rows(before, rows, BLOCK, HEADS, ROWS)
        dk, dk_rest, dv, dv_rest = _backward_rows(
            q_base, do_base, lse_base, delta_base, entries_ptr + first_entry, pair_dq_ptr + pair_base,
            k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, key, inside_block,
            0, diagonal, first_query, stride_qt, stride_qh, stride_dot, stride_doh, stride_lset, scale_ds, scale_log2,
            True, HEADS, N_SEL, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, BLOCK == BLOCK_PAD, WIDE, SCALED_V,
        )
    dk, dk_rest, dv, dv_rest = _backward_rows(
        q_base, do_base, lse_base, delta_base, entries_ptr + first_entry, pair_dq_ptr + pair_base,
        k, k_rest, v, v_rest, dk, dk_rest, dv, dv_rest, key, inside_block,
        diagonal, rows, first_query, stride_qt, stride_qh, stride_dot, stride_doh, stride_lset, scale_ds, scale_log2,
        False, HEADS, N_SEL, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, BLOCK == BLOCK_PAD, WIDE, SCALED_V,
    )
    dk *= scale_dk
    dk_rest *= scale_dk
    if ONE_PIECE and stop - start <= ITEM_ENTRIES:
        row = (b * N + n) * G_all + g
        store_parts(dk_ptr, row * DK, dk, dk_rest, inside, DK, DK_PART, DK_REST)
        store_parts(dv_ptr, row * DV, dv, dv_rest, inside, DV, DV_PART, DV_REST)
    else:
        base = item_dkv_ptr + item.to(tl.int64) * BLOCK * (DK + DV)
        store_parts(base, local * DK, dk, dk_rest, inside_block, DK, DK_PART, DK_REST)
        store_parts(base + BLOCK * DK, local * DV, dv, dv_rest, inside_block, DV, DV_PART, DV_REST)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_sum(
    pair_dq_ptr, blocks_ptr, dq_ptr, item_dkv_ptr, starts_ptr, sums_ptr, dk_ptr, dv_ptr, bounds_ptr,
    T, N, G, G_all, n_blocks, first_query, n_documents,
    stride_dqb, stride_dqt,
    scale_dq, tiles, reductions, parts,
    FIRST: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr, ITEM_ENTRIES: tl.constexpr, ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr, ITEMS_AT_ONCE: tl.constexpr, SLOTS_AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
):
    """Compute both sums in one launch: the few long sums over work items start first and overlap the many short ones."""
    program = tl.program_id(0)
    if program < reductions:
        _sum_items(
            item_dkv_ptr, starts_ptr, sums_ptr, dk_ptr, dv_ptr, bounds_ptr,
            N, G, G_all, n_blocks, n_documents, program // parts, program % parts,
            FIRST, LAST, ITEM_ENTRIES, BLOCK, DK, DV, ELEMENTS, ITEMS_AT_ONCE,
        )
    else:
        _sum_pairs(
            pair_dq_ptr, blocks_ptr, dq_ptr, T, G, first_query, stride_dqb, stride_dqt, scale_dq,
            (program - reductions) // tiles, (program - reductions) % tiles,
            ADD, HEADS, N_SEL, BLOCK if bounds_ptr is None else 0, DK, DK_PAD, ROWS, SLOTS_AT_ONCE,
        )


@triton.jit
def _sum_items(
    item_dkv_ptr, starts_ptr, sums_ptr, dk_ptr, dv_ptr, bounds_ptr, N, G, G_all, n_blocks, n_documents, index_row, part,
    FIRST: tl.constexpr, LAST: tl.constexpr, ITEM_ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, ELEMENTS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Sum ELEMENTS elements of dk and dv of one kv block over its work items, in order.

    If the queries are processed in several pieces, `sums_ptr` holds the float32 sums from the FIRST piece to the LAST.
    """
    ITEM: tl.constexpr = BLOCK * (DK + DV)
    start = tl.load(starts_ptr + index_row)
    stop = tl.load(starts_ptr + index_row + 1)
    if (not FIRST or not LAST) or stop - start > ITEM_ENTRIES:  # parentheses: Triton 3.2 rejects a chain of three
        items = tl.maximum(tl.cdiv(stop - start, ITEM_ENTRIES), 1).to(tl.int32)
        first_item = start // ITEM_ENTRIES + index_row
        element = part * ELEMENTS + tl.arange(0, ELEMENTS)
        ahead = tl.arange(0, AT_ONCE)
        total = tl.zeros([ELEMENTS], tl.float32)
        for i in range(0, items, AT_ONCE):
            mask = (i + ahead < items)[:, None] & (element < ITEM)[None, :]
            pointers = item_dkv_ptr + (first_item + i + ahead)[:, None] * ITEM + element[None, :]
            total += tl.sum(tl.load(pointers, mask=mask, other=0.0), 0)
        sum_offsets = index_row.to(tl.int64) * ITEM + element
        if not FIRST:
            total += tl.load(sums_ptr + sum_offsets, mask=element < ITEM, other=0.0)
        if LAST:
            first_row = (index_row // n_blocks // G).to(tl.int64) * N * G_all + index_row // n_blocks % G
            first_key, stop_key = get_block_keys(index_row % n_blocks, N, bounds_ptr, n_documents, BLOCK)
            is_k = element < BLOCK * DK
            key = first_key + element // DK
            offsets = (first_row + key.to(tl.int64) * G_all) * DK + element % DK
            tl.store(dk_ptr + offsets, total.to(dk_ptr.dtype.element_ty), mask=is_k & (key < stop_key))
            element_v = element - BLOCK * DK
            key = first_key + element_v // DV
            offsets = (first_row + key.to(tl.int64) * G_all) * DV + element_v % DV
            is_v = (element_v >= 0) & (element < ITEM)
            tl.store(dv_ptr + offsets, total.to(dv_ptr.dtype.element_ty), mask=is_v & (key < stop_key))
        else:
            tl.store(sums_ptr + sum_offsets, total, mask=element < ITEM)


@triton.jit
def _sum_pairs(
    pair_dq_ptr, blocks_ptr, dq_ptr, T, G, first_query, stride_dqb, stride_dqt, scale_dq, bg, tile,
    ADD: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr, BLOCK: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Compute dq of ROWS rows, scale_dq times the sum over the selected blocks. ADD: add to dq_ptr."""
    b, g, t, head, inside, slots, pair = get_row_pairs(blocks_ptr, T, G, bg.to(tl.int64), tile, HEADS, N_SEL, ROWS)
    columns = tl.arange(0, DK_PAD)
    total = tl.zeros([ROWS, DK_PAD], tl.float32)
    for first in range(0, N_SEL, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            slot = first + ahead
            _, live = load_selection(slots + slot, inside & (slot < N_SEL), first_query, t, BLOCK)
            total += load_rows_masked(pair_dq_ptr, (pair + slot * HEADS) * DK, columns, live, DK, DK_PAD)
    offsets = b * stride_dqb + t.to(tl.int64) * stride_dqt + (g * HEADS + head) * DK
    mask = inside[:, None] & (columns < DK)[None, :]
    pointers = dq_ptr + offsets[:, None] + columns[None, :]
    total *= scale_dq
    if ADD:
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(dq_ptr.dtype.element_ty), mask=mask)
# fmt: on
