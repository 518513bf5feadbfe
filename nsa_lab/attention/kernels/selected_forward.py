"""Selected attention, forward: two orders of the same sum.

*Gather* keeps a kv block resident and streams the queries that chose it (the inverted index), h head rows each, so that
tensor-core tiles are full whatever h is and whatever was chosen. Each (query, block) pair leaves a normalised partial
output and its LSE; a second kernel merges a query's partials. Work is that of the chosen pairs alone; the price is the
traffic of the partials.

*Union* keeps a tile of consecutive queries resident and walks the blocks that any of them chose, silencing a row where its
query did not. No workspace, but every row pays for the tile's union: right when T is a few times n_sel * l_sel.

Inside the kernels scores are in units of log2, so that exp2 needs no rescaling of its argument.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

PIECE_SIZES = ("G", "all_groups", "first_query")  # differ from piece to piece; compiling for each value would gain nothing


@triton.jit
def _load_tile(base, row_offsets, columns, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows at `row_offsets` from `base`, zero outside and past WIDTH."""
    pointers = base + row_offsets[:, None] + columns[None, :]
    if WIDTH == PADDED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    return tl.load(pointers, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _load_rows(base, offsets, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """As `_load_tile`, for rows that all exist."""
    pointers = base + offsets[:, None] + columns[None, :]
    if WIDTH == PADDED:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _row_numbers(first_row, last_row, ROWS: tl.constexpr):
    """ROWS rows of a work item, a row being one head of one entry; past the end, the last row again.

    Repeating a row costs no masks, reads nothing that this item does not own, and stores the same bits twice.
    Unsigned, because a signed division by a constant takes twice the instructions.
    """
    return tl.maximum(tl.minimum(first_row + tl.arange(0, ROWS), last_row - 1), 0).to(tl.uint32)


@triton.jit
def _pair_numbers(entry, first_row, last_row, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """(entry * HEADS + head, head) of ROWS rows: a pair number is a row of the per-pair workspaces."""
    head = _row_numbers(first_row, last_row, ROWS) % HEADS
    if WIDE:
        pair = entry.to(tl.int64) * HEADS + head
    else:
        pair = entry.to(tl.uint32) * HEADS + head
    return pair, head


@triton.jit
def _load_keys(
    base, offsets, columns, inside, MASKED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    if MASKED:
        return _load_tile(base, offsets, columns, inside, WIDTH, PADDED)
    return _load_rows(base, offsets, columns, WIDTH, PADDED)


@triton.jit
def _row_offsets(t, head, stride_t, stride_h, WIDE: tl.constexpr):
    """Element offsets of (query, head) rows; 32 bits unless the tensor needs more, for half of the instructions."""
    if WIDE:
        offsets = t.to(tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h
    else:
        offsets = t.to(tl.int32) * stride_t + tl.cast(head, tl.int32) * stride_h
    return offsets


@triton.jit
def _gather_rows(
    q, entries, part_out, part_lse, k_tile, v_tile, key, keys_inside, first_row, last_row,
    first_query, q_stride_t, q_stride_h, scale_log2,
    DIAGONAL: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr, ALL_KEYS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of the rows [first_row, last_row) of one work item to its kv block."""
    columns_k = tl.arange(0, DK_PAD)
    columns_v = tl.arange(0, DV_PAD)
    # Entries are loaded a tile ahead, since what q is loaded from must not itself be waited for. All else is worked out
    # from the pair number, and the next load comes last, so that it can take the register of the entry before it.
    entry = tl.load(entries + _row_numbers(first_row, last_row, ROWS) // HEADS)
    for start in range(first_row, last_row, ROWS):
        pair, head = _pair_numbers(entry, start, last_row, HEADS, ROWS, WIDE)
        t = pair // (N_SEL * HEADS)
        q_tile = _load_rows(q, _row_offsets(t, head, q_stride_t, q_stride_h, WIDE), columns_k, DK, DK_PAD)
        entry = tl.load(entries + _row_numbers(start + ROWS, last_row, ROWS) // HEADS)
        # Never so, and no machine code. A tile that only products read gets one buffer more from Triton than the stages
        # between its copy and its use, as the last products might still run when the next copy comes; here the stores wait
        # for them all. A second reader takes that buffer away: three stages in the shared memory of two, which would have
        # begun each copy just before its use.
        if DK_PAD > 64 and start >= last_row:
            spare = part_out + tl.arange(0, ROWS)[:, None] * DK + columns_k[None, :]
            tl.store(spare, q_tile.to(part_out.dtype.element_ty))
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if DIAGONAL:
            scores = tl.where(key[None, :] <= (first_query + t.to(tl.int32))[:, None], scores, float("-inf"))
        if not ALL_KEYS:
            scores = tl.where(keys_inside[None, :], scores, float("-inf"))
        peak = tl.max(scores, 1) * scale_log2
        p = tl.exp2(scores * scale_log2 - peak[:, None])
        total = tl.sum(p, 1)
        out = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION) * (1 / total)[:, None]
        tl.store(part_lse + pair, peak + tl.log2(total))
        pointers = part_out + (pair * DV)[:, None] + columns_v[None, :]
        # The first to leave the L2 cache, where q is wanted again.
        out = out.to(part_out.dtype.element_ty)
        if DV == DV_PAD:
            tl.store(pointers, out, eviction_policy="evict_first")
        else:
            tl.store(pointers, out, mask=(columns_v < DV)[None, :], eviction_policy="evict_first")


@triton.jit(do_not_specialize=PIECE_SIZES)
def _gather_kernel(
    q, k, v, entries, starts, work, order, part_out, part_lse, T, keys, G, n_blocks, first_query,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_g, v_stride_b, v_stride_t, v_stride_g,
    scale_log2, WIDE: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, N_SEL: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial outputs and LSEs of one work item."""
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
    if rows <= 0:
        return
    batch = (index_row // n_blocks // G).to(tl.int64)
    group = index_row // n_blocks % G
    key = index_row % n_blocks * SIZE + tl.arange(0, SIZE_PAD)
    keys_inside = tl.arange(0, SIZE_PAD) < SIZE
    loaded = keys_inside & (key < keys)
    k_tile = _load_tile(
        k + batch * k_stride_b + group * k_stride_g, key.to(tl.int64) * k_stride_t, tl.arange(0, DK_PAD), loaded, DK, DK_PAD
    )
    v_tile = _load_tile(
        v + batch * v_stride_b + group * v_stride_g, key.to(tl.int64) * v_stride_t, tl.arange(0, DV_PAD), loaded, DV, DV_PAD
    )
    q_base = q + batch * q_stride_b + group.to(tl.int64) * HEADS * q_stride_h
    pair_base = (index_row // n_blocks).to(tl.int64) * T * (N_SEL * HEADS)
    # Entries are in query order, so only a block's own SIZE queries, its first, can lie inside it and need the causal mask.
    diagonal = 0
    if chunk * CHUNK < SIZE:
        diagonal = tl.minimum(tl.cdiv((SIZE - chunk * CHUNK).to(tl.int32) * HEADS, ROWS) * ROWS, rows)
        _gather_rows(
            q_base, entries + first_entry, part_out + pair_base * DV, part_lse + pair_base, k_tile, v_tile, key,
            keys_inside, 0, diagonal, first_query, q_stride_t, q_stride_h, scale_log2,
            True, HEADS, N_SEL, DK, DV, DK_PAD, DV_PAD, ROWS, SIZE == SIZE_PAD, WIDE, PRECISION,
        )  # fmt: skip
    _gather_rows(
        q_base, entries + first_entry, part_out + pair_base * DV, part_lse + pair_base, k_tile, v_tile, key,
        keys_inside, diagonal, rows, first_query, q_stride_t, q_stride_h, scale_log2,
        False, HEADS, N_SEL, DK, DV, DK_PAD, DV_PAD, ROWS, SIZE == SIZE_PAD, WIDE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=PIECE_SIZES)
def _merge_kernel(
    part_out, part_lse, blocks, out, lse, T, G, first_query, out_stride_b, out_stride_t, lse_stride_b, lse_stride_t,
    tiles, HEADS: tl.constexpr, N_SEL: tl.constexpr, SIZE: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted mean of each row's partials; rows are the (query, head) pairs of one (batch, group)."""
    index_row = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    t = row // HEADS
    head = row % HEADS
    batch = index_row // G
    group = index_row % G
    inside = t < T
    choice = blocks + ((batch * T + t) * G + group) * N_SEL
    pair = (index_row * T + t) * N_SEL * HEADS + head
    columns = tl.arange(0, DV_PAD)
    peak = tl.full([ROWS], -1e30, tl.float32)
    for slot in tl.static_range(N_SEL):
        block = tl.load(choice + slot, mask=inside, other=-1)
        live = (block >= 0) & (block.to(tl.int64) * SIZE <= first_query + t)
        peak = tl.maximum(peak, tl.load(part_lse + pair + slot * HEADS, mask=live, other=float("-inf")))
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(N_SEL):
        block = tl.load(choice + slot, mask=inside, other=-1)
        live = (block >= 0) & (block.to(tl.int64) * SIZE <= first_query + t)
        weight = tl.exp2(tl.load(part_lse + pair + slot * HEADS, mask=live, other=float("-inf")) - peak)
        total += weight
        acc += weight[:, None] * _load_tile(part_out, (pair + slot * HEADS) * DV, columns, live, DV, DV_PAD)
    _store_rows(out, lse, acc, peak, total, batch, t, group * HEADS + head, inside, columns,
                out_stride_b, out_stride_t, lse_stride_b, lse_stride_t, DV, DV_PAD)  # fmt: skip


@triton.jit
def _store_rows(
    out, lse, acc, peak, total, batch, t, head, inside, columns, out_stride_b, out_stride_t, lse_stride_b, lse_stride_t,
    DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Normalises and stores; a row that met no key gets output 0 and LSE −inf."""
    safe = tl.where(total > 0, total, 1.0)
    at = batch * out_stride_b + t.to(tl.int64) * out_stride_t + head * DV
    mask = inside[:, None]
    if DV != DV_PAD:
        mask = mask & (columns < DV)[None, :]
    tl.store(out + at[:, None] + columns[None, :], (acc * (1 / safe)[:, None]).to(out.dtype.element_ty), mask=mask)
    natural = tl.where(total > 0, (peak + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + batch * lse_stride_b + t.to(tl.int64) * lse_stride_t + head, natural, mask=inside)


@triton.jit
def _union_blocks(
    k, v, union, q_tile, low, high, position, key_offset, acc, peak, total, first, last, keys, scale_log2,
    k_stride_t, v_stride_t, DIAGONAL: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks union[first:last]."""
    MASKED: tl.constexpr = DIAGONAL or SIZE != SIZE_PAD
    columns_k = tl.arange(0, DK_PAD)
    columns_v = tl.arange(0, DV_PAD)
    next_block = tl.load(union + first, mask=first < last, other=0)
    for i in range(first, last):
        # One step ahead: what K is loaded from must not itself be waited for.
        block = next_block
        next_block = tl.load(union + i + 1, mask=i + 1 < last, other=0)
        key = block * SIZE + key_offset
        inside = (key_offset < SIZE) & (key < keys)
        k_tile = _load_keys(k, _row_offsets(key, 0, k_stride_t, 0, WIDE), columns_k, inside, MASKED, DK, DK_PAD)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if DIAGONAL:
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        if SIZE != SIZE_PAD:
            scores = tl.where((key_offset < SIZE)[None, :], scores, float("-inf"))
        word = low
        if WORDS == 2:
            word = tl.where(block < BITS, low, high)
        chosen = ((word >> (block % BITS)) & 1) != 0
        new_peak = tl.maximum(peak, tl.where(chosen, tl.max(scores, 1) * scale_log2, float("-inf")))
        # An infinite shift turns every p of a row that did not choose this block to 0, at no cost a score.
        p = tl.exp2(scores * scale_log2 - tl.where(chosen, new_peak, float("inf"))[:, None])
        alpha = tl.exp2(peak - new_peak)
        total = total * alpha + tl.sum(p, 1)
        v_tile = _load_keys(v, _row_offsets(key, 0, v_stride_t, 0, WIDE), columns_v, inside, MASKED, DV, DV_PAD)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _union_kernel(
    q, k, v, blocks, unions, out, lse, T, G, n_blocks,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_g, v_stride_b, v_stride_t, v_stride_g,
    out_stride_b, out_stride_t, lse_stride_b, lse_stride_t, scale_log2, tiles,
    HEADS: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
    QUERIES_PAD: tl.constexpr, BINS: tl.constexpr, WORDS: tl.constexpr,
    BITS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS consecutive (query, head) rows of one (batch, group) against the union of their blocks."""
    # Late tiles see the most blocks: they go first, so that none of them is left for the end.
    tile = tiles - 1 - tl.program_id(0) % tiles
    index_row = (tl.program_id(0) // tiles).to(tl.int64)
    batch = index_row // G
    group = index_row % G
    row = tile * ROWS + tl.arange(0, ROWS)
    t = row // HEADS
    head = group * HEADS + row % HEADS
    inside = t < T
    choice = blocks + (batch * T * G + group) * N_SEL
    slots = tl.arange(0, N_SEL_PAD)

    first_t = tile * ROWS // HEADS
    last_t = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, T - 1)
    queries = first_t + tl.arange(0, QUERIES_PAD)
    here = (queries <= last_t)[:, None] & (slots < N_SEL)[None, :]
    chosen = tl.load(choice + queries.to(tl.int64)[:, None] * G * N_SEL + slots[None, :], mask=here, other=-1)
    # Dead entries fall into the last bin, which is no block's.
    live = (chosen >= 0) & (chosen.to(tl.int64) * SIZE <= queries[:, None])
    used = tl.histogram(tl.reshape(tl.where(live, chosen, BINS - 1), [QUERIES_PAD * N_SEL_PAD]), BINS) > 0
    bins = tl.arange(0, BINS)
    used = used & (bins < n_blocks)
    place = tl.cumsum(used.to(tl.int32), 0) - 1
    union = unions + (index_row * tiles + tile) * n_blocks
    tl.store(union + place, bins, mask=used)
    count = tl.sum(used.to(tl.int32), 0)
    before_diagonal = tl.sum((used & ((bins + 1) * SIZE <= first_t + 1)).to(tl.int32), 0)
    tl.debug_barrier()

    mine = tl.load(
        choice + t.to(tl.int64)[:, None] * G * N_SEL + slots[None, :],
        mask=inside[:, None] & (slots < N_SEL)[None, :], other=-1,
    )  # fmt: skip
    one = tl.full([ROWS, N_SEL_PAD], 1, tl.int32 if BITS == 32 else tl.int64)
    mine = tl.where(mine.to(tl.int64) * SIZE <= t[:, None], mine, -1)
    low = tl.sum(tl.where((mine >= 0) & (mine < BITS), one << (mine % BITS), 0), 1)
    high = low
    if WORDS == 2:
        high = tl.sum(tl.where(mine >= BITS, one << (mine % BITS), 0), 1)

    q_tile = _load_tile(
        q + batch * q_stride_b, t.to(tl.int64) * q_stride_t + head * q_stride_h, tl.arange(0, DK_PAD), inside, DK, DK_PAD
    )
    k_base = k + batch * k_stride_b + group * k_stride_g
    v_base = v + batch * v_stride_b + group * v_stride_g
    key_offset = tl.arange(0, SIZE_PAD)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, peak, total = _union_blocks(
        k_base, v_base, union, q_tile, low, high, t, key_offset, acc, peak, total, 0, before_diagonal, T, scale_log2,
        k_stride_t, v_stride_t, False, SIZE, SIZE_PAD, DK, DV, DK_PAD, DV_PAD, WORDS, BITS, WIDE, PRECISION,
    )  # fmt: skip
    acc, peak, total = _union_blocks(
        k_base, v_base, union, q_tile, low, high, t, key_offset, acc, peak, total, before_diagonal, count, T, scale_log2,
        k_stride_t, v_stride_t, True, SIZE, SIZE_PAD, DK, DV, DK_PAD, DV_PAD, WORDS, BITS, WIDE, PRECISION,
    )  # fmt: skip
    _store_rows(out, lse, acc, peak, total, batch, t, head, inside, tl.arange(0, DV_PAD),
                out_stride_b, out_stride_t, lse_stride_b, lse_stride_t, DV, DV_PAD)  # fmt: skip
