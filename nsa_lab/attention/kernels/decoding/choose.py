"""From the scores of compressed keys to the blocks that a query reads (eq. 8 to 11). launch.py launches these kernels.

The scores of all heads were kept by whoever read the keys, since a share needs the sum over them all. The importance of a
block is then a sum of the few neighbouring shares that reach into it: nothing as large as keys times blocks exists. Of an
indexer, one sum per block is kept.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.bounds import visible
from nsa_lab.attention.kernels.choice import ABSENT, LEAST, in_order, log_of_blocks, with_forced
from nsa_lab.attention.kernels.decoding.keys import load_queries, load_sums
from nsa_lab.attention.kernels.tiles import batch_and_group
from nsa_lab.attention.kernels.vocabulary import SIZES

EMPTY = tl.constexpr(-(2**63))
"""The key of no block; before that of every score."""


# fmt: off
@triton.jit
def some_go_without(position, L_SEL: tl.constexpr, N_SEL: tl.constexpr):
    """Whether more blocks compete, 1 .. own-2, than there are places for: only then do scores matter."""
    return position // L_SEL - 2 > N_SEL - 3


@triton.jit(do_not_specialize=SIZES)
def nsa_choice_shares(
    scores_ptr, part_sums_ptr, lengths_ptr, shares_ptr,
    T, N, G, row_parts,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr,
    N_SEL: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, KEYS: tl.constexpr,
):
    """What one query gives to KEYS compressed keys, summed over the heads of a group: shares float32 [B, T, G, N].

    A row has `row_parts` parts, of which the first PARTS are these keys'.
    """
    first = tl.program_id(1) * KEYS
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    stop = tl.minimum(visible(position, L, STRIDE), N)
    if (first >= stop) | (not some_go_without(position, L_SEL, N_SEL)):
        return
    head = tl.arange(0, HEADS_PAD)
    part = tl.arange(0, PARTS_PAD)
    place = (row * HEADS + head)[:, None] * row_parts + part[None, :]
    part_peak, part_total = load_sums(part_sums_ptr, place, (head < HEADS)[:, None] & (part < PARTS)[None, :])
    peak = tl.max(part_peak, 1)
    total = tl.sum(part_total * tl.exp2(part_peak - peak[:, None]), 1)
    # A head that is not there has no total, and no shares.
    inverse = 1.0 / tl.where(head < HEADS, total, 1.0)
    n = first + tl.arange(0, KEYS)
    inside = (head < HEADS)[:, None] & (n < stop)[None, :]
    scores = tl.load(scores_ptr + (row * HEADS + head)[:, None] * N + n[None, :], mask=inside, other=float("-inf"))
    tl.store(shares_ptr + row * N + n, tl.sum(tl.exp2(scores - peak[:, None]) * inverse[:, None], 0), mask=n < stop)


@triton.jit(do_not_specialize=SIZES)
def nsa_choice_logs(
    q_ptr, k_ptr, lengths_ptr, logs_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, row_tiles, n_blocks, scale_log2,
    STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """What an indexer finds in BLOCKS blocks: the logarithm of the sum of exp(score) over a block's keys, which lie side by
    side; float32 [B, T, G, n_blocks]. One head's shares are of one sum, so that their order is that of these (choice.py).
    """
    b, g = batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    before = tl.load(lengths_ptr + b)
    last = (before + T - 1) // L_SEL - 2
    if (part * BLOCKS > last) | (not some_go_without(before + T - 1, L_SEL, N_SEL)):
        return
    q_base = q_ptr + b * stride_qb + g * stride_qh
    q, t, _, inside = load_queries(q_base, stride_qt, stride_qh, tile, T, 1, DK, DK_PAD, ROWS)
    j = part * BLOCKS + tl.arange(0, BLOCKS)
    # Rows that do not exist see what the last one sees: past that, a cache may hold anything.
    position = before + tl.minimum(t, T - 1)
    found = log_of_blocks(
        q, k_ptr + b * stride_kb + g * stride_kg, stride_kn, position, part * BLOCKS, N, scale_log2,
        STRIDE, STRIDE, STRIDES, STRIDES_AT_ONCE, DK, DK_PAD, ROWS, BLOCKS,
    )
    place = ((b * T + t) * G + g)[:, None] * n_blocks + j[None, :]
    tl.store(logs_ptr + place, found, mask=inside[:, None] & (j < n_blocks)[None, :])


@triton.jit
def importance_of(shares_base, j, position, N, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr):
    """The sum over compressed keys of share times shared strides, of selection blocks j (eq. 9)."""
    STRIDES: tl.constexpr = L_SEL // STRIDE
    REACH: tl.constexpr = L // STRIDE
    stop = tl.minimum(visible(position, L, STRIDE), N)
    importance = tl.zeros(j.shape, tl.float32)
    for near in range(1 - REACH, STRIDES):
        i = j * STRIDES + near
        shared = tl.minimum(near + REACH, STRIDES) - tl.maximum(near, 0)
        share = tl.load(shares_base + i, mask=(i >= 0) & (i < stop), other=0.0)
        importance += share * shared.to(tl.float32)
    return importance


@triton.jit
def merge_keys(best, keys, N_FREE: tl.constexpr, N_SEL_PAD: tl.constexpr):
    """The N_FREE greatest of `best` int64 [1, N_SEL_PAD] and `keys` int64 [1, BLOCKS], EMPTY where there are none."""
    place = tl.arange(0, N_SEL_PAD)[None, :]
    merged = tl.full([1, N_SEL_PAD], EMPTY, tl.int64)
    for taken in range(N_FREE):
        top = tl.maximum(tl.max(keys, 1), tl.max(best, 1))[:, None]
        merged = tl.where(place == taken, top, merged)
        keys = tl.where(keys == top, EMPTY, keys)
        best = tl.where(best == top, EMPTY, best)
    return merged


@triton.jit(do_not_specialize=SIZES)
def nsa_choice_best(
    shares_ptr, logs_ptr, lengths_ptr, blocks_ptr,
    T, N, G, n_blocks,
    L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The chosen blocks of one query and group, as `nsa_choice` gives them, by shares or by an indexer's logs; without
    either every block has a place."""
    N_FREE: tl.constexpr = N_SEL - 3
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    own = position // L_SEL
    place = tl.arange(0, N_SEL_PAD)[None, :]
    chosen = tl.where(place + 1 <= own - 2, place + 1, ABSENT)
    # By itself, so that it is decided at compile time: of scores that are not there nothing can be compiled.
    if (shares_ptr is not None) or (logs_ptr is not None):  # noqa: SIM102
        if some_go_without(position, L_SEL, N_SEL):
            best = tl.full([1, N_SEL_PAD], EMPTY, tl.int64)
            for first in range(1, own - 1, BLOCKS):
                j = first + tl.arange(0, BLOCKS)[None, :]
                if logs_ptr is None:
                    score = importance_of(shares_ptr + row * N, j, position, N, L, STRIDE, L_SEL)
                else:
                    score = tl.load(logs_ptr + row * n_blocks + j, mask=j <= own - 2, other=LEAST)
                # A NaN score ranks last, so that what is chosen stays a valid set.
                score = tl.where(score > LEAST, score, LEAST)
                # As in choice.py: the greater number is the better score or, at equal scores, the lower index.
                keys = (in_order(score.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (j ^ ABSENT).to(tl.int64)
                best = merge_keys(best, tl.where(j <= own - 2, keys, EMPTY), N_FREE, N_SEL_PAD)
            chosen = tl.where(best != EMPTY, (best & ABSENT).to(tl.int32) ^ ABSENT, ABSENT)
    blocks = with_forced(chosen, own + tl.zeros([1], tl.int32), N_SEL, N_SEL_PAD)
    tl.store(blocks_ptr + row * N_SEL + place, blocks, mask=place < N_SEL)
# fmt: on
