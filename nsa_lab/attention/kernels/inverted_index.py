"""The inverted index of a block choice: for every kv block, the queries that chose it, in order.

`blocks` says which kv blocks a query reads; kernels that keep a kv block resident and stream its queries need the
transpose. It is a counting sort that never leaves the device: nothing is read back, no size depends on the data, and
integer atomics are the only ones used, so the same choice always gives the same index, bit for bit.

Words used here and by the kernels that read the index:
* an *entry* is one (query, slot) pair written `t * n_sel + slot`: the query is `entry // n_sel`, and the entry itself
  numbers the row of a per-(query, slot) workspace;
* an entry is *live* when its block exists and starts at or before the query (`0 <= block * size <= t`);
* a *work item* is at most `chunk` consecutive entries of one kv block: what one program of a kernel takes on. Blocks
  that everybody chose (block 0) thus become many items, and blocks that nobody chose still get one. Items are numbered
  by block; in that order the programs that run together read queries of the whole sequence. Where those do not stay in
  the L2 cache, `order` says in which order to take the items: by their first query.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_lab.attention.kernels.common import ceil_div, padded_width

QUERIES_PER_SPAN = 256  # a span's bitmap has one bit a query and block; spans are counted independently
BITMAP_BYTES_LIMIT = 256 * 2**20  # the bitmap is quadratic in T (T^2 / 256 bytes a group): long inputs take several passes


class InvertedIndex(NamedTuple):
    """Where each kv block's queries are.

    Lengths are those of `index_sizes`; what is past the end of entries and starts is not written.

    entries: int32, live entries by (batch, group, block) and then by query.
    starts: int64, first entry of each (batch, group, block), and the end of the last.
    work: int32, the (batch, group, block) row an item belongs to, −1 where there is no such item. Item number
        `i` of row `r` holds entries from `starts[r] + chunk * (i - (starts[r] // chunk + r))` on.
    order: int64, item numbers by (batch, group) and first query, those without entries last; None for 0, 1, 2, ...
    """

    entries: torch.Tensor
    starts: torch.Tensor
    work: torch.Tensor
    order: torch.Tensor | None


@triton.jit
def _population_count(word):
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


@triton.jit
def _count_kernel(
    blocks, bitmap, below, counts, T, G, first_query, n_blocks, n_spans, first_span, pass_spans,
    N_SEL: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One span of queries: which query chose which block (bits), and how many of the span's earlier words did."""
    WORDS: tl.constexpr = SPAN // 32
    row = (tl.program_id(0) // pass_spans).to(tl.int64)
    local_span = tl.program_id(0) % pass_spans
    span = first_span + local_span
    if span >= n_spans:
        return
    batch = row // G
    group = row % G
    region = (row * pass_spans + local_span) * WORDS * n_blocks
    offsets = tl.arange(0, TILE)
    for i in range(0, WORDS * n_blocks, TILE):
        tl.store(bitmap + region + i + offsets, 0, mask=i + offsets < WORDS * n_blocks)
    tl.debug_barrier()
    for i in range(0, SPAN * N_SEL, TILE):
        local = (i + offsets) // N_SEL
        t = span * SPAN + local
        inside = (t < T) & (i + offsets < SPAN * N_SEL)
        block = tl.load(blocks + ((batch * T + t) * G + group) * N_SEL + (i + offsets) % N_SEL, mask=inside, other=-1)
        live = (block >= 0) & (block.to(tl.int64) * SIZE <= first_query + t)
        bit = tl.full([TILE], 1, tl.int32) << (local % 32)
        tl.atomic_or(bitmap + region + (local // 32).to(tl.int64) * n_blocks + block, bit, mask=live, sem="relaxed")
    tl.debug_barrier()
    words = tl.arange(0, WORDS)[:, None]
    for j in range(0, n_blocks, COLUMNS):
        column = j + tl.arange(0, COLUMNS)
        inside = (words >= 0) & (column < n_blocks)[None, :]
        at = region + words.to(tl.int64) * n_blocks + column[None, :]
        # Past L1: the bits were set by atomics, which live in L2.
        ones = _population_count(tl.load(bitmap + at, mask=inside, other=0, cache_modifier=".cg"))
        tl.store(below + at, tl.cumsum(ones, 0) - ones, mask=inside)
        tl.store(counts + (row * n_blocks + column) * n_spans + span, tl.sum(ones, 0), mask=column < n_blocks)


@triton.jit
def _scatter_kernel(
    blocks, bitmap, below, ends, entries, starts, work, T, G, first_query, n_blocks, n_spans, first_span, pass_spans,
    row_programs, rows_total, work_size,
    N_SEL: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Puts the entries of QUERIES queries in their places; also lists the work items of its share of the kv blocks."""
    WORDS: tl.constexpr = SPAN // 32
    row = (tl.program_id(0) // row_programs).to(tl.int64)
    part = tl.program_id(0) % row_programs
    batch = row // G
    group = row % G
    offsets = tl.arange(0, TILE)
    local = part * QUERIES + offsets // N_SEL
    t = first_span * SPAN + local
    inside = (t < T) & (local < pass_spans * SPAN) & (offsets < QUERIES * N_SEL)
    block = tl.load(blocks + ((batch * T + t) * G + group) * N_SEL + offsets % N_SEL, mask=inside, other=-1)
    live = (block >= 0) & (block.to(tl.int64) * SIZE <= first_query + t)
    word = (row * pass_spans * WORDS + local // 32) * n_blocks + block
    bits = tl.load(bitmap + word, mask=live, other=0)
    earlier = (tl.full([TILE], 1, tl.int32) << (local % 32)) - 1
    rank = tl.load(below + word, mask=live, other=0) + _population_count(bits & earlier)
    cell = (row * n_blocks + block) * n_spans + t // SPAN
    base = tl.load(ends + cell - 1, mask=live & (cell > 0), other=0)
    tl.store(entries + base + rank, t * N_SEL + offsets % N_SEL, mask=live)

    if first_span == 0:
        for j in range(part, n_blocks, row_programs):
            here = row * n_blocks + j
            start = tl.load(ends + here * n_spans - 1, mask=here > 0, other=0)
            stop = tl.load(ends + (here + 1) * n_spans - 1)
            tl.store(starts + here, start)
            if here == rows_total - 1:
                tl.store(starts + here + 1, stop)
            # start // CHUNK + here needs no scan over the rows before and leaves room for all of their items; what it
            # leaves over, up to the next row's first, is marked empty.
            number = start // CHUNK + here
            items = tl.maximum(tl.cdiv(stop - start, CHUNK), 1)
            room = tl.where(here == rows_total - 1, work_size, stop // CHUNK + here + 1) - number
            for i in range(0, room, TILE):
                owner = tl.where(i + offsets < items, here.to(tl.int32), -1)
                tl.store(work + number + i + offsets, owner, mask=i + offsets < room)


@triton.jit
def _first_query_kernel(
    entries, starts, work, keys, items, T, n_blocks, N_SEL: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """(batch, group) * T + first query of every work item; the largest number for those without entries."""
    item = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(work + item, mask=item < items, other=-1)
    start = tl.load(starts + row, mask=row >= 0, other=0)
    stop = tl.load(starts + row + 1, mask=row >= 0, other=0)
    first = start + (item - (start // CHUNK + row)) * CHUNK
    query = tl.load(entries + first, mask=first < stop, other=0) // N_SEL
    last = 2**31 - 1 if keys.dtype.element_ty == tl.int32 else 2**62
    key = tl.where(first < stop, (row // n_blocks).to(tl.int64) * T + query, last)
    tl.store(keys + item, key.to(keys.dtype.element_ty), mask=item < items)


class IndexSizes(NamedTuple):
    """Elements of the parts of an index."""

    entries: int
    starts: int
    work: int
    order: int


def index_sizes(rows: int, T: int, n_blocks: int, n_sel: int, chunk: int, *, ordered: bool) -> IndexSizes:
    """Enough for any choice of blocks of `rows` (batch, group) pairs: from shapes alone, so that no size is read back.

    Multiples of 4, 16 bytes at least, so that several indices in one tensor are aligned like each on its own.
    """
    entries = rows * T * n_sel + 1  # one more than there can be: the start of an empty last block can be loaded from
    work = rows * T * n_sel // chunk + rows * n_blocks + 1
    return IndexSizes(*(ceil_div(n, 4) * 4 for n in (entries, rows * n_blocks + 1, work, work if ordered else 0)))


def build_inverted_index(
    blocks: torch.Tensor, size: int, chunk: int, n_blocks: int, first_query: int = 0, *, ordered: bool = False
) -> InvertedIndex:
    """Sorts a block choice by block.

    Args:
        blocks: int32 [B, T, G, n_sel] contiguous, ascending and distinct along n_sel, padded with −1. Blocks that start
            after their query are left out.
        size: tokens a block.
        chunk: the most entries of one work item.
        n_blocks: kv blocks there are.
        first_query: position in the sequence of query 0, when `blocks` is a part of the choice.
        ordered: whether to work out `order`.
    """
    B, T, G, n_sel = blocks.shape
    rows = B * G
    n_spans = ceil_div(T, QUERIES_PER_SPAN)
    words = QUERIES_PER_SPAN // 32
    pass_spans = max(1, min(n_spans, BITMAP_BYTES_LIMIT // (rows * words * n_blocks * 8)))
    device = blocks.device
    bitmap = torch.empty(rows * pass_spans * words * n_blocks, dtype=torch.int32, device=device)
    below = torch.empty_like(bitmap)
    counts = torch.empty(rows * n_blocks * n_spans, dtype=torch.int32, device=device)
    sizes = index_sizes(rows, T, n_blocks, n_sel, chunk, ordered=ordered)
    entries = torch.empty(sizes.entries, dtype=torch.int32, device=device)
    starts = torch.empty(sizes.starts, dtype=torch.int64, device=device)
    work = torch.empty(sizes.work, dtype=torch.int32, device=device)
    queries = ceil_div(1024, n_sel)
    row_programs = ceil_div(pass_spans * QUERIES_PER_SPAN, queries)
    passes = range(0, n_spans, pass_spans)

    def count(first_span: int) -> None:
        _count_kernel[(rows * pass_spans,)](
            blocks, bitmap, below, counts, T, G, first_query, n_blocks, n_spans, first_span, pass_spans,
            N_SEL=n_sel, SIZE=size, SPAN=QUERIES_PER_SPAN, TILE=4096, COLUMNS=64, num_warps=8,
        )  # fmt: skip

    for first_span in passes:
        count(first_span)
    ends = torch.cumsum(counts, 0)
    for first_span in passes:
        if len(passes) > 1:
            count(first_span)
        _scatter_kernel[(rows * row_programs,)](
            blocks, bitmap, below, ends, entries, starts, work,
            T, G, first_query, n_blocks, n_spans, first_span, pass_spans, row_programs, rows * n_blocks, work.numel(),
            N_SEL=n_sel, SIZE=size, SPAN=QUERIES_PER_SPAN, QUERIES=queries,
            TILE=padded_width(queries * n_sel), CHUNK=chunk, num_warps=4,
        )  # fmt: skip
    order = None
    if ordered:
        # The sort takes half as long for 32 bits.
        keys = torch.empty(sizes.work, dtype=torch.int32 if rows * T < 2**31 else torch.int64, device=device)
        _first_query_kernel[(ceil_div(sizes.work, 256),)](
            entries, starts, work, keys, sizes.work, T, n_blocks, N_SEL=n_sel, CHUNK=chunk, TILE=256, num_warps=4
        )
        order = torch.argsort(keys, stable=True)
    return InvertedIndex(entries, starts, work, order)
