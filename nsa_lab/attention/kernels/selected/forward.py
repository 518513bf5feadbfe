"""Forward kernels of selected attention, in two orders of the same sum. launch.py decides which one is launched.

*Gather* keeps a kv block resident and streams the queries that selected it (the inverted index) with all heads of their
group, so tensor-core tiles are full for any number of heads and any selection. Each pair stores a normalized partial output
and its LSE, and a second kernel merges the partial outputs of a row. It computes only the selected pairs; the cost is the
memory traffic of the partial outputs.

*Union* keeps a tile of consecutive queries resident and loops over the blocks that any of them selected. Rows whose query
did not select a block are masked. It needs no workspace: a selection is a bit set, and so is the union. But every row
computes all blocks of the union, so it is efficient only if T is a few times n_sel * l_sel.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.packed_tiles import find_document_of_tile
from nsa_lab.attention.kernels.selected.inverted_index import get_block_keys, get_first_entry, load_selection
from nsa_lab.attention.kernels.tiles import (
    LN2,
    dot_transposed,
    load_consecutive_parts,
    load_parts,
    load_parts_masked,
    load_rows_masked,
    rescale_and_add,
    row_offsets,
    store_parts,
    zero_parts,
)


# fmt: off
@triton.jit
def get_row_indices(row_start, row_stop, ROWS: tl.constexpr):
    """Return the indices of ROWS rows of a work item (a row is one head of one entry). From row_stop on the last row
    repeats.

    A repeated row needs no mask, reads nothing outside of the item, and stores the same bits twice. The indices are
    unsigned, because a signed division by a constant takes twice the instructions.
    """
    return tl.maximum(tl.minimum(row_start + tl.arange(0, ROWS), row_stop - 1), 0).to(tl.uint32)


@triton.jit
def get_pair_indices(entry, row_start, row_stop, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Return (pair, head) of ROWS rows with the given entries."""
    head = get_row_indices(row_start, row_stop, ROWS) % HEADS
    if WIDE:
        pair = entry.to(tl.int64) * HEADS + head
    else:
        pair = entry.to(tl.uint32) * HEADS + head
    return pair, head


@triton.jit
def get_work_item(work_ptr, order_ptr):
    """Return (item, index_row) of this program: its work item and the (batch, group, block) of the item, -1: no item."""
    item = tl.program_id(0)
    if order_ptr is not None:
        item = tl.load(order_ptr + item)
    return item, tl.load(work_ptr + item)


@triton.jit
def count_diagonal_rows(before, rows, BLOCK: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the number of rows of an item, in whole tiles, that can need the causal mask.

    Entries are in query order, so only the first BLOCK entries of a kv block can be queries inside the block.
    """
    return tl.minimum(tl.cdiv((BLOCK - before).to(tl.int32) * HEADS, ROWS) * ROWS, rows)


@triton.jit
def _gather_rows(
    q_base, entries_base, pair_out_base, pair_lse_base, k, k_rest, v, v_rest, key, inside_block,
    row_start, row_stop, first_query, stride_qt, stride_qh, scale_log2,
    DIAGONAL: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr, ROWS: tl.constexpr, ALL_KEYS: tl.constexpr, WIDE: tl.constexpr,
):
    """Compute attention of the rows [row_start, row_stop) of one work item to its kv block."""
    # The entries determine the addresses of a q tile. They are loaded one tile ahead, because the copy of the tile would
    # have to wait for entries loaded in the same step. Everything else follows from the pair numbers. The next entries are
    # loaded after these are computed, so that they can reuse the registers of the current entries.
    entry = tl.load(entries_base + get_row_indices(row_start, row_stop, ROWS) // HEADS)
    for start in range(row_start, row_stop, ROWS):
        pair, head = get_pair_indices(entry, start, row_stop, HEADS, ROWS, WIDE)
        t = pair // (N_SEL * HEADS)
        q, q_rest = load_parts(q_base, row_offsets(t, head, stride_qt, stride_qh, WIDE), DK, DK_PART, DK_REST)
        entry = tl.load(entries_base + get_row_indices(start + ROWS, row_stop, ROWS) // HEADS)
        # These stores never run and produce no machine code; they give the q tile a second reader. If only products read a
        # tile, Triton allocates one buffer more than its stages need, in case the last products still run when the next
        # copy starts. Here the stores at the end of the step wait for the products anyway. With a second reader there is no
        # extra buffer, and three stages fit in the shared memory of two. With two stages, each copy would start just before
        # its use.
        if DK > 64 and start >= row_stop:
            store_parts(pair_out_base, tl.arange(0, ROWS) * DK, q, q_rest, None, DK, DK_PART, DK_REST)
        scores = dot_transposed(q, q_rest, k, k_rest, DK_REST)
        if DIAGONAL:
            scores = tl.where(key[None, :] <= (first_query + t.to(tl.int32))[:, None], scores, float("-inf"))
        if not ALL_KEYS:
            scores = tl.where(inside_block[None, :], scores, float("-inf"))
        peak = tl.max(scores, 1) * scale_log2
        p = tl.exp2(scores * scale_log2 - peak[:, None])
        total = tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (1 / total)[:, None]
        out_rest = out
        if DV_REST > 0:
            out_rest = tl.dot(p.to(v.dtype), v_rest, input_precision="ieee") * (1 / total)[:, None]
        tl.store(pair_lse_base + pair, peak + tl.log2(total))
        # Evicted first from the L2 cache, because q is read from there again.
        store_parts(pair_out_base, pair * DV, out, out_rest, None, DV, DV_PART, DV_REST, "evict_first")


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_gather(
    q_ptr, k_ptr, v_ptr, entries_ptr, starts_ptr, work_ptr, order_ptr, pair_out_ptr, pair_lse_ptr, bounds_ptr,
    T, N, G, n_blocks, first_query, n_documents,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    scale_log2,
    WIDE: tl.constexpr, ITEM_ENTRIES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
):
    """Compute the partial outputs and LSEs (in units of log2) of one work item."""
    item, index_row = get_work_item(work_ptr, order_ptr)
    if index_row < 0:
        return
    start = tl.load(starts_ptr + index_row)
    stop = tl.load(starts_ptr + index_row + 1)
    first_entry, before = get_first_entry(item, start, index_row, ITEM_ENTRIES)
    rows = (tl.minimum(stop - first_entry, ITEM_ENTRIES) * HEADS).to(tl.int32)
    if rows <= 0:
        return
    b = (index_row // n_blocks // G).to(tl.int64)
    g = index_row // n_blocks % G
    first_key, stop_key = get_block_keys(index_row % n_blocks, N, bounds_ptr, n_documents, BLOCK)
    key = first_key + tl.arange(0, BLOCK_PAD)
    inside_block = tl.arange(0, BLOCK_PAD) < BLOCK
    inside = inside_block & (key < stop_key)
    n = key.to(tl.int64)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    k, k_rest = load_parts_masked(k_base, n * stride_kn, inside, DK, DK_PART, DK_REST)
    v_base = v_ptr + b * stride_vb + g * stride_vg
    v, v_rest = load_parts_masked(v_base, n * stride_vn, inside, DV, DV_PART, DV_REST)
    q_base = q_ptr + b * stride_qb + g.to(tl.int64) * HEADS * stride_qh
    pair_base = (index_row // n_blocks).to(tl.int64) * T * (N_SEL * HEADS)
    diagonal = 0
    if before < BLOCK:
        diagonal = count_diagonal_rows(before, rows, BLOCK, HEADS, ROWS)
        _gather_rows(
            q_base, entries_ptr + first_entry, pair_out_ptr + pair_base * DV, pair_lse_ptr + pair_base,
            k, k_rest, v, v_rest, key, inside_block, 0, diagonal, first_query, stride_qt, stride_qh, scale_log2,
            True, HEADS, N_SEL, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, BLOCK == BLOCK_PAD, WIDE,
        )
    _gather_rows(
        q_base, entries_ptr + first_entry, pair_out_ptr + pair_base * DV, pair_lse_ptr + pair_base,
        k, k_rest, v, v_rest, key, inside_block, diagonal, rows, first_query, stride_qt, stride_qh, scale_log2,
        False, HEADS, N_SEL, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, ROWS, BLOCK == BLOCK_PAD, WIDE,
    )


@triton.jit
def get_row_pairs(blocks_ptr, T, G, bg, tile, HEADS: tl.constexpr, N_SEL: tl.constexpr, ROWS: tl.constexpr):
    """Return (b, g, t, head, inside, slot pointers, pair of the first slot) of a tile of rows of one (batch, group)."""
    row = tile * ROWS + tl.arange(0, ROWS)
    t = row // HEADS
    head = row % HEADS
    b = bg // G
    g = bg % G
    inside = t < T
    slots = blocks_ptr + ((b * T + t) * G + g) * N_SEL
    pair = (bg * T + t) * N_SEL * HEADS + head
    return b, g, t, head, inside, slots, pair


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_merge(
    pair_out_ptr, pair_lse_ptr, blocks_ptr, out_ptr, lse_ptr,
    T, G, first_query,
    stride_outb, stride_outt, stride_lseb, stride_lset,
    tiles,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, BLOCK: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Merge the partial outputs of each row, weighted by their softmax sums."""
    bg = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, g, t, head, inside, slots, pair = get_row_pairs(blocks_ptr, T, G, bg, tile, HEADS, N_SEL, ROWS)
    columns = tl.arange(0, DV_PAD)
    peak = tl.full([ROWS], -1e30, tl.float32)
    for first in range(0, N_SEL, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            slot = first + ahead
            _, live = load_selection(slots + slot, inside & (slot < N_SEL), first_query, t, BLOCK)
            peak = tl.maximum(peak, tl.load(pair_lse_ptr + pair + slot * HEADS, mask=live, other=float("-inf")))
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, N_SEL, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            slot = first + ahead
            _, live = load_selection(slots + slot, inside & (slot < N_SEL), first_query, t, BLOCK)
            weight = tl.exp2(tl.load(pair_lse_ptr + pair + slot * HEADS, mask=live, other=float("-inf")) - peak)
            total += weight
            acc += weight[:, None] * load_rows_masked(pair_out_ptr, (pair + slot * HEADS) * DV, columns, live, DV, DV_PAD)
    _normalize_and_store(
        out_ptr, lse_ptr, acc, acc, peak, total, b, t, g * HEADS + head, inside,
        stride_outb, stride_outt, stride_lseb, stride_lset, DV, DV_PAD, 0,
    )


@triton.jit
def _normalize_and_store(
    out_ptr, lse_ptr, acc, acc_rest, peak, total, b, t, query_head, inside,
    stride_outb, stride_outt, stride_lseb, stride_lset, DV: tl.constexpr, DV_PART: tl.constexpr, DV_REST: tl.constexpr,
):
    """Normalize and store. A row without keys gets output 0 and LSE −inf. `query_head` is counted over all groups."""
    safe_total = tl.where(total > 0, total, 1.0)
    offsets = b * stride_outb + t.to(tl.int64) * stride_outt + query_head * DV
    rescale = (1 / safe_total)[:, None]
    store_parts(out_ptr, offsets, acc * rescale, acc_rest * rescale, inside, DV, DV_PART, DV_REST)
    lse = tl.where(total > 0, (peak + tl.log2(safe_total)) * LN2, float("-inf"))
    tl.store(lse_ptr + b * stride_lseb + t.to(tl.int64) * stride_lset + query_head, lse, mask=inside)


@triton.jit
def _pop_lowest_bit(word):
    """Return (index of the lowest set bit of an unsigned word, the word without it). For 0: (undefined, 0)."""
    remainder = word & (word - 1)
    # A power of two is exact in float32, and its exponent is the bit index.
    return ((word - remainder).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, remainder


@triton.jit
def _pop_block(low, high, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Return (block, low, high): the first block of a set, and the set without it."""
    block, low_remainder = _pop_lowest_bit(low)
    if WORDS == 2:
        block_high, high_remainder = _pop_lowest_bit(high)
        block = tl.where(low != 0, block, BITS + block_high)
        high = tl.where(low != 0, high, high_remainder)
    return block, low_remainder, high


@triton.jit
def _make_block_sets(block, live, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Return the live blocks of each row of `block`, [rows, slots], as bit sets (low, high)."""
    bit = tl.full(block.shape, 1, tl.uint32 if BITS == 32 else tl.uint64) << (block & (BITS - 1)).to(tl.uint32)
    low = tl.sum(tl.where(live & (block < BITS), bit, 0), 1)
    high = low
    if WORDS == 2:
        high = tl.sum(tl.where(live & (block >= BITS), bit, 0), 1)
    return low, high


@triton.jit
def _bitwise_or(a, b):
    return a | b


@triton.jit
def _count_members(word, BITS: tl.constexpr):
    return tl.sum(((word >> tl.arange(0, BITS).to(tl.uint32)) & 1).to(tl.int32), 0)


@triton.jit
def _attend_union(
    acc, acc_rest, peak, total, q, q_rest, k_base, v_base, stride_kn, stride_vn, union_low, union_high, count, low, high,
    position, first_t, N, scale_log2,
    BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
):
    """Update the online softmax with the `count` blocks of the union; (low, high) is the set of each row."""
    position_in_block = tl.arange(0, BLOCK_PAD)
    for _ in range(count):
        block, union_low, union_high = _pop_block(union_low, union_high, WORDS, BITS)
        start = block * BLOCK
        # A 64-bit base for the block, and offsets inside it that are the same in all steps.
        k_block = k_base + tl.cast(block, tl.int64) * (BLOCK * stride_kn)
        v_block = v_base + tl.cast(block, tl.int64) * (BLOCK * stride_vn)
        k, k_rest = load_consecutive_parts(k_block, stride_kn, 0, N - start, DK, DK_PART, DK_REST, BLOCK_PAD, True)
        v, v_rest = load_consecutive_parts(v_block, stride_vn, 0, N - start, DV, DV_PART, DV_REST, BLOCK_PAD, True)
        scores = dot_transposed(q, q_rest, k, k_rest, DK_REST)
        # A run-time condition: only the last one or two blocks of a tile need the mask, and a separate loop for them would
        # fill and drain the copy pipeline once more.
        if start + BLOCK > first_t + 1:
            scores = tl.where((start + position_in_block)[None, :] <= position[:, None], scores, float("-inf"))
        if BLOCK != BLOCK_PAD:
            scores = tl.where((position_in_block < BLOCK)[None, :], scores, float("-inf"))
        word = low
        if WORDS == 2:
            word = tl.where(block < BITS, low, high)
        is_selected = ((word >> (block & (BITS - 1)).to(tl.uint32)) & 1) != 0
        new_peak = tl.maximum(peak, tl.where(is_selected, tl.max(scores, 1) * scale_log2, float("-inf")))
        # In rows that did not select this block, an infinite shift makes every p zero without masking the scores.
        p = tl.exp2(scores * scale_log2 - tl.where(is_selected, new_peak, float("inf"))[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(p, 1)
        acc, acc_rest = rescale_and_add(acc, acc_rest, rescale, p.to(v.dtype), v, v_rest, DV_REST)
        peak = new_peak
    return acc, acc_rest, peak, total


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_union(
    q_ptr, k_ptr, v_ptr, blocks_ptr, out_ptr, lse_ptr, bounds_ptr,
    T, G, n_documents, first_query,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_outb, stride_outt, stride_lseb, stride_lset,
    scale_log2, tiles,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, QUERIES_PAD: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
):
    """Compute attention of ROWS consecutive (query, head) rows of one (batch, group) to the union of their blocks.

    A set of blocks (the selection of a query, or the union) is WORDS words of BITS bits, `low` and `high`.
    """
    # Late tiles have the most blocks, so they start first and none of them runs alone at the end.
    tile = tiles - 1 - tl.program_id(0) % tiles
    bg = (tl.program_id(0) // tiles).to(tl.int64)
    b = bg // G
    g = bg % G
    if bounds_ptr is not None:
        _, tile, first, T, _, _ = find_document_of_tile(bounds_ptr, bounds_ptr, n_documents, tile, HEADS, ROWS)
        if tile * ROWS >= T * HEADS:
            return
        q_ptr += first * stride_qt
        k_ptr += first * stride_kn
        v_ptr += first * stride_vn
        blocks_ptr += first * (G * N_SEL)
        out_ptr += first * stride_outt
        lse_ptr += first * stride_lset
    row = tile * ROWS + tl.arange(0, ROWS)
    t = row // HEADS
    query_head = g * HEADS + row % HEADS
    inside = t < T
    slots_base = blocks_ptr + (b * T * G + g) * N_SEL
    slots = tl.arange(0, N_SEL_PAD)

    first_t = tile * ROWS // HEADS
    last_t = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, T - 1)
    N = T
    if first_query is not None:
        t += first_query
        first_t += first_query
        last_t += first_query
        N = T + first_query
        q_ptr -= tl.cast(first_query, tl.int64) * stride_qt
        slots_base -= tl.cast(first_query, tl.int64) * (G * N_SEL)
        out_ptr -= tl.cast(first_query, tl.int64) * stride_outt
        lse_ptr -= tl.cast(first_query, tl.int64) * stride_lset
    query = first_t + tl.arange(0, QUERIES_PAD)
    slots_inside = (query <= last_t)[:, None] & (slots < N_SEL)[None, :]
    slot_pointers = slots_base + query.to(tl.int64)[:, None] * G * N_SEL + slots[None, :]
    selected, live = load_selection(slot_pointers, slots_inside, 0, query[:, None], BLOCK)
    query_low, query_high = _make_block_sets(selected, live, WORDS, BITS)
    union_low = tl.reduce(query_low, 0, _bitwise_or)
    count = _count_members(union_low, BITS)
    # Copy the set of each query to its rows with a sum of one term: the result has the register layout of the scores.
    # Otherwise every step would convert it, through shared memory.
    is_own_query = t[:, None] == query[None, :]
    low = tl.sum(tl.where(is_own_query, query_low[None, :], 0), 1)
    union_high, high = union_low, low
    if WORDS == 2:
        union_high = tl.reduce(query_high, 0, _bitwise_or)
        count += _count_members(union_high, BITS)
        high = tl.sum(tl.where(is_own_query, query_high[None, :], 0), 1)

    q_offsets = t.to(tl.int64) * stride_qt + query_head * stride_qh
    q, q_rest = load_parts_masked(q_ptr + b * stride_qb, q_offsets, inside, DK, DK_PART, DK_REST)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    acc, acc_rest = zero_parts(ROWS, DV_PART, DV_REST)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, acc_rest, peak, total = _attend_union(
        acc, acc_rest, peak, total, q, q_rest, k_base, v_base, stride_kn, stride_vn, union_low, union_high, count,
        low, high, t, first_t, N, scale_log2, BLOCK, BLOCK_PAD, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, WORDS, BITS,
    )
    _normalize_and_store(
        out_ptr, lse_ptr, acc, acc_rest, peak, total, b, t, query_head, inside,
        stride_outb, stride_outt, stride_lseb, stride_lset, DV, DV_PART, DV_REST,
    )
# fmt: on
