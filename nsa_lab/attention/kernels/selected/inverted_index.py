"""The inverted index of a block choice: for every kv block, the queries that chose it, in order.

`blocks` says which kv blocks a query reads; kernels that keep a kv block resident and stream its queries need the
transpose. It is a counting sort that never leaves the device: nothing is read back, no size depends on the data, and
integer atomics are the only ones used, so the same choice always gives the same index, bit for bit.

Words used here and by the kernels that read the index:
* a query chooses up to n_sel blocks, one in each of its *slots*;
* an *entry* is one (query, slot) written as the number `t * n_sel + slot`, so that the query is `entry // n_sel`. A *pair*
  is an entry and one of the group's heads, `entry * HEADS + head`: a row of the workspaces for partial results;
* an entry is *live* when its block exists and starts at or before the query (`0 <= block * block_tokens <= t`);
* a *work item* is at most `item_entries` consecutive entries of one kv block: what one program of a kernel takes on.
  Blocks that every query chose (block 0) thus become many items, and blocks that none chose still get one. Items are
  numbered by block; taken in that order, programs that run together read queries from all over the sequence. Where these
  do not fit into the L2 cache, `order` says in which order to take the items: by their first query.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
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
    NOT_PACKED,
    PackedBounds,
    find_document_of_row,
    find_document_of_tile,
    get_first_tile,
)

QUERIES_PER_SEGMENT = 256  # a span's bitmap has one bit per query and block; spans are counted independently
# The bitmap is quadratic in T (T^2 / 256 bytes per group): long inputs take several passes.
BITMAP_BYTES_LIMIT = 256 * 2**20


class InvertedIndex(NamedTuple):
    """Where each kv block's queries are.

    Lengths are those of `index_sizes`; what is past the end of entries and starts is not written.

    entries: int32, live entries by (batch, group, block) and then by query.
    starts: int64, first entry of each (batch, group, block), and the end of the last.
    work: int32, the (batch, group, block) row an item belongs to, −1 where there is no such item. Item number
        `i` of row `r` holds entries from `starts[r] + item_entries * (i - (starts[r] // item_entries + r))` on.
    order: int64, item numbers by (batch, group) and first query, those without entries last; None for 0, 1, 2, ...
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
    """(block, live) of slots of query t, which stands at first_query + t: the block that each holds, -1 outside.

    BLOCK = 0: blocks have numbers in a row of documents, and what is not live is -1 already.
    """
    block = tl.load(pointers, mask=inside, other=-1)
    return block, (block >= 0) & (block.to(tl.int64) * BLOCK <= first_query + t)


@triton.jit
def get_first_entry(item, start, index_row, ITEM_ENTRIES: tl.constexpr):
    """(first entry of a work item, how many entries of its block are before it)."""
    before = (item - (start // ITEM_ENTRIES + index_row)) * ITEM_ENTRIES
    return start + before, before


@triton.jit
def get_block_keys(block, N, bounds_ptr, documents, BLOCK: tl.constexpr):
    """(first, stop): kv block number `block` holds keys first .. first+BLOCK-1, as far as they are less than stop."""
    first = block * BLOCK
    if bounds_ptr is not None:
        _, place, start, tokens, _, _ = find_document_of_tile(bounds_ptr, bounds_ptr, documents, block, 1, BLOCK)
        first = start.to(tl.int32) + place * BLOCK
        N = start.to(tl.int32) + tokens
    return first, N


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_globalize_blocks(
    blocks_ptr, numbers_ptr, bounds_ptr,
    documents,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):
    """Documents' own block numbers -> numbers in the row of all documents, -1 where not live. A token has SLOTS slots."""
    document, tile, first, T, _, _ = find_document_of_tile(
        bounds_ptr, bounds_ptr, documents, tl.program_id(0), SLOTS, ENTRIES
    )
    place = tile.to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = place < T.to(tl.int64) * SLOTS
    at = first * SLOTS + place
    block, live = load_selection(blocks_ptr + at, inside, 0, place // SLOTS, BLOCK)
    number = block + (first // BLOCK).to(tl.int32) + document  # as `first_tile` has it
    tl.store(numbers_ptr + at, tl.where(live, number, -1), mask=inside)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_index_count(
    blocks_ptr, bitmap_ptr, below_ptr, counts_ptr, bounds_ptr,
    T, G, first_query, n_blocks, n_spans, first_span, pass_spans, documents,
    N_SEL: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):
    """One span of queries: which query chose which block (bits), and how many of the span's earlier words did."""
    WORDS: tl.constexpr = SPAN // 32
    bg = (tl.program_id(0) // pass_spans).to(tl.int64)
    local_span = tl.program_id(0) % pass_spans
    span = first_span + local_span
    if span >= n_spans:
        return
    b = bg // G
    g = bg % G
    region = (bg * pass_spans + local_span) * WORDS * n_blocks
    offsets = tl.arange(0, ENTRIES)
    first_block = 0
    stop_block = n_blocks
    if bounds_ptr is None:
        for i in range(0, WORDS * n_blocks, ENTRIES):
            tl.store(bitmap_ptr + region + i + offsets, 0, mask=i + offsets < WORDS * n_blocks)
    else:
        # Queries choose blocks of their own documents; what there is of others in the bitmap is neither written nor read.
        first_t = first_query + span * SPAN
        last_t = first_query + tl.minimum(span * SPAN + SPAN, T) - 1
        document = find_document_of_row(bounds_ptr, documents, first_t)
        first_block = get_first_tile(bounds_ptr, document, 1, BLOCK).to(tl.int32)
        document = find_document_of_row(bounds_ptr, documents, last_t)
        stop_block = get_first_tile(bounds_ptr, document + 1, 1, BLOCK).to(tl.int32)
        for j in range(first_block, stop_block, COLUMNS):
            column = j + tl.arange(0, COLUMNS)[None, :]
            word = tl.arange(0, WORDS)[:, None].to(tl.int64)
            tl.store(bitmap_ptr + region + word * n_blocks + column, 0, mask=column < stop_block)
    tl.debug_barrier()
    for i in range(0, SPAN * N_SEL, ENTRIES):
        local = (i + offsets) // N_SEL
        t = span * SPAN + local
        inside = (t < T) & (i + offsets < SPAN * N_SEL)
        slots = blocks_ptr + ((b * T + t) * G + g) * N_SEL + (i + offsets) % N_SEL
        block, live = load_selection(slots, inside, first_query, t, BLOCK if bounds_ptr is None else 0)
        bit = tl.full([ENTRIES], 1, tl.int32) << (local % 32)
        tl.atomic_or(bitmap_ptr + region + (local // 32).to(tl.int64) * n_blocks + block, bit, mask=live, sem="relaxed")
    tl.debug_barrier()
    words = tl.arange(0, WORDS)[:, None]
    for j in range(first_block, stop_block, COLUMNS):
        column = j + tl.arange(0, COLUMNS)
        inside = (words >= 0) & (column < stop_block)[None, :]
        at = region + words.to(tl.int64) * n_blocks + column[None, :]
        # Read past L1: the bits were set by atomics, which work in L2.
        ones = _population_count(tl.load(bitmap_ptr + at, mask=inside, other=0, cache_modifier=".cg"))
        tl.store(below_ptr + at, tl.cumsum(ones, 0) - ones, mask=inside)
        tl.store(counts_ptr + (bg * n_blocks + column) * n_spans + span, tl.sum(ones, 0), mask=column < stop_block)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_index_scatter(
    blocks_ptr, bitmap_ptr, below_ptr, ends_ptr, entries_ptr, starts_ptr, work_ptr,
    T, G, first_query, n_blocks, n_spans, first_span, pass_spans, row_programs, rows_total, work_size,
    N_SEL: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr, ITEM_ENTRIES: tl.constexpr,
):
    """Puts the entries of QUERIES queries in their places; also lists the work items of its share of the kv blocks."""
    WORDS: tl.constexpr = SPAN // 32
    bg = (tl.program_id(0) // row_programs).to(tl.int64)
    part = tl.program_id(0) % row_programs
    b = bg // G
    g = bg % G
    offsets = tl.arange(0, ENTRIES)
    local = part * QUERIES + offsets // N_SEL
    t = first_span * SPAN + local
    inside = (t < T) & (local < pass_spans * SPAN) & (offsets < QUERIES * N_SEL)
    slots = blocks_ptr + ((b * T + t) * G + g) * N_SEL + offsets % N_SEL
    block, live = load_selection(slots, inside, first_query, t, BLOCK)
    word = (bg * pass_spans * WORDS + local // 32) * n_blocks + block
    bits = tl.load(bitmap_ptr + word, mask=live, other=0)
    earlier = (tl.full([ENTRIES], 1, tl.int32) << (local % 32)) - 1
    rank = tl.load(below_ptr + word, mask=live, other=0) + _population_count(bits & earlier)
    cell = (bg * n_blocks + block) * n_spans + t // SPAN
    base = tl.load(ends_ptr + cell - 1, mask=live & (cell > 0), other=0)
    tl.store(entries_ptr + base + rank, t * N_SEL + offsets % N_SEL, mask=live)

    if first_span == 0:
        for j in range(part, n_blocks, row_programs):
            index_row = bg * n_blocks + j
            start = tl.load(ends_ptr + index_row * n_spans - 1, mask=index_row > 0, other=0)
            stop = tl.load(ends_ptr + (index_row + 1) * n_spans - 1)
            tl.store(starts_ptr + index_row, start)
            if index_row == rows_total - 1:
                tl.store(starts_ptr + index_row + 1, stop)
            # The number of the row's first item. It needs no scan over the rows before and leaves room for all of their
            # items; numbers that stay unused, up to the next row's first, are marked empty.
            number = start // ITEM_ENTRIES + index_row
            items = tl.maximum(tl.cdiv(stop - start, ITEM_ENTRIES), 1)
            room = tl.where(index_row == rows_total - 1, work_size, stop // ITEM_ENTRIES + index_row + 1) - number
            for i in range(0, room, ENTRIES):
                owner = tl.where(i + offsets < items, index_row.to(tl.int32), -1)
                tl.store(work_ptr + number + i + offsets, owner, mask=i + offsets < room)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_index_first_query(
    entries_ptr, starts_ptr, work_ptr, keys_ptr,
    n_items, T, n_blocks,
    N_SEL: tl.constexpr, ITEM_ENTRIES: tl.constexpr, ITEMS: tl.constexpr,
):
    """(batch, group) * T + first query of every work item, to sort by; the largest number for those without entries."""
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
    """Elements of the parts of an index."""

    entries: int
    starts: int
    work: int
    order: int


def compute_index_sizes(rows: int, T: int, n_blocks: int, n_sel: int, item_entries: int, *, sort_items: bool) -> IndexSizes:
    """Enough for any choice of blocks of `rows` (batch, group) pairs: from shapes alone, so that no size is read back.

    Multiples of 4, 16 bytes at least, so that several indices in one tensor are aligned like each on its own.
    """
    entries = rows * T * n_sel + 1  # one more than there can be: kernels may load from where an empty last block starts
    work = rows * T * n_sel // item_entries + rows * n_blocks + 1
    return IndexSizes(*(ceil_div(n, 4) * 4 for n in (entries, rows * n_blocks + 1, work, work if sort_items else 0)))


def globalize_blocks(blocks: Tensor, block_tokens: int, bounds: PackedBounds) -> Tensor:
    """A choice [1, T, G, n_sel] in numbers of blocks in the row of all documents, which `bounds` says; -1 where not live.

    Block j of a document that begins at row r is number r // block_tokens + document + j.
    """
    numbers = torch.empty_like(blocks)
    slots, entries = blocks.shape[2] * blocks.shape[3], launch_table.SCATTER_ENTRIES
    # fmt: off
    nsa_selected_globalize_blocks[(bounds.count_tiles(blocks.numel(), entries),)](
        blocks, numbers, bounds.q,
        bounds.n_documents,
        SLOTS=slots, BLOCK=block_tokens, ENTRIES=entries, num_warps=launch_table.STREAMING_WARPS,
    )
    # fmt: on
    return numbers


def build_inverted_index(
    blocks: Tensor,
    block_tokens: int,
    item_entries: int,
    n_blocks: int,
    first_query: int = 0,
    *,
    sort_items: bool = False,
    bounds: PackedBounds = NOT_PACKED,
) -> InvertedIndex:
    """Sorts a block choice by block.

    Args:
        blocks: int32 [B, T, G, n_sel] contiguous, ascending and distinct along n_sel, padded with −1. Blocks that start
            after their query are left out.
        block_tokens: tokens of a block.
        item_entries: the most entries of one work item.
        n_blocks: kv blocks there are.
        first_query: position in the sequence of query 0, when `blocks` is a part of the choice.
        ordered: whether to work out `order`.
        bounds: of documents, whose blocks `number_blocks` has numbered; T is then the row's queries, or a part of them.
    """
    B, T, G, n_sel = blocks.shape
    rows = B * G
    n_spans = ceil_div(T, QUERIES_PER_SEGMENT)
    words = QUERIES_PER_SEGMENT // 32
    pass_spans = max(1, min(n_spans, BITMAP_BYTES_LIMIT // (rows * words * n_blocks * 8)))
    passes = range(0, n_spans, pass_spans)
    bitmap = blocks.new_empty(rows * pass_spans * words * n_blocks)
    below = torch.empty_like(bitmap)
    # A span of queries counts in the blocks of its own documents.
    counts = (blocks.new_empty if bounds.q is None else blocks.new_zeros)(rows * n_blocks * n_spans)
    sizes = compute_index_sizes(rows, T, n_blocks, n_sel, item_entries, sort_items=sort_items)
    entries = blocks.new_empty(sizes.entries)
    starts = blocks.new_empty(sizes.starts, dtype=torch.int64)
    work = blocks.new_empty(sizes.work)
    queries = ceil_div(launch_table.SCATTER_ENTRIES, n_sel)
    row_programs = ceil_div(pass_spans * QUERIES_PER_SEGMENT, queries)

    # fmt: off
    def count(first_span: int) -> None:
        nsa_selected_index_count[(rows * pass_spans,)](
            blocks, bitmap, below, counts, bounds.q,
            T, G, first_query, n_blocks, n_spans, first_span, pass_spans, bounds.n_documents,
            N_SEL=n_sel, BLOCK=block_tokens, SPAN=QUERIES_PER_SEGMENT,
            ENTRIES=launch_table.COUNT_ENTRIES, COLUMNS=launch_table.COUNT_COLUMNS, num_warps=launch_table.COUNT_WARPS,
        )

    for first_span in passes:
        count(first_span)
    ends = torch.cumsum(counts, 0)
    for first_span in passes:
        if len(passes) > 1:
            count(first_span)
        nsa_selected_index_scatter[(rows * row_programs,)](
            blocks, bitmap, below, ends, entries, starts, work,
            T, G, first_query, n_blocks, n_spans, first_span, pass_spans, row_programs, rows * n_blocks, work.numel(),
            N_SEL=n_sel, BLOCK=block_tokens if bounds.q is None else 0, SPAN=QUERIES_PER_SEGMENT, QUERIES=queries,
            ENTRIES=padded_width(queries * n_sel), ITEM_ENTRIES=item_entries, num_warps=launch_table.STREAMING_WARPS,
        )
    # fmt: on
    order = _sort_items_by_query(entries, starts, work, rows * T, T, n_blocks, n_sel, item_entries) if sort_items else None
    return InvertedIndex(entries, starts, work, order)


def _sort_items_by_query(
    entries: Tensor, starts: Tensor, work: Tensor, queries: int, T: int, n_blocks: int, n_sel: int, item_entries: int
) -> Tensor:
    """Item numbers by their first query, of `queries` in all groups of all sequences."""
    n_items, tile = work.numel(), launch_table.FIRST_QUERY_ITEMS
    # Numbers of 32 bits are sorted in half the time.
    keys = work.new_empty(n_items, dtype=torch.int32 if queries < 2**31 else torch.int64)
    # fmt: off
    nsa_selected_index_first_query[(ceil_div(n_items, tile),)](
        entries, starts, work, keys,
        n_items, T, n_blocks,
        N_SEL=n_sel, ITEM_ENTRIES=item_entries, ITEMS=tile, num_warps=launch_table.STREAMING_WARPS,
    )
    # fmt: on
    return torch.argsort(keys, stable=True)
