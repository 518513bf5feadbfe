"""From the scores of compressed keys to the blocks that a query reads (eq. 8 to 11). launch.py launches these kernels.

The scores of all heads were kept by whoever read the keys, since a share needs the sum over them all. The importance of a
block is then a sum of the few neighbouring shares that reach into it: nothing as large as keys times blocks exists. An
indexer's keys are read here. Either way every block that competes has a score, and the best of them are chosen.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# An outer `if` of two is decided when a kernel is compiled: of what is not there nothing can be.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.block_topk import (
    MIN_SCORE,
    NO_BLOCK,
    add_forced_blocks,
    compute_block_logsumexp,
    to_ordered_bits,
)
from nsa_lab.attention.kernels.decoding.kv_tiles import load_queries, load_sums
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.tiles import get_batch_and_group

EMPTY_KEY = tl.constexpr(-(2**31))
"""The key of no block; before that of every score."""


# fmt: off
@triton.jit
def needs_scores(position, L_SEL: tl.constexpr, N_SEL: tl.constexpr):
    """Whether more blocks compete, 1 .. own-2, than there are places for: only then do scores matter."""
    return position // L_SEL - 2 > N_SEL - 3


@triton.jit
def sum_probabilities(scores_ptr, i, inside, peak, inverse):
    """What all heads give to the keys i: 0 where none is `inside`."""
    scores = tl.load(scores_ptr + i[None, :], mask=inside, other=float("-inf"))
    return tl.sum(tl.exp2(scores - peak[:, None]) * inverse[:, None], 0)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_importance(
    scores_ptr, part_sums_ptr, lengths_ptr, importance_ptr,
    T, N, G, n_blocks, row_parts,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr,
    N_SEL: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BLOCKS: tl.constexpr, STRIDES_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What one query gives to BLOCKS selection blocks, summed over a group's heads: float32 [B, T, G, n_blocks] (eq. 9).

    A row has `row_parts` parts, of which the first PARTS are those of the compressed keys.
    """
    STRIDES: tl.constexpr = L_SEL // STRIDE
    REACH: tl.constexpr = L // STRIDE
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    pdl_wait(EARLY)
    first = tl.program_id(1) * BLOCKS
    if (first > position // L_SEL - 2) | (not needs_scores(position, L_SEL, N_SEL)):
        return
    head = tl.arange(0, HEADS_PAD)
    part = tl.arange(0, PARTS_PAD)
    place = (row * HEADS + head)[:, None] * row_parts + part[None, :]
    part_peak, part_total = load_sums(part_sums_ptr, place, (head < HEADS)[:, None] & (part < PARTS)[None, :])
    peak = tl.max(part_peak, 1)
    total = tl.sum(part_total * tl.exp2(part_peak - peak[:, None]), 1)
    # A head that is not there has no total, and no shares.
    inverse = 1.0 / tl.where(head < HEADS, total, 1.0)
    stop = tl.minimum(count_visible_keys(position, L, STRIDE), N)
    j = first + tl.arange(0, BLOCKS)
    scores_ptr += (row * HEADS + head)[:, None] * N
    importance = tl.zeros([BLOCKS], tl.float32)
    # Keys that begin before a block and reach into it.
    for near in tl.static_range(1 - REACH, 0):
        i = j * STRIDES + near
        inside = (head < HEADS)[:, None] & ((i >= 0) & (i < stop))[None, :]
        importance += sum_probabilities(scores_ptr, i, inside, peak, inverse) * min(near + REACH, STRIDES)
    # Those that begin in one lie side by side.
    place = tl.arange(0, BLOCKS * STRIDES_PAD)
    near = place % STRIDES_PAD
    i = (first + place // STRIDES_PAD) * STRIDES + near
    inside = (head < HEADS)[:, None] & ((near < STRIDES) & (i < stop))[None, :]
    share = sum_probabilities(scores_ptr, i, inside, peak, inverse) * tl.minimum(STRIDES - near, REACH)
    importance += tl.sum(tl.reshape(share, [BLOCKS, STRIDES_PAD]), 1)
    tl.store(importance_ptr + row * n_blocks + j, importance, mask=j < n_blocks)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_logsumexp(
    q_ptr, k_ptr, lengths_ptr, logs_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, row_tiles, n_blocks, scale_log2,
    STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):
    """What an indexer finds in BLOCKS blocks: the logarithm of the sum of exp(score) over a block's keys, which lie side by
    side; float32 [B, T, G, n_blocks]. One head's shares are of one sum, so that their order is that of these (choice.py).
    """
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    before = tl.load(lengths_ptr + b)
    last = (before + T - 1) // L_SEL - 2
    if (part * BLOCKS > last) | (not needs_scores(before + T - 1, L_SEL, N_SEL)):
        pdl_wait(EARLY)
        return
    q_base = q_ptr + b * stride_qb + g * stride_qh
    q, t, _, inside = load_queries(q_base, stride_qt, stride_qh, tile, T, 1, DK, DK_PAD, ROWS)
    j = part * BLOCKS + tl.arange(0, BLOCKS)
    # Rows that do not exist see what the last one sees: past that, a cache may hold anything.
    position = before + tl.minimum(t, T - 1)
    found = compute_block_logsumexp(
        q, k_ptr + b * stride_kb + g * stride_kg, stride_kn, position, part * BLOCKS, N, scale_log2,
        STRIDE, STRIDE, STRIDES, STRIDES_AT_ONCE, DK, DK_PAD, ROWS, BLOCKS,
    )
    place = ((b * T + t) * G + g)[:, None] * n_blocks + j[None, :]
    pdl_wait(EARLY)
    tl.store(logs_ptr + place, found, mask=inside[:, None] & (j < n_blocks)[None, :])


@triton.jit
def find_topk(keys, j, N_FREE: tl.constexpr, PLACES: tl.constexpr):
    """The N_FREE greatest of `keys` int32 of blocks `j`, in order, and their blocks; EMPTY and ABSENT in what is left of
    PLACES, and where there are no more. Of equal keys the lower index comes first."""
    place = tl.arange(0, PLACES)
    found = tl.full([PLACES], EMPTY_KEY, tl.int32)
    found_j = tl.full([PLACES], NO_BLOCK, tl.int32)
    for taken in range(N_FREE):
        top = tl.max(keys, 0)
        first = tl.min(tl.where(keys == top, j, NO_BLOCK), 0)
        found = tl.where(place == taken, top, found)
        found_j = tl.where((place == taken) & (top != EMPTY_KEY), first, found_j)
        keys = tl.where(j == first, EMPTY_KEY, keys)
    return found, found_j


@triton.jit
def concatenate(a, b):
    return tl.reshape(tl.join(a, b), [a.shape[0] + b.shape[0]])


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_topk_decode(
    scores_ptr, lengths_ptr, blocks_ptr,
    T, G, n_blocks,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):
    """The chosen blocks of one query and group, as `nsa_choice` gives them, by a score of every block; without scores every
    block has a place.

    A round of maxima for each place, one after another.
    """
    N_FREE: tl.constexpr = N_SEL - 3
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    pdl_wait(EARLY)
    own = position // L_SEL
    place = tl.arange(0, N_SEL_PAD)
    chosen = tl.where(place + 1 <= own - 2, place + 1, NO_BLOCK)
    if scores_ptr is not None:
        if needs_scores(position, L_SEL, N_SEL):
            best = tl.full([N_SEL_PAD], EMPTY_KEY, tl.int32)
            chosen = tl.full([N_SEL_PAD], NO_BLOCK, tl.int32)
            for first in range(1, own - 1, BLOCKS):
                j = first + tl.arange(0, BLOCKS)
                competes = j <= own - 2
                score = tl.load(scores_ptr + row * n_blocks + j, mask=competes, other=MIN_SCORE)
                # A NaN score ranks last, so that what is chosen stays a valid set.
                keys = to_ordered_bits(tl.where(score > MIN_SCORE, score, MIN_SCORE).to(tl.int32, bitcast=True))
                found, found_j = find_topk(tl.where(competes, keys, EMPTY_KEY), j, N_FREE, N_SEL_PAD)
                if first > 1:
                    found, found_j = find_topk(concatenate(best, found), concatenate(chosen, found_j), N_FREE, N_SEL_PAD)
                best, chosen = found, found_j
    blocks = add_forced_blocks(chosen[None, :], own + tl.zeros([1], tl.int32), N_SEL, N_SEL_PAD)
    place = place[None, :]
    tl.store(blocks_ptr + row * N_SEL + place, blocks, mask=place < N_SEL)
# fmt: on
