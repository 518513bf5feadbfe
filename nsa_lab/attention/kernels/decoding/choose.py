"""From the scores of compressed keys to the blocks that a query reads (eq. 8 to 11). launch.py launches these kernels.

The scores of all heads were kept by whoever read the keys, since a share needs the sum over them all. The importance of a
block is then a sum of the few neighbouring shares that reach into it: nothing as large as keys times blocks exists. Which
blocks are the best is not searched for, round after round, but counted: a block's rank is how many are before it. That is
done twice, among neighbours and among the best of all neighbourhoods, so that few are compared with many.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# An outer `if` of two is decided when a kernel is compiled: of what is not there nothing can be.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.bounds import visible
from nsa_lab.attention.kernels.choice import ABSENT, LEAST, log_of_blocks, with_forced
from nsa_lab.attention.kernels.decoding.keys import load_queries, load_sums
from nsa_lab.attention.kernels.tiles import batch_and_group
from nsa_lab.attention.kernels.vocabulary import SIZES


# fmt: off
@triton.jit
def some_go_without(position, L_SEL: tl.constexpr, N_SEL: tl.constexpr):
    """Whether more blocks compete, 1 .. own-2, than there are places for: only then do scores matter."""
    return position // L_SEL - 2 > N_SEL - 3


@triton.jit
def before_others(score, block, others, other_blocks):
    """How many of `others` stand before each: they have a better score or, at equal scores, the lower index."""
    better = others[None, :] > score[:, None]
    tied = (others[None, :] == score[:, None]) & (other_blocks[None, :] < block[:, None])
    return tl.sum((better | tied).to(tl.int32), 1)


@triton.jit
def ranked(score, competes):
    """-inf where a block does not compete; a NaN score ranks last, so that what is chosen stays a valid set."""
    return tl.where(competes, tl.where(score > LEAST, score, LEAST), float("-inf"))


@triton.jit(do_not_specialize=SIZES)
def nsa_choice_shares(
    scores_ptr, part_sums_ptr, lengths_ptr, candidates_ptr, candidate_blocks_ptr,
    T, N, G, row_parts, n_candidates,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Of BLOCKS neighbouring blocks the N_SEL - 3 that matter most to a query, and how much: the sum over compressed keys,
    and over the heads of a group, of share times shared strides (eq. 9, 10). Candidates are float32 and int32 [B, T, G,
    n_candidates], N_SEL - 3 of each program, in no order; -inf where there are not so many.

    A row has `row_parts` parts, of which the first PARTS are these keys'.
    """
    STRIDES: tl.constexpr = L_SEL // STRIDE
    REACH: tl.constexpr = L // STRIDE
    N_FREE: tl.constexpr = N_SEL - 3
    j = 1 + tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    last = position // L_SEL - 2  # that competes
    if (1 + tl.program_id(1) * BLOCKS > last) | (not some_go_without(position, L_SEL, N_SEL)):
        return
    head = tl.arange(0, HEADS_PAD)
    part = tl.arange(0, PARTS_PAD)
    place = (row * HEADS + head)[:, None] * row_parts + part[None, :]
    part_peak, part_total = load_sums(part_sums_ptr, place, (head < HEADS)[:, None] & (part < PARTS)[None, :])
    peak = tl.max(part_peak, 1)
    total = tl.sum(part_total * tl.exp2(part_peak - peak[:, None]), 1)
    # A head that is not there has no total, and no shares.
    inverse = 1.0 / tl.where(head < HEADS, total, 1.0)
    stop = tl.minimum(visible(position, L, STRIDE), N)
    importance = tl.zeros([BLOCKS], tl.float32)
    for near in range(1 - REACH, STRIDES):
        i = j * STRIDES + near
        inside = (head < HEADS)[:, None] & ((i >= 0) & (i < stop))[None, :]
        scores = tl.load(scores_ptr + (row * HEADS + head)[:, None] * N + i[None, :], mask=inside, other=float("-inf"))
        shared = tl.minimum(near + REACH, STRIDES) - tl.maximum(near, 0)
        importance += tl.sum(tl.exp2(scores - peak[:, None]) * inverse[:, None], 0) * shared.to(tl.float32)
    score = ranked(importance, j <= last)
    rank = before_others(score, j, score, j)
    base = row * n_candidates + tl.program_id(1) * N_FREE
    kept = (j <= last) & (rank < N_FREE)
    tl.store(candidates_ptr + base + rank, score, mask=kept)
    tl.store(candidate_blocks_ptr + base + rank, j, mask=kept)
    free = tl.arange(0, N_SEL_PAD)
    absent = (free >= last - tl.program_id(1) * BLOCKS) & (free < N_FREE)
    tl.store(candidates_ptr + base + free, tl.full([N_SEL_PAD], float("-inf"), tl.float32), mask=absent)


@triton.jit(do_not_specialize=SIZES)
def nsa_choice_logs(
    q_ptr, k_ptr, lengths_ptr, candidates_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, row_tiles, n_candidates, scale_log2,
    STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """What an indexer finds in BLOCKS blocks: the logarithm of the sum of exp(score) over a block's keys, which lie side by
    side. One head's shares are of one sum, so that their order is that of these (choice.py). Candidate j of float32 [B, T,
    G, n_candidates] is block j."""
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
    found = log_of_blocks(
        q, k_ptr + b * stride_kb + g * stride_kg, stride_kn, before + t, part * BLOCKS, N, scale_log2,
        STRIDE, STRIDE, STRIDES, STRIDES_AT_ONCE, DK, DK_PAD, ROWS, BLOCKS,
    )
    place = ((b * T + t) * G + g)[:, None] * n_candidates + j[None, :]
    tl.store(candidates_ptr + place, found, mask=inside[:, None] & (j < n_candidates)[None, :])


@triton.jit
def load_candidates(candidates_base, candidate_blocks_base, at, stop, last):
    """(score, block) of the candidates `at` that are before `stop` and compete; -inf of others."""
    block = at
    if candidate_blocks_base is not None:
        block = tl.load(candidate_blocks_base + at, mask=at < stop, other=0)
    score = tl.load(candidates_base + at, mask=at < stop, other=float("-inf"))
    if candidate_blocks_base is None:
        score = ranked(score, (at < stop) & (block >= 1) & (block <= last))
    return score, block


@triton.jit(do_not_specialize=SIZES)
def nsa_choice_best(
    candidates_ptr, candidate_blocks_ptr, lengths_ptr, blocks_ptr,
    T, G, n_candidates,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, BLOCKS: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr,
):
    """The chosen blocks of one query and group, the best first, then the forced, then -1; without candidates every block
    has a place. A program places those among OWN candidates. BLOCKS are those of which each N_SEL - 3 became candidates."""
    N_FREE: tl.constexpr = N_SEL - 3
    row = tl.program_id(0).to(tl.int64)  # (b, t, g)
    t = (row // G % T).to(tl.int32)
    position = tl.load(lengths_ptr + row // (G * T)) + t
    own = position // L_SEL
    blocks_base = blocks_ptr + row * N_SEL
    # By itself, so that it is decided at compile time.
    if candidates_ptr is None:
        competing = position < 0
    else:
        competing = some_go_without(position, L_SEL, N_SEL)
    if tl.program_id(1) == 0:
        place = tl.arange(0, N_SEL_PAD)[None, :]
        chosen = tl.where(place + 1 <= own - 2, place + 1, ABSENT)
        # Where blocks compete, the forced ones alone: they come after all that are chosen.
        chosen = tl.where(competing, place + 1 - N_SEL_PAD, chosen)
        blocks = with_forced(chosen, own + tl.zeros([1], tl.int32), N_SEL, N_SEL_PAD)
        tl.store(blocks_base + place, blocks, mask=(place < N_SEL) & ((place >= N_FREE) | (not competing)))
    if candidates_ptr is not None:
        if competing:
            candidates_base = candidates_ptr + row * n_candidates
            if candidate_blocks_ptr is None:
                candidate_blocks_base, stop = None, tl.minimum(own - 1, n_candidates)
            else:
                candidate_blocks_base, stop = candidate_blocks_ptr + row * n_candidates, tl.cdiv(own - 2, BLOCKS) * N_FREE
            first_own = tl.program_id(1) * OWN
            if first_own < stop:
                score, block = load_candidates(
                    candidates_base, candidate_blocks_base, first_own + tl.arange(0, OWN), stop, own - 2
                )
                rank = tl.zeros([OWN], tl.int32)
                for first in range(0, stop, OTHERS):
                    others, other_blocks = load_candidates(
                        candidates_base, candidate_blocks_base, first + tl.arange(0, OTHERS), stop, own - 2
                    )
                    rank += before_others(score, block, others, other_blocks)
                tl.store(blocks_base + rank, block, mask=(score > float("-inf")) & (rank < N_FREE))
# fmt: on
