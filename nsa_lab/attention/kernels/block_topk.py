"""Block selection in Triton: importance of selection blocks, and the top n_sel blocks (eq. 8 to 11).

One program owns a tile of queries and one group. It loops over the selection blocks, a few at a time, recomputes the
compressed probabilities p = exp(score - lse) of every head, sums over heads and compressed blocks in registers, and keeps
the best blocks seen so far. It stores no matrix larger than this tile, its result does not depend on the order of
execution, and it never synchronizes with the host.

For an indexer, which has no LSE, scores of blocks are computed first (block_scores.py) and no key is read here.

* Forced blocks need no score: only blocks sink .. own_block - local compete, for n_sel - sink - local slots. If all of them
  fit, none is scored.
* A slot is one int64: the score as an order-preserving integer in the high bits, the inverted block index in the low bits.
  The larger number has the higher score or, for equal scores, the lower index, so the tie rule is exact.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
# The decorators of torch.library have no type annotations.
# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels import kernel_names, launch_table
from nsa_lab.attention.kernels.block_scores import RankedTiles, load_block_scores, score_blocks
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.launch_utils import ceil_div, get_strides, make_rows_contiguous, padded_width
from nsa_lab.attention.kernels.packed_tiles import COMPRESSED_ROW, count_tiles, find_document_of_tile, split_bounds
from nsa_lab.attention.kernels.tiles import LOG2E, get_reversed_tile, load_at, load_rows
from nsa_lab.config import NSAConfig

NO_BLOCK = tl.constexpr(0x7FFFFFFF)
"""Sorts after every block index."""
MIN_SCORE = tl.constexpr(-3.4e38)
"""Score of a candidate whose score is NaN or -inf. Only non-candidates have a lower score, -inf."""
CAN_COMPILE_TF32_SHIFT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
"""Triton 3.2 crashes when it compiles the tf32 products of `_add_shifted`: always on sm_80, elsewhere for float32 inputs.

Triton 3.7.1 crashes for sm_100, in a pass on tensor memory; tf32 products are never used there.
"""


@triton.jit
def _add_shifted(total, x, step: tl.constexpr, BLOCKS: tl.constexpr, TF32: tl.constexpr):
    """Return total[:, j] + x[:, j - step], float32 [Q, BLOCKS]; x must be finite.

    The shift is a product with a 0/1 matrix, which keeps the register layout of the scores; a gather or a scan would force
    a slower layout on every later reduction. x is split into three parts of at most 11 bits, so the tf32 products are
    exact. Without TF32 it is one product, slower and also exact.
    """
    column = tl.arange(0, BLOCKS)
    shift_matrix = (column[:, None] + step == column[None, :]).to(tl.float32)
    if not TF32:
        return total + tl.dot(x, shift_matrix, input_precision="ieee")
    high = _truncate_to_tf32(x)
    middle = _truncate_to_tf32(x - high)
    low = x - high - middle
    shifted = tl.dot(high, shift_matrix, input_precision="tf32") + tl.dot(middle, shift_matrix, input_precision="tf32")
    return total + (shifted + tl.dot(low, shift_matrix, input_precision="tf32"))


@triton.jit
def _truncate_to_tf32(x):
    """Return x without the 13 low bits of its mantissa, which is exact in tf32."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


# fmt: off
@triton.jit
def _compute_importance(
    q_base, k_base, lse_base, stride_qt, stride_qh, stride_kn,
    t, last_free, j0, N, H, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    STRIDES: tl.constexpr, STRIDES_PAD: tl.constexpr, REACH: tl.constexpr, SPILL: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr, HEAD_MAX: tl.constexpr, BLOCK_MAX: tl.constexpr, TF32: tl.constexpr,
):
    """Return the importance [QUERIES, BLOCKS] of selection blocks j0, j0 + 1, ...

    The first SPILL columns are incomplete: they lack the contributions of compressed blocks that start before block j0.
    HEAD_MAX, BLOCK_MAX: maximum over heads, or over the compressed blocks of a selection block, instead of the sum. A
    maximum over blocks is for blocks that do not overlap.
    The columns of the score tile are stride-major: column s*BLOCKS + jj is compressed block STRIDES*(j0+jj) + s, so that a
    sum over s stays within a thread. COLUMNS columns of the keys are loaded at a time; if all fit, once for all heads.
    """
    column = tl.arange(0, STRIDES_PAD * BLOCKS)
    i = (j0 + column % BLOCKS) * STRIDES + column // BLOCKS
    columns = tl.arange(0, COLUMNS)
    k_rows = tl.minimum(tl.maximum(i, 0), N - 1).to(tl.int64) * stride_kn
    k = load_rows(k_base, k_rows, columns, DK, DK_PAD) if COLUMNS >= DK else None
    q_pointers = q_base + t.to(tl.int64)[:, None] * stride_qt + columns[None, :]
    weight = tl.zeros([QUERIES, STRIDES_PAD * BLOCKS], tl.float32)
    for head in range(HEADS):
        lse_log2 = tl.load(lse_base + t.to(tl.int64) * H + head) * LOG2E
        if COLUMNS >= DK:
            q = load_at(q_pointers, columns, DK, DK_PAD)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.zeros([QUERIES, STRIDES_PAD * BLOCKS], tl.float32)
            for first_column in range(0, DK, COLUMNS):
                part_q = load_at(q_pointers + first_column, first_column + columns, DK, DK_PAD)
                part_k = load_rows(k_base, k_rows, first_column + columns, DK, DK_PAD)
                scores = tl.dot(part_q, tl.trans(part_k), scores, input_precision="ieee")
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        weight = tl.maximum(weight, p) if HEAD_MAX else weight + p
        q_pointers += stride_qh
    if MASKED:
        # A compressed block can end after a query for which its selection block competes, or i can be negative.
        seen = (i[None, :] >= 0) & (i[None, :] * STRIDE + L - 1 <= t[:, None])
        weight = tl.where(seen, weight, 0.0)

    by_stride = tl.reshape(weight, [QUERIES, STRIDES_PAD, BLOCKS])
    s = tl.arange(0, STRIDES_PAD)
    own_share = tl.where(s < STRIDES, tl.minimum(s + REACH, STRIDES) - s, 0).to(tl.float32)
    if BLOCK_MAX:
        importance = tl.max(by_stride * own_share[None, :, None], 1)
    else:
        importance = tl.sum(by_stride * own_share[None, :, None], 1)
    jj = tl.arange(0, BLOCKS)
    for step in tl.static_range(1, SPILL + 1):
        # Strides of compressed block s that are in the selection block `step` blocks later.
        n_shared = tl.maximum(tl.minimum(s + REACH, (step + 1) * STRIDES) - step * STRIDES, 0)
        spilled = tl.sum(by_stride * tl.where(s < STRIDES, n_shared, 0).to(tl.float32)[None, :, None], 1)
        # Blocks after the last competing one may contain infinities: scores of keys that the query must not attend to.
        spilled = tl.where(j0 + jj[None, :] <= last_free[:, None], spilled, 0.0)
        importance = _add_shifted(importance, spilled, step, BLOCKS, TF32)
    return importance


@triton.jit
def _compute_importance_in_slices(
    q_base, k_base, lse_base, stride_qt, stride_qh, stride_kn, t, j0, N, H, scale_log2,
    HEADS: tl.constexpr, STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
    HEAD_MAX: tl.constexpr, BLOCK_MAX: tl.constexpr,
):
    """Like `_compute_importance`, for blocks that do not overlap; STRIDES_AT_ONCE strides of a selection block at a time.

    Compressed blocks of competing selection blocks are visible to all queries of the tile.
    """
    column = tl.arange(0, STRIDES_AT_ONCE * BLOCKS)
    columns = tl.arange(0, DK_PAD)
    importance = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for s0 in range(0, STRIDES, STRIDES_AT_ONCE):
        s = s0 + column // BLOCKS
        i = (j0 + column % BLOCKS) * STRIDES + s
        k = load_rows(k_base, tl.minimum(i, N - 1).to(tl.int64) * stride_kn, columns, DK, DK_PAD)
        weight = tl.zeros([QUERIES, STRIDES_AT_ONCE * BLOCKS], tl.float32)
        for head in range(HEADS):
            lse_log2 = tl.load(lse_base + t.to(tl.int64) * H + head) * LOG2E
            q = load_rows(q_base + head * stride_qh, t.to(tl.int64) * stride_qt, columns, DK, DK_PAD)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - lse_log2[:, None])
            weight = tl.maximum(weight, p) if HEAD_MAX else weight + p
        by_stride = tl.reshape(tl.where((s < STRIDES)[None, :], weight, 0.0), [QUERIES, STRIDES_AT_ONCE, BLOCKS])
        if BLOCK_MAX:
            importance = tl.maximum(importance, tl.max(by_stride, 1))
        else:
            importance += tl.sum(by_stride, 1)
    return importance


@triton.jit
def to_ordered_bits(score):
    """Map the bits of a float32 (as int32) to an int32 of the same order, and back: flip all but the sign if negative."""
    return score ^ ((score >> 31) & 0x7FFFFFFF)


@triton.jit
def _merge_topk(best, score, j0, N_FREE: tl.constexpr, BLOCKS: tl.constexpr):
    """Insert candidates of `score` [Q, BLOCKS] (-inf: none) that beat the worst slot into `best`, int64 [Q, slots]."""
    column = tl.arange(0, BLOCKS)
    worst = to_ordered_bits((tl.min(best, 1) >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    beats = tl.sum((score > worst[:, None]).to(tl.int32), 1)
    rounds = tl.minimum(tl.max(beats, 0), N_FREE)
    for _ in range(rounds):
        top = tl.max(score, 1)
        position = tl.min(tl.where(score == top[:, None], column[None, :], BLOCKS), 1)
        key = (to_ordered_bits(top.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (
            (position + j0) ^ NO_BLOCK
        ).to(tl.int64)
        score = tl.where(column[None, :] == position[:, None], float("-inf"), score)
        lowest = tl.min(best, 1)
        best = tl.where((best == lowest[:, None]) & ((key > lowest) & (top >= MIN_SCORE))[:, None], key[:, None], best)
    return best


@triton.jit
def add_forced_blocks(
    selected, own_block, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr
):
    """Return the selected blocks [Q, N_SEL_PAD], ascending, then -1.

    They are the first N_SEL - SINK - LOCAL of `selected` (NO_BLOCK: empty slot) and the forced blocks of queries [Q] in
    `own_block`.
    """
    N_FREE: tl.constexpr = N_SEL - SINK - LOCAL
    slot = tl.arange(0, N_SEL_PAD)
    # Slots N_FREE, N_FREE+1, ...: the first SINK blocks, then the latest LOCAL. A block that is both is in the second part.
    is_sink = (slot < N_FREE + SINK)[None, :]
    first = slot[None, :] - N_FREE
    latest = own_block[:, None] - (slot[None, :] - N_FREE - SINK)
    forced = tl.where(is_sink, first, latest)
    exists = tl.where(is_sink, first <= own_block[:, None] - LOCAL, latest >= 0) & (slot[None, :] < N_SEL)
    selected = tl.where(slot[None, :] < N_FREE, selected, tl.where(exists, forced, NO_BLOCK))
    selected = tl.sort(selected, dim=1)
    return tl.where(selected == NO_BLOCK, -1, selected)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_topk(
    q_ptr, k_ptr, lse_ptr, scores_ptr, blocks_ptr, q_bounds_ptr, k_bounds_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, n_documents, first_query, first_tile, n_blocks, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    STRIDES: tl.constexpr, STRIDES_PAD: tl.constexpr, REACH: tl.constexpr, SPILL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_QUERIES: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
    SINK: tl.constexpr, LOCAL: tl.constexpr, HEAD_MAX: tl.constexpr, BLOCK_MAX: tl.constexpr, TF32: tl.constexpr,
):
    """Select the blocks of QUERIES queries of one group; a tile of TILE_QUERIES queries is divided among programs.

    A selection block has STRIDES strides. A compressed block spans REACH strides, so it can extend from the selection block
    in which it starts into SPILL later ones. STRIDES_PAD columns of each selection block are scored at once. `scores_ptr`:
    results of `nsa_block_scores` for the tiles from `first_tile` on, with its LSE; then no key is read.
    """
    PROGRAMS: tl.constexpr = TILE_QUERIES // QUERIES
    tile, b, g = get_reversed_tile(B, G)
    tile, offset = tile // PROGRAMS, tile % PROGRAMS * QUERIES
    score_row = ((tile * B + b) * G + g) * HEADS
    if scores_ptr is not None:
        tile += first_tile
    if q_bounds_ptr is not None:
        _, tile, first, T, first_key, n_keys = find_document_of_tile(
            q_bounds_ptr, k_bounds_ptr, n_documents, tile, 1, TILE_QUERIES
        )
        if tile * TILE_QUERIES + offset >= T:
            return
        q_ptr += first * stride_qt
        if scores_ptr is None:
            lse_ptr += first * (G * HEADS)
        blocks_ptr += first * (G * N_SEL)
        # For a document without compressed keys, read some existing row; its queries do not attend to it.
        k_ptr += tl.minimum(first_key, N - 1) * stride_kn
        N = tl.maximum(n_keys, 1)
    first_t = tile * TILE_QUERIES + offset
    t = tl.minimum(first_t + tl.arange(0, QUERIES), T - 1)
    if first_query is not None:
        t += first_query
        q_ptr -= tl.cast(first_query, tl.int64) * stride_qt
        if scores_ptr is None:
            lse_ptr -= tl.cast(first_query, tl.int64) * (G * HEADS)
        blocks_ptr -= tl.cast(first_query, tl.int64) * (G * N_SEL)
    own_block = t // L_SEL
    N_FREE: tl.constexpr = N_SEL - SINK - LOCAL
    slot = tl.arange(0, N_SEL_PAD)

    # Empty slots hold -inf, below every score, and have distinct indices. Slots from N_FREE on are never filled.
    empty_score = to_ordered_bits(tl.full([N_SEL_PAD], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    empty = (empty_score << 32) | slot.to(tl.int64)
    best = tl.where(slot < N_FREE, empty, 0x7FFFFFFFFFFFFFFF)
    best = tl.broadcast_to(best[None, :], [QUERIES, N_SEL_PAD])
    last_t = tl.minimum(first_t + QUERIES - 1, T - 1)
    if first_query is not None:
        last_t += first_query
    stop = last_t // L_SEL - LOCAL + 1
    if (stop - SINK > N_FREE) & (N_FREE > 0):
        column = tl.arange(0, BLOCKS)
        q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
        k_base = k_ptr + b * stride_kb + g * stride_kg
        for j0 in range(SINK - SPILL, stop - SPILL, BLOCKS - SPILL):
            if scores_ptr is not None:
                score = load_block_scores(
                    scores_ptr, lse_ptr, score_row, offset, j0 + column, stop, n_blocks,
                    HEADS, TILE_QUERIES, QUERIES, BLOCKS,
                )
            else:
                lse_base = lse_ptr + (b * T * G + g) * HEADS
                if STRIDES_PAD < STRIDES:
                    score = _compute_importance_in_slices(
                        q_base, k_base, lse_base, stride_qt, stride_qh, stride_kn, t, j0, N, G * HEADS, scale_log2,
                        HEADS, STRIDES, STRIDES_PAD, DK, DK_PAD, QUERIES, BLOCKS, HEAD_MAX, BLOCK_MAX,
                    )
                else:
                    score = _compute_importance(
                        q_base, k_base, lse_base, stride_qt, stride_qh, stride_kn,
                        t, own_block - LOCAL, j0, N, G * HEADS, scale_log2,
                        HEADS, L, STRIDE, STRIDES, STRIDES_PAD, REACH, SPILL, DK, DK_PAD, COLUMNS, QUERIES, BLOCKS,
                        (L > (LOCAL - 1) * L_SEL + STRIDE) | (SINK < SPILL), HEAD_MAX, BLOCK_MAX, TF32,
                    )
            j = j0 + column
            competes = (column >= SPILL)[None, :] & (j[None, :] <= own_block[:, None] - LOCAL)
            # A NaN score ranks last, so that the selected blocks are still a valid set.
            score = tl.where(competes, tl.where(score > MIN_SCORE, score, MIN_SCORE), float("-inf"))
            best = _merge_topk(best, score, j0, N_FREE, BLOCKS)
        selected = tl.where((best >> 32) > tl.min(empty_score, 0), (best & NO_BLOCK).to(tl.int32) ^ NO_BLOCK, NO_BLOCK)
    else:
        selected = tl.where(slot[None, :] + SINK <= own_block[:, None] - LOCAL, slot[None, :] + SINK, NO_BLOCK)

    selected = add_forced_blocks(selected, own_block, N_SEL, N_SEL_PAD, SINK, LOCAL)
    rows = (b * T + t) * G + g
    inside = first_t + tl.arange(0, QUERIES) < T
    tl.store(blocks_ptr + rows[:, None] * N_SEL + slot[None, :], selected,
             mask=inside[:, None] & (slot[None, :] < N_SEL))
# fmt: on


class SelectionRule(NamedTuple):
    """Settings of `NSAConfig` that turn scores into a selection of blocks. The defaults are the paper's."""

    n_sel: int
    sink_blocks: int = 1
    local_blocks: int = 2
    head_max: bool = False
    block_max: bool = False

    @classmethod
    def from_config(cls, nsa: NSAConfig) -> SelectionRule:
        reductions = nsa.head_reduction == "max", nsa.block_reduction == "max"
        return cls(nsa.n_sel, nsa.sink_blocks, nsa.local_blocks, *reductions)

    def needs_lse(self, heads: int, l: int, d: int) -> bool:
        """Return whether the keys must be scored with the LSE of `heads` heads per group.

        Otherwise the log-sum-exps of blocks are sufficient: keys do not overlap, and there is one head, or probabilities
        are sums over keys and heads.
        """
        return l != d or (heads > 1 and (self.head_max or self.block_max))


# Defined by schema to save host time; see selected/launch.py for the measurement. The first operator has the paper's rule.
torch.library.define(
    "nsa_lab::select_blocks",
    "(Tensor q, Tensor k_cmp, Tensor? lse, int l, int d, int l_sel, int n_sel, Tensor? documents=None, int longest=0,"
    " int first=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::rank_and_select_blocks",
    "(Tensor q, Tensor k_cmp, Tensor? lse, int l, int d, int l_sel, int n_sel, int sink_blocks, int local_blocks,"
    " bool head_max, bool block_max, Tensor? documents=None, int longest=0, int first=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_rank_and_select_blocks = torch.ops.nsa_lab.rank_and_select_blocks.default


# fmt: off
def forward(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, rule: SelectionRule,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    """Compute `select_blocks` without PyTorch's dispatcher."""
    B, T, H, Dk = q.shape
    if k_cmp.shape[1] == 0:  # the kernel needs a row to read; no query attends to it
        k_cmp = k_cmp.new_zeros(B, 1, *k_cmp.shape[2:])
    N, G = k_cmp.shape[1:3]
    q, k_cmp = make_rows_contiguous(q), make_rows_contiguous(k_cmp)
    blocks = q.new_empty(B, T, G, rule.n_sel, dtype=torch.int32)
    n_strides, reach = l_sel // d, l // d
    spill = ceil_div(reach - 1, n_strides)
    q_bounds, k_bounds, n_documents = bounds = split_bounds(documents, COMPRESSED_ROW)
    n_blocks = ceil_div(T + first if documents is None else longest, l_sel)
    tf32 = CAN_COMPILE_TF32_SHIFT and not launch_table.is_blackwell(q.device)
    strides_at_once = padded_width(n_strides)
    if lse is None:
        score_tile = launch_table.block_scores(q.dtype, Dk, q.device)
        tile, tile_queries = launch_table.block_ranking(score_tile), score_tile.rows
        pieces = score_blocks(
            q, k_cmp, n_blocks, d, l_sel, rule.n_sel, rule.local_blocks, rule.block_max, bounds, first
        )
    else:
        tile = launch_table.block_topk(q.dtype, Dk, n_strides, spill, n_blocks, q.device)
        if n_strides > launch_table.MAX_STRIDES_AT_ONCE:
            strides_at_once = launch_table.block_topk_strides(q.dtype, Dk)
            tile = launch_table.block_topk_without_lse(tile, q.device)
        tile_queries = tile.rows
        pieces = [RankedTiles(0, count_tiles(T, tile.rows, n_documents), None, lse.contiguous())]
    columns = launch_table.block_topk_columns(q.dtype, Dk, strides_at_once, tile)
    for piece in pieces:
        nsa_block_topk[(piece.n_tiles * (tile_queries // tile.rows) * B * G,)](
            q, k_cmp, piece.lse, piece.scores, blocks, q_bounds, k_bounds, *get_strides(q, k_cmp),
            T, N, B, G, n_documents, first or None, piece.first_tile, n_blocks, Dk**-0.5 * kernel_names.LOG2E,
            HEADS=H // G, L=l, STRIDE=d, L_SEL=l_sel, N_SEL=rule.n_sel,
            STRIDES=n_strides, STRIDES_PAD=strides_at_once, REACH=reach, SPILL=spill, N_SEL_PAD=padded_width(rule.n_sel),
            DK=Dk, DK_PAD=padded_width(Dk), COLUMNS=columns,
            TILE_QUERIES=tile_queries, QUERIES=tile.rows, BLOCKS=tile.keys,
            SINK=rule.sink_blocks, LOCAL=rule.local_blocks, HEAD_MAX=rule.head_max, BLOCK_MAX=rule.block_max, TF32=tf32,
            **tile.compile_options(),
        )
    return blocks


@torch.library.impl("nsa_lab::select_blocks", ("cpu", "cuda"))
def _(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, n_sel: int,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    return forward(q, k_cmp, lse, l, d, l_sel, SelectionRule(n_sel), documents, longest, first)


@torch.library.impl("nsa_lab::rank_and_select_blocks", ("cpu", "cuda"))
def _(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, n_sel: int, sink_blocks: int,
    local_blocks: int, head_max: bool, block_max: bool, documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    rule = SelectionRule(n_sel, sink_blocks, local_blocks, head_max, block_max)
    return forward(q, k_cmp, lse, l, d, l_sel, rule, documents, longest, first)
# fmt: on


def _fake(q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, n_sel: int, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_sel, dtype=torch.int32)


torch.library.register_fake("nsa_lab::select_blocks", _fake)
torch.library.register_fake("nsa_lab::rank_and_select_blocks", _fake)


# fmt: off
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, rule: SelectionRule,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    """Return the n_sel blocks of each query and group: int32 [B, T, G, n_sel], ascending and distinct, padded with -1.

    The first `sink_blocks` and the latest `local_blocks` are always selected; the rest by importance in float32, ties to
    the lower index. Not differentiable.

    Args:
        q: [B, T, H, Dk].
        k_cmp: [B, N, G, Dk].
        lse: float32 [B, T, H] of q over k_cmp; None only if the rule needs no LSE (`SelectionRule.needs_lse`).
        l, d, l_sel: the geometry, as in `NSAConfig`.
        rule: a maximum over the blocks needs l = d.
        documents: `Layout.bounds` of packed documents (B = 1); block indices are local to a document. None: not packed.
        longest: upper bound of the tokens of a document.
        first: position of query 0; keys start at position 0.
    """
    with torch.no_grad():
        lse = None if lse is None else lse.detach()
        return _rank_and_select_blocks(
            q.detach(), k_cmp.detach(), lse, l, d, l_sel, *rule, documents, longest, first
        )
# fmt: on
