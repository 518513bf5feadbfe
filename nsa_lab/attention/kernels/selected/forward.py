"""Selected attention, forward: two orders of the same sum. launch.py says which is launched when.

*Gather* keeps a kv block resident and streams the queries that chose it (the inverted index), with all heads of the group,
so that tensor-core tiles are full whatever the number of heads and whatever was chosen. Each pair leaves a normalised
partial output and its LSE; a second kernel merges the partials of a row. Work is that of the chosen pairs alone; the price
is the traffic of the partials.

*Union* keeps a tile of consecutive queries resident and walks the blocks that any of them chose, silencing a row where its
query did not. No workspace: a choice is a set of bits, and so is the union. But every row pays for the tile's union: right
when T is a few times n_sel * l_sel.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
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
    """ROWS rows of a work item, a row being one head of one entry; from row_stop on, the last row again.

    Repeating a row costs no masks, reads nothing that this item does not own, and stores the same bits twice.
    Unsigned, because a signed division by a constant takes twice the instructions.
    """
    return tl.maximum(tl.minimum(row_start + tl.arange(0, ROWS), row_stop - 1), 0).to(tl.uint32)


@triton.jit
def get_pair_indices(entry, row_start, row_stop, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """(pair, head) of ROWS rows, whose entries are known."""
    head = get_row_indices(row_start, row_stop, ROWS) % HEADS
    if WIDE:
        pair = entry.to(tl.int64) * HEADS + head
    else:
        pair = entry.to(tl.uint32) * HEADS + head
    return pair, head


@triton.jit
def get_work_item(work_ptr, order_ptr):
    """(item, index_row) of this program: its work item, and the (batch, group, block) that it is of, -1 for none."""
    item = tl.program_id(0)
    if order_ptr is not None:
        item = tl.load(order_ptr + item)
    return item, tl.load(work_ptr + item)


@triton.jit
def count_diagonal_rows(before, rows, BLOCK: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """How many of an item's rows, in whole tiles, may need the causal mask.

    Entries are in query order, so only the first BLOCK of a kv block's can be queries inside it.
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
    """Attention of the rows [row_start, row_stop) of one work item to its kv block."""
    # The entries say where a tile of q lies. They are loaded one tile ahead, since the copy of the tile would have to wait
    # for entries loaded in the same step. Everything else follows from the pair numbers, and the next entries are loaded
    # once these are known, so that they can take the registers of the entries before.
    entry = tl.load(entries_base + get_row_indices(row_start, row_stop, ROWS) // HEADS)
    for start in range(row_start, row_stop, ROWS):
        pair, head = get_pair_indices(entry, start, row_stop, HEADS, ROWS, WIDE)
        t = pair // (N_SEL * HEADS)
        q, q_rest = load_parts(q_base, row_offsets(t, head, stride_qt, stride_qh, WIDE), DK, DK_PART, DK_REST)
        entry = tl.load(entries_base + get_row_indices(start + ROWS, row_stop, ROWS) // HEADS)
        # These stores never run and leave no machine code; they give the tile q a second reader. To a tile that products
        # alone read, Triton gives one buffer more than its stages need, in case the last products still run when the next
        # copy begins; here the stores at the end of the step wait for the products anyway. With a second reader there is no
        # such buffer, and three stages fit into the shared memory of two. With two, each copy would begin just before its
        # use.
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
        # To leave the L2 cache first: q will be read from there again.
        store_parts(pair_out_base, pair * DV, out, out_rest, None, DV, DV_PART, DV_REST, "evict_first")


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_gather(
    q_ptr, k_ptr, v_ptr, entries_ptr, starts_ptr, work_ptr, order_ptr, pair_out_ptr, pair_lse_ptr, bounds_ptr,
    T, N, G, n_blocks, first_query, documents,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    scale_log2,
    WIDE: tl.constexpr, ITEM_ENTRIES: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
):
    """Partial outputs and LSEs (in units of log2) of one work item."""
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
    first_key, stop_key = get_block_keys(index_row % n_blocks, N, bounds_ptr, documents, BLOCK)
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
    """For a tile of rows of one (batch, group): (b, g, t, head, inside, where its slots begin, pair of its first slot)."""
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
    """Softmax-weighted mean of each row's partials."""
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
    """Normalises and stores; a row that met no key gets output 0 and LSE −inf. `query_head` counts in all groups."""
    safe = tl.where(total > 0, total, 1.0)
    at = b * stride_outb + t.to(tl.int64) * stride_outt + query_head * DV
    shrink = (1 / safe)[:, None]
    store_parts(out_ptr, at, acc * shrink, acc_rest * shrink, inside, DV, DV_PART, DV_REST)
    lse = tl.where(total > 0, (peak + tl.log2(safe)) * LN2, float("-inf"))
    tl.store(lse_ptr + b * stride_lseb + t.to(tl.int64) * stride_lset + query_head, lse, mask=inside)


@triton.jit
def _pop_lowest_bit(word):
    """(bit, rest): the lowest bit that is set in an unsigned word, and the word without it. Of 0, any bit and 0."""
    rest = word & (word - 1)
    # A float32 holds a power of two exactly, and its exponent says which.
    return ((word - rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, rest


@triton.jit
def _pop_block(low, high, WORDS: tl.constexpr, BITS: tl.constexpr):
    """(block, low, high): the first block of a set, and the set without it."""
    block, rest = _pop_lowest_bit(low)
    if WORDS == 2:
        block_high, rest_high = _pop_lowest_bit(high)
        block = tl.where(low != 0, block, BITS + block_high)
        high = tl.where(low != 0, high, rest_high)
    return block, rest, high


@triton.jit
def _make_block_sets(block, live, WORDS: tl.constexpr, BITS: tl.constexpr):
    """The live blocks of each row of `block`, [rows, slots], as a set (low, high)."""
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
    acc, acc_rest, peak, total, q, q_rest, k_base, v_base, stride_kn, stride_vn, left_low, left_high, count, low, high,
    position, first_t, N, scale_log2,
    BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
):
    """Online softmax over the `count` blocks of the set `left`; (low, high) is each row's own."""
    place = tl.arange(0, BLOCK_PAD)
    for _ in range(count):
        block, left_low, left_high = _pop_block(left_low, left_high, WORDS, BITS)
        start = block * BLOCK
        # A base in 64 bits for the block, and offsets inside it that no step changes.
        k_block = k_base + tl.cast(block, tl.int64) * (BLOCK * stride_kn)
        v_block = v_base + tl.cast(block, tl.int64) * (BLOCK * stride_vn)
        k, k_rest = load_consecutive_parts(k_block, stride_kn, 0, N - start, DK, DK_PART, DK_REST, BLOCK_PAD, True)
        v, v_rest = load_consecutive_parts(v_block, stride_vn, 0, N - start, DV, DV_PART, DV_REST, BLOCK_PAD, True)
        scores = dot_transposed(q, q_rest, k, k_rest, DK_REST)
        # At run time: only a tile's last blocks need the mask, one or two, and a loop of their own would fill and drain the
        # copies' buffers once more.
        if start + BLOCK > first_t + 1:
            scores = tl.where((start + place)[None, :] <= position[:, None], scores, float("-inf"))
        if BLOCK != BLOCK_PAD:
            scores = tl.where((place < BLOCK)[None, :], scores, float("-inf"))
        word = low
        if WORDS == 2:
            word = tl.where(block < BITS, low, high)
        chosen = ((word >> (block & (BITS - 1)).to(tl.uint32)) & 1) != 0
        new_peak = tl.maximum(peak, tl.where(chosen, tl.max(scores, 1) * scale_log2, float("-inf")))
        # In a row that did not choose this block an infinite shift turns every p to 0, at no cost for the scores.
        p = tl.exp2(scores * scale_log2 - tl.where(chosen, new_peak, float("inf"))[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc, acc_rest = rescale_and_add(acc, acc_rest, shrink, p.to(v.dtype), v, v_rest, DV_REST)
        peak = new_peak
    return acc, acc_rest, peak, total


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_union(
    q_ptr, k_ptr, v_ptr, blocks_ptr, out_ptr, lse_ptr, bounds_ptr,
    T, G, documents, first_query,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_outb, stride_outt, stride_lseb, stride_lset,
    scale_log2, tiles,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, QUERIES_PAD: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
):
    """ROWS consecutive (query, head) rows of one (batch, group) against the union of their blocks.

    A set of blocks, a query's choice or the union, is WORDS words of BITS bits, `low` and `high`.
    """
    # Late tiles see the most blocks: they go first, so that none of them is left for the end.
    tile = tiles - 1 - tl.program_id(0) % tiles
    bg = (tl.program_id(0) // tiles).to(tl.int64)
    b = bg // G
    g = bg % G
    if bounds_ptr is not None:
        _, tile, first, T, _, _ = find_document_of_tile(bounds_ptr, bounds_ptr, documents, tile, HEADS, ROWS)
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
    chosen, live = load_selection(slot_pointers, slots_inside, 0, query[:, None], BLOCK)
    query_low, query_high = _make_block_sets(chosen, live, WORDS, BITS)
    union_low = tl.reduce(query_low, 0, _bitwise_or)
    count = _count_members(union_low, BITS)
    # A row's set is that of its query, by a sum with one term: so it can be worked out in the layout of the scores, which a
    # step would else bring it into, through shared memory.
    own = t[:, None] == query[None, :]
    low = tl.sum(tl.where(own, query_low[None, :], 0), 1)
    union_high, high = union_low, low
    if WORDS == 2:
        union_high = tl.reduce(query_high, 0, _bitwise_or)
        count += _count_members(union_high, BITS)
        high = tl.sum(tl.where(own, query_high[None, :], 0), 1)

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
