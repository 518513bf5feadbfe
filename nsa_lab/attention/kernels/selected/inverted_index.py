"""The inverted index of a block selection: for every kv block, the queries that selected it, in order.

`blocks` lists the kv blocks of each query. Kernels that keep a kv block resident and stream its queries need the transpose.
It is computed by a counting sort on the device: nothing is read back, no size depends on the data, and all atomics are
integer operations, so the same selection always gives the same index, bit for bit.

Terms used here and in the kernels that read the index:
* a query selects up to n_sel blocks, one in each of its *slots*;
* an *entry* is one (query, slot), encoded as the integer `t * n_sel + slot`, so the query is `entry // n_sel`. A *pair* is
  an entry and one head of the group, `entry * HEADS + head`: a row of the workspaces for partial results;
* an entry is *live* if its block exists and starts at or before the query (`0 <= block * block_tokens <= t`);
* a *work item* is at most `item_entries` consecutive entries of one kv block: the work of one program. A block that every
  query selected (block 0) becomes many items, and a block that no query selected still gets one. Items are numbered by
  block; in that order, concurrent programs read queries from the entire sequence. If these do not fit in the L2 cache,
  `order` sorts the items by their first query.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width
from nsa_lab.attention.kernels.packed_tiles import (
    count_tiles,
    find_document_of_row,
    find_document_of_tile,
    get_first_tile,
)

QUERIES_PER_SEGMENT = 256  # the bitmap of a segment has one bit per query and block; segments are counted independently
# The bitmap is quadratic in T (T^2 / 256 bytes per group), so long inputs take several passes.
BITMAP_BYTES_LIMIT = 256 * 2**20


class InvertedIndex(NamedTuple):
    """The queries of each kv block.

    Lengths are given by `compute_index_sizes`; elements after the end of entries and starts are not written.

    entries: int32, live entries by (batch, group, block) and then by query.
    starts: int64, first entry of each (batch, group, block), and the end of the last.
    work: int32, the (batch, group, block) row of each item, −1 if there is no such item. Item number `i` of row `r` holds
        entries from `starts[r] + item_entries * (i - (starts[r] // item_entries + r))` on.
    order: int64, item numbers sorted by (batch, group) and first query, items without entries last; None: 0, 1, 2, ...
    """

    entries: Tensor
    starts: Tensor
    work: Tensor
    order: Tensor | None


@triton.jit
def _population_count(word):
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


# fmt: off
@triton.jit
def load_selection(pointers, inside, first_query, t, BLOCK: tl.constexpr):
    """Return (block, live) of the slots of query t at position first_query + t. The block is -1 outside `inside`.

    BLOCK = 0: blocks have global numbers (see `globalize_blocks`), and slots that are not live are -1 already.
    """
    block = tl.load(pointers, mask=inside, other=-1)
    return block, (block >= 0) & (block.to(tl.int64) * BLOCK <= first_query + t)


@triton.jit
def get_first_entry(item, start, index_row, ITEM_ENTRIES: tl.constexpr):
    """Return (first entry of a work item, number of entries of its block before it)."""
    before = (item - (start // ITEM_ENTRIES + index_row)) * ITEM_ENTRIES
    return start + before, before


@triton.jit
def get_block_keys(block, N, bounds_ptr, n_documents, BLOCK: tl.constexpr):
    """Return (first, stop): kv block `block` holds the keys first .. first+BLOCK-1 that are less than stop."""
    first = block * BLOCK
    if bounds_ptr is not None:
        _, block_in_document, start, document_tokens, _, _ = find_document_of_tile(
            bounds_ptr, bounds_ptr, n_documents, block, 1, BLOCK
        )
        first = start.to(tl.int32) + block_in_document * BLOCK
        N = start.to(tl.int32) + document_tokens
    return first, N


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_globalize_blocks(
    blocks_ptr, global_blocks_ptr, bounds_ptr,
    n_documents,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):
    """Convert block numbers local to a document to global numbers, -1 if not live. A token has SLOTS slots."""
    document, tile, first, T, _, _ = find_document_of_tile(
        bounds_ptr, bounds_ptr, n_documents, tl.program_id(0), SLOTS, ENTRIES
    )
    offsets = tile.to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = offsets < T.to(tl.int64) * SLOTS
    slot_offsets = first * SLOTS + offsets
    block, live = load_selection(blocks_ptr + slot_offsets, inside, 0, offsets // SLOTS, BLOCK)
    global_block = block + (first // BLOCK).to(tl.int32) + document  # see `get_first_tile`
    tl.store(global_blocks_ptr + slot_offsets, tl.where(live, global_block, -1), mask=inside)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_index_count(
    blocks_ptr, bitmap_ptr, below_ptr, counts_ptr, bounds_ptr,
    T, G, first_query, n_blocks, n_segments, first_segment, pass_segments, n_documents,
    N_SEL: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Fill the bitmap of one segment of queries (which query selected which block), and count the bits in earlier words."""
    WORDS: tl.constexpr = SEGMENT // 32
    bg = (tl.program_id(0) // pass_segments).to(tl.int64)
    local_segment = tl.program_id(0) % pass_segments
    segment = first_segment + local_segment
    if segment >= n_segments:
        return
    b = bg // G
    g = bg % G
    region = (bg * pass_segments + local_segment) * WORDS * n_blocks
    offsets = tl.arange(0, ENTRIES)
    first_block = 0
    stop_block = n_blocks
    if bounds_ptr is None:
        for i in range(0, WORDS * n_blocks, ENTRIES):
            tl.store(bitmap_ptr + region + i + offsets, 0, mask=i + offsets < WORDS * n_blocks)
    else:
        # Queries select only blocks of the same document. The bitmap of other documents is neither written nor read.
        first_t = first_query + segment * SEGMENT
        last_t = first_query + tl.minimum(segment * SEGMENT + SEGMENT, T) - 1
        document = find_document_of_row(bounds_ptr, n_documents, first_t)
        first_block = get_first_tile(bounds_ptr, document, 1, BLOCK).to(tl.int32)
        document = find_document_of_row(bounds_ptr, n_documents, last_t)
        stop_block = get_first_tile(bounds_ptr, document + 1, 1, BLOCK).to(tl.int32)
        for j in range(first_block, stop_block, COLUMNS):
            column = j + tl.arange(0, COLUMNS)[None, :]
            word = tl.arange(0, WORDS)[:, None].to(tl.int64)
            tl.store(bitmap_ptr + region + word * n_blocks + column, 0, mask=column < stop_block)
    tl.debug_barrier()
    for i in range(0, SEGMENT * N_SEL, ENTRIES):
        local_query = (i + offsets) // N_SEL
        t = segment * SEGMENT + local_query
        inside = (t < T) & (i + offsets < SEGMENT * N_SEL)
        slots = blocks_ptr + ((b * T + t) * G + g) * N_SEL + (i + offsets) % N_SEL
        block, live = load_selection(slots, inside, first_query, t, BLOCK if bounds_ptr is None else 0)
        bit = tl.full([ENTRIES], 1, tl.int32) << (local_query % 32)
        tl.atomic_or(
            bitmap_ptr + region + (local_query // 32).to(tl.int64) * n_blocks + block, bit, mask=live, sem="relaxed"
        )
    tl.debug_barrier()
    words = tl.arange(0, WORDS)[:, None]
    for j in range(first_block, stop_block, COLUMNS):
        column = j + tl.arange(0, COLUMNS)
        inside = (words >= 0) & (column < stop_block)[None, :]
        bitmap_offsets = region + words.to(tl.int64) * n_blocks + column[None, :]
        # Bypass L1: the bits were set by atomics, which are performed in L2.
        ones = _population_count(tl.load(bitmap_ptr + bitmap_offsets, mask=inside, other=0, cache_modifier=".cg"))
        tl.store(below_ptr + bitmap_offsets, tl.cumsum(ones, 0) - ones, mask=inside)
        tl.store(counts_ptr + (bg * n_blocks + column) * n_segments + segment, tl.sum(ones, 0), mask=column < stop_block)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_index_scatter(
    blocks_ptr, bitmap_ptr, below_ptr, ends_ptr, entries_ptr, starts_ptr, work_ptr,
    T, G, first_query, n_blocks, n_segments, first_segment, pass_segments, row_programs, rows_total, work_size,
    N_SEL: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr, ITEM_ENTRIES: tl.constexpr,
):
    """Write the entries of QUERIES queries to their positions. Also list the work items of a share of the kv blocks."""
    WORDS: tl.constexpr = SEGMENT // 32
    bg = (tl.program_id(0) // row_programs).to(tl.int64)
    part = tl.program_id(0) % row_programs
    b = bg // G
    g = bg % G
    offsets = tl.arange(0, ENTRIES)
    local_query = part * QUERIES + offsets // N_SEL
    t = first_segment * SEGMENT + local_query
    inside = (t < T) & (local_query < pass_segments * SEGMENT) & (offsets < QUERIES * N_SEL)
    slots = blocks_ptr + ((b * T + t) * G + g) * N_SEL + offsets % N_SEL
    block, live = load_selection(slots, inside, first_query, t, BLOCK)
    word = (bg * pass_segments * WORDS + local_query // 32) * n_blocks + block
    bits = tl.load(bitmap_ptr + word, mask=live, other=0)
    earlier_bits = (tl.full([ENTRIES], 1, tl.int32) << (local_query % 32)) - 1
    rank = tl.load(below_ptr + word, mask=live, other=0) + _population_count(bits & earlier_bits)
    cell = (bg * n_blocks + block) * n_segments + t // SEGMENT
    base = tl.load(ends_ptr + cell - 1, mask=live & (cell > 0), other=0)
    tl.store(entries_ptr + base + rank, t * N_SEL + offsets % N_SEL, mask=live)

    if first_segment == 0:
        for j in range(part, n_blocks, row_programs):
            index_row = bg * n_blocks + j
            start = tl.load(ends_ptr + index_row * n_segments - 1, mask=index_row > 0, other=0)
            stop = tl.load(ends_ptr + (index_row + 1) * n_segments - 1)
            tl.store(starts_ptr + index_row, start)
            if index_row == rows_total - 1:
                tl.store(starts_ptr + index_row + 1, stop)
            # The number of the row's first item. It needs no scan over the preceding rows and leaves room for all of their
            # items. Unused numbers up to the first of the next row are marked empty.
            first_number = start // ITEM_ENTRIES + index_row
            items = tl.maximum(tl.cdiv(stop - start, ITEM_ENTRIES), 1)
            room = tl.where(index_row == rows_total - 1, work_size, stop // ITEM_ENTRIES + index_row + 1) - first_number
            for i in range(0, room, ENTRIES):
                owner = tl.where(i + offsets < items, index_row.to(tl.int32), -1)
                tl.store(work_ptr + first_number + i + offsets, owner, mask=i + offsets < room)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_index_first_query(
    entries_ptr, starts_ptr, work_ptr, keys_ptr,
    n_items, T, n_blocks,
    N_SEL: tl.constexpr, ITEM_ENTRIES: tl.constexpr, ITEMS: tl.constexpr,
):
    """Compute the sort key of every work item: (batch, group) * T + first query; the largest integer without entries."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    index_row = tl.load(work_ptr + item, mask=item < n_items, other=-1)
    start = tl.load(starts_ptr + index_row, mask=index_row >= 0, other=0)
    stop = tl.load(starts_ptr + index_row + 1, mask=index_row >= 0, other=0)
    first_entry, _ = get_first_entry(item, start, index_row, ITEM_ENTRIES)
    query = tl.load(entries_ptr + first_entry, mask=first_entry < stop, other=0) // N_SEL
    last = 2**31 - 1 if keys_ptr.dtype.element_ty == tl.int32 else 2**62
    key = tl.where(first_entry < stop, (index_row // n_blocks).to(tl.int64) * T + query, last)
    tl.store(keys_ptr + item, key.to(keys_ptr.dtype.element_ty), mask=item < n_items)
# fmt: on


class IndexSizes(NamedTuple):
    """Number of elements of each tensor of an `InvertedIndex`."""

    entries: int
    starts: int
    work: int
    order: int


def compute_index_sizes(rows: int, T: int, n_blocks: int, n_sel: int, item_entries: int, *, sort_items: bool) -> IndexSizes:
    """Return sizes that suffice for any selection of `rows` (batch, group) rows. They depend only on shapes.

    The sizes are multiples of 4 (at least 16 bytes), so that several indices concatenated in one tensor stay aligned.
    """
    entries = rows * T * n_sel + 1  # one more than the maximum: kernels may load at the start of an empty last block
    work = rows * T * n_sel // item_entries + rows * n_blocks + 1
    return IndexSizes(*(ceil_div(n, 4) * 4 for n in (entries, rows * n_blocks + 1, work, work if sort_items else 0)))


def globalize_blocks(blocks: Tensor, block_tokens: int, bounds: Tensor) -> Tensor:
    """Convert a selection [1, T, G, n_sel] of blocks local to documents to global block numbers; -1 if not live.

    Block j of a document that starts at row r has the global number r // block_tokens + document + j.
    """
    global_blocks = torch.empty_like(blocks)
    slots_per_token, entries = blocks.shape[2] * blocks.shape[3], launch_table.SCATTER_ENTRIES
    # fmt: off
    nsa_selected_globalize_blocks[(count_tiles(blocks.numel(), entries, len(bounds) - 1),)](
        blocks, global_blocks, bounds,
        len(bounds) - 1,
        SLOTS=slots_per_token, BLOCK=block_tokens, ENTRIES=entries, num_warps=launch_table.STREAMING_WARPS,
    )
    # fmt: on
    return global_blocks


def build_inverted_index(
    blocks: Tensor,
    block_tokens: int,
    item_entries: int,
    n_blocks: int,
    first_query: int = 0,
    *,
    sort_items: bool = False,
    bounds: Tensor | None = None,
) -> InvertedIndex:
    """Sort a block selection by block.

    Args:
        blocks: int32 [B, T, G, n_sel] contiguous, ascending and distinct along n_sel, padded with −1. Blocks that start
            after their query are omitted.
        block_tokens: tokens of a block.
        item_entries: maximum number of entries of a work item.
        n_blocks: number of kv blocks.
        first_query: position of query 0 in the sequence, if `blocks` is a part of a selection.
        sort_items: compute `order`.
        bounds: int32 [documents + 1], the first tokens of packed documents; None: not packed. `blocks` are then results of
            `globalize_blocks`, and T counts the queries of all documents, or a part of them.
    """
    B, T, G, n_sel = blocks.shape
    rows, n_documents = B * G, None if bounds is None else len(bounds) - 1
    n_segments = ceil_div(T, QUERIES_PER_SEGMENT)
    words = QUERIES_PER_SEGMENT // 32
    pass_segments = max(1, min(n_segments, BITMAP_BYTES_LIMIT // (rows * words * n_blocks * 8)))
    passes = range(0, n_segments, pass_segments)
    bitmap = blocks.new_empty(rows * pass_segments * words * n_blocks)
    below = torch.empty_like(bitmap)
    # A segment of queries writes only the counts of blocks of the same documents.
    counts = (blocks.new_empty if bounds is None else blocks.new_zeros)(rows * n_blocks * n_segments)
    sizes = compute_index_sizes(rows, T, n_blocks, n_sel, item_entries, sort_items=sort_items)
    entries = blocks.new_empty(sizes.entries)
    starts = blocks.new_empty(sizes.starts, dtype=torch.int64)
    work = blocks.new_empty(sizes.work)
    queries = ceil_div(launch_table.SCATTER_ENTRIES, n_sel)
    row_programs = ceil_div(pass_segments * QUERIES_PER_SEGMENT, queries)

    # fmt: off
    def count(first_segment: int) -> None:
        nsa_selected_index_count[(rows * pass_segments,)](
            blocks, bitmap, below, counts, bounds,
            T, G, first_query, n_blocks, n_segments, first_segment, pass_segments, n_documents,
            N_SEL=n_sel, BLOCK=block_tokens, SEGMENT=QUERIES_PER_SEGMENT,
            ENTRIES=launch_table.COUNT_ENTRIES, COLUMNS=launch_table.COUNT_COLUMNS, num_warps=launch_table.COUNT_WARPS,
        )

    for first_segment in passes:
        count(first_segment)
    ends = torch.cumsum(counts, 0)
    for first_segment in passes:
        if len(passes) > 1:
            count(first_segment)
        nsa_selected_index_scatter[(rows * row_programs,)](
            blocks, bitmap, below, ends, entries, starts, work,
            T, G, first_query, n_blocks, n_segments, first_segment, pass_segments, row_programs,
            rows * n_blocks, work.numel(),
            N_SEL=n_sel, BLOCK=block_tokens if bounds is None else 0, SEGMENT=QUERIES_PER_SEGMENT, QUERIES=queries,
            ENTRIES=padded_width(queries * n_sel), ITEM_ENTRIES=item_entries, num_warps=launch_table.STREAMING_WARPS,
        )
    # fmt: on
    order = _sort_items_by_query(entries, starts, work, rows * T, T, n_blocks, n_sel, item_entries) if sort_items else None
    return InvertedIndex(entries, starts, work, order)


def _sort_items_by_query(
    entries: Tensor, starts: Tensor, work: Tensor, queries: int, T: int, n_blocks: int, n_sel: int, item_entries: int
) -> Tensor:
    """Return item numbers sorted by their first query. `queries`: number of queries in all groups of all sequences."""
    n_items, tile = work.numel(), launch_table.FIRST_QUERY_ITEMS
    # 32-bit keys sort in half the time.
    keys = work.new_empty(n_items, dtype=torch.int32 if queries < 2**31 else torch.int64)
    # fmt: off
    nsa_selected_index_first_query[(ceil_div(n_items, tile),)](
        entries, starts, work, keys,
        n_items, T, n_blocks,
        N_SEL=n_sel, ITEM_ENTRIES=item_entries, ITEMS=tile, num_warps=launch_table.STREAMING_WARPS,
    )
    # fmt: on
    return torch.argsort(keys, stable=True)
