"""Block choice in Triton: importance of selection blocks, and the n_sel best (eq. 8 to 11).

One program owns a tile of queries and one group. It walks the selection blocks a few at a time, rebuilds the compressed
probabilities p = exp(score - lse) of every head, sums heads and blocks in registers, and keeps the best blocks seen so
far. Nothing larger than that tile exists at once, nothing is left to the order of execution, and nothing waits on the host.

* Forced blocks need no score: only blocks 1 .. own-2 compete, for n_sel - 3 places. Where all of them fit, none is scored.
* One head per group whose compressed blocks do not overlap (an indexer's) needs no LSE: it is the same for all blocks of a
  query, so that their order is that of log sum exp(score), and the pass that would find it is saved.
* A place is one int64: the score, as an integer of the same order, above the bits of the inverted index. So the greater
  number is the better score or, at equal scores, the lower index: the tie rule is exact.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
# Nor are torch.library's decorators annotated.
# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels import kernel_names, launch_table
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.launch_utils import ceil_div, get_strides, make_rows_contiguous, padded_width
from nsa_lab.attention.kernels.packed_tiles import find_document_of_tile, make_compressed_bounds
from nsa_lab.attention.kernels.tiles import LOG2E, get_reversed_tile, load_at, load_rows

NO_BLOCK = tl.constexpr(0x7FFFFFFF)
"""Sorts after every block index."""
MIN_SCORE = tl.constexpr(-3.4e38)
"""The score of a candidate that has none; below it is only -inf, that of no candidate."""
CAN_COMPILE_TF32_SHIFT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
"""Triton 3.2 crashes on compiling `_add_shifted`'s tf32 products: on sm_80 always, elsewhere for float32 inputs. So does
3.7.1 for sm_100, in a pass on the memory of its tensor cores; there they are never asked for."""


@triton.jit
def _add_shifted(total, x, step: tl.constexpr, BLOCKS: tl.constexpr, TF32: tl.constexpr):
    """total[:, j] + x[:, j - step], float32 [Q, BLOCKS]; x finite.

    It is done by a product with a 0/1 matrix, which keeps the layout of the scores; a gather or a scan would force a slower
    layout on every later reduction. Split into three parts of at most 11 bits, x comes through the tensor cores' tf32
    exactly; without TF32 it is one product, slower and just as exact.
    """
    column = tl.arange(0, BLOCKS)
    move = (column[:, None] + step == column[None, :]).to(tl.float32)
    if not TF32:
        return total + tl.dot(x, move, input_precision="ieee")
    high = _truncate_to_tf32(x)
    middle = _truncate_to_tf32(x - high)
    low = x - high - middle
    moved = tl.dot(high, move, input_precision="tf32") + tl.dot(middle, move, input_precision="tf32")
    return total + (moved + tl.dot(low, move, input_precision="tf32"))


@triton.jit
def _truncate_to_tf32(x):
    """x without the 13 low bits of its mantissa: what tf32 holds."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


# fmt: off
@triton.jit
def _compute_importance(
    q_base, k_base, lse_base, stride_qt, stride_qh, stride_kn,
    t, last_free, j0, N, H, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    STRIDES: tl.constexpr, STRIDES_PAD: tl.constexpr, REACH: tl.constexpr, SPILL: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
    TF32: tl.constexpr,
):
    """Importance [QUERIES, BLOCKS] of selection blocks j0 ..; the first SPILL columns lack what spills in from before j0.

    Columns of the score tile are ordered stride-major: column s*BLOCKS + jj is compressed block STRIDES*(j0+jj) + s, so
    that a sum over s stays within a thread. Keys are taken COLUMNS of their width at a time: all, where they fit, and then
    once for all heads.
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
            for past in range(0, DK, COLUMNS):
                part_q = load_at(q_pointers + past, past + columns, DK, DK_PAD)
                part_k = load_rows(k_base, k_rows, past + columns, DK, DK_PAD)
                scores = tl.dot(part_q, tl.trans(part_k), scores, input_precision="ieee")
        weight += tl.exp2(scores * scale_log2 - lse_log2[:, None])
        q_pointers += stride_qh
    if SPILL > 1:
        # Only a block longer than l_sel + d reaches past what every competing query sees.
        seen = (i[None, :] >= 0) & (i[None, :] * STRIDE + L - 1 <= t[:, None])
        weight = tl.where(seen, weight, 0.0)

    by_stride = tl.reshape(weight, [QUERIES, STRIDES_PAD, BLOCKS])
    s = tl.arange(0, STRIDES_PAD)
    own = tl.where(s < STRIDES, tl.minimum(s + REACH, STRIDES) - s, 0).to(tl.float32)
    importance = tl.sum(by_stride * own[None, :, None], 1)
    jj = tl.arange(0, BLOCKS)
    for step in tl.static_range(1, SPILL + 1):
        # Strides of block s that fall in the selection block `step` further on.
        shared = tl.maximum(tl.minimum(s + REACH, (step + 1) * STRIDES) - step * STRIDES, 0)
        spilled = tl.sum(by_stride * tl.where(s < STRIDES, shared, 0).to(tl.float32)[None, :, None], 1)
        # Blocks past those that compete may hold infinities: scores of keys that their query does not see.
        spilled = tl.where(j0 + jj[None, :] <= last_free[:, None], spilled, 0.0)
        importance = _add_shifted(importance, spilled, step, BLOCKS, TF32)
    return importance


@triton.jit
def compute_block_logsumexp(
    q, k_base, stride_kn, t, j0, N, scale_log2,
    L: tl.constexpr, STRIDE: tl.constexpr, STRIDES: tl.constexpr, STRIDES_AT_ONCE: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Logarithm to base 2, [QUERIES, BLOCKS], of the sum of exp(score) over the compressed blocks of selection blocks j0 ..

    For one head, and blocks that do not overlap. -inf where a query sees none of them.

    Columns are ordered as in `_step_importance`, STRIDES_AT_ONCE strides of every selection block at a time.
    """
    column = tl.arange(0, STRIDES_AT_ONCE * BLOCKS)
    columns = tl.arange(0, DK_PAD)
    # Each selection block has a peak of its own: beside that of others, its sum could be less than the smallest number.
    peak = tl.full([QUERIES, BLOCKS], -3.0e38, tl.float32)
    total = tl.zeros([QUERIES, BLOCKS], tl.float32)
    for s0 in range(0, STRIDES, STRIDES_AT_ONCE):
        s = s0 + column // BLOCKS
        i = (j0 + column % BLOCKS) * STRIDES + s
        k = load_rows(k_base, tl.minimum(i, N - 1).to(tl.int64) * stride_kn, columns, DK, DK_PAD)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        seen = (s < STRIDES)[None, :] & (i[None, :] * STRIDE + L - 1 <= t[:, None])
        scores = tl.reshape(tl.where(seen, scores, float("-inf")), [QUERIES, STRIDES_AT_ONCE, BLOCKS])
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None, :]), 1)
        peak = new_peak
    some = total > 0.0
    return tl.where(some, tl.log2(tl.where(some, total, 1.0)) + peak, float("-inf"))


@triton.jit
def to_ordered_bits(score):
    """float32 -> int32 of the same order, and back: of negative numbers all bits but the sign are turned over."""
    return score ^ ((score >> 31) & 0x7FFFFFFF)


@triton.jit
def _merge_topk(best, score, j0, N_FREE: tl.constexpr, BLOCKS: tl.constexpr):
    """Put those of `score` [Q, BLOCKS] (-inf: no candidate) that beat the worst place into `best` int64 [Q, P]."""
    column = tl.arange(0, BLOCKS)
    worst = to_ordered_bits((tl.min(best, 1) >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    beats = tl.sum((score > worst[:, None]).to(tl.int32), 1)
    rounds = tl.minimum(tl.max(beats, 0), N_FREE)
    for _ in range(rounds):
        top = tl.max(score, 1)
        at = tl.min(tl.where(score == top[:, None], column[None, :], BLOCKS), 1)
        key = (to_ordered_bits(top.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | ((at + j0) ^ NO_BLOCK).to(tl.int64)
        score = tl.where(column[None, :] == at[:, None], float("-inf"), score)
        lowest = tl.min(best, 1)
        best = tl.where((best == lowest[:, None]) & ((key > lowest) & (top >= MIN_SCORE))[:, None], key[:, None], best)
    return best


@triton.jit
def add_forced_blocks(selected, own, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr):
    """The choice [Q, N_SEL_PAD], ascending, then -1: the first N_SEL - 3 of `chosen`, ABSENT where none is, and the forced
    blocks of queries [Q] that stand in block `own`."""
    N_FREE: tl.constexpr = N_SEL - 3
    place = tl.arange(0, N_SEL_PAD)
    forced = tl.where(place[None, :] == N_FREE, 0, own[:, None] + N_FREE + 1 - place[None, :])
    # Places N_FREE .. N_FREE+2: block 0, own, own-1; the latter two only where they are not block 0 again.
    exists = (place[None, :] == N_FREE) | (forced >= 1)
    selected = tl.where(place[None, :] < N_FREE, selected, tl.where(exists & (place[None, :] < N_SEL), forced, NO_BLOCK))
    selected = tl.sort(selected, dim=1)
    return tl.where(selected == NO_BLOCK, -1, selected)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_block_topk(
    q_ptr, k_ptr, lse_ptr, blocks_ptr, q_bounds_ptr, k_bounds_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, documents, first_query, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    STRIDES: tl.constexpr, STRIDES_PAD: tl.constexpr, REACH: tl.constexpr, SPILL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,
    TF32: tl.constexpr,
):
    """The chosen blocks of QUERIES queries of one group.

    A selection block has STRIDES strides, a compressed block reaches over REACH of them, and so from the selection block
    that it begins in into SPILL further ones. STRIDES_PAD columns of each are scored at once. Without an LSE there is one
    head, and REACH is 1.
    """
    tile, b, g = get_reversed_tile(B, G)
    if q_bounds_ptr is not None:
        _, tile, first, T, first_key, own_keys = find_document_of_tile(q_bounds_ptr, k_bounds_ptr, documents, tile, 1, QUERIES)
        if tile * QUERIES >= T:
            return
        q_ptr += first * stride_qt
        if lse_ptr is not None:
            lse_ptr += first * (G * HEADS)
        blocks_ptr += first * (G * N_SEL)
        # Of a document without any, some row that exists is read; its queries see nothing of it.
        k_ptr += tl.minimum(first_key, N - 1) * stride_kn
        N = tl.maximum(own_keys, 1)
    t = tl.minimum(tile * QUERIES + tl.arange(0, QUERIES), T - 1)
    if first_query is not None:
        t += first_query
        q_ptr -= tl.cast(first_query, tl.int64) * stride_qt
        if lse_ptr is not None:
            lse_ptr -= tl.cast(first_query, tl.int64) * (G * HEADS)
        blocks_ptr -= tl.cast(first_query, tl.int64) * (G * N_SEL)
    own = t // L_SEL
    N_FREE: tl.constexpr = N_SEL - 3
    place = tl.arange(0, N_SEL_PAD)

    # Empty places hold -inf, below every score, and differ in their index. Places past N_FREE are never taken.
    none = to_ordered_bits(tl.full([N_SEL_PAD], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    empty = (none << 32) | place.to(tl.int64)
    best = tl.where(place < N_FREE, empty, 0x7FFFFFFFFFFFFFFF)
    best = tl.broadcast_to(best[None, :], [QUERIES, N_SEL_PAD])
    last_t = tl.minimum(tile * QUERIES + QUERIES - 1, T - 1)
    if first_query is not None:
        last_t += first_query
    stop = last_t // L_SEL - 1
    if (stop - 1 > N_FREE) & (N_FREE > 0):
        column = tl.arange(0, BLOCKS)
        q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
        k_base = k_ptr + b * stride_kb + g * stride_kg
        if lse_ptr is None:
            own_q = load_rows(q_base, t.to(tl.int64) * stride_qt, tl.arange(0, DK_PAD), DK, DK_PAD)
        else:
            own_q = None  # of every head in turn
        for j0 in range(1 - SPILL, stop - SPILL, BLOCKS - SPILL):
            if lse_ptr is None:
                score = compute_block_logsumexp(
                    own_q, k_base, stride_kn, t, j0, N, scale_log2,
                    L, STRIDE, STRIDES, STRIDES_PAD, DK, DK_PAD, QUERIES, BLOCKS,
                )
            else:
                lse_base = lse_ptr + (b * T * G + g) * HEADS
                score = _compute_importance(
                    q_base, k_base, lse_base, stride_qt, stride_qh, stride_kn, t, own - 2, j0, N, G * HEADS, scale_log2,
                    HEADS, L, STRIDE, STRIDES, STRIDES_PAD, REACH, SPILL, DK, DK_PAD, COLUMNS, QUERIES, BLOCKS, TF32,
                )
            j = j0 + column
            competes = ((column >= SPILL) & (j >= 1))[None, :] & (j[None, :] <= own[:, None] - 2)
            # A NaN score ranks last, so that what is chosen stays a valid set.
            score = tl.where(competes, tl.where(score > MIN_SCORE, score, MIN_SCORE), float("-inf"))
            best = _merge_topk(best, score, j0, N_FREE, BLOCKS)
        chosen = tl.where((best >> 32) > tl.min(none, 0), (best & NO_BLOCK).to(tl.int32) ^ NO_BLOCK, NO_BLOCK)
    else:
        chosen = tl.where(place[None, :] + 1 <= own[:, None] - 2, place[None, :] + 1, NO_BLOCK)

    chosen = add_forced_blocks(chosen, own, N_SEL, N_SEL_PAD)
    rows = (b * T + t) * G + g
    inside = tile * QUERIES + tl.arange(0, QUERIES) < T
    tl.store(blocks_ptr + rows[:, None] * N_SEL + place[None, :], chosen,
             mask=inside[:, None] & (place[None, :] < N_SEL))
# fmt: on


# Defined by schema for the host's sake; selected/launch.py has the figures.
torch.library.define(
    "nsa_lab::select_blocks",
    "(Tensor q, Tensor k_cmp, Tensor? lse, int l, int d, int l_sel, int n_sel, Tensor? documents=None, int longest=0,"
    " int first=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_select_blocks = torch.ops.nsa_lab.select_blocks.default


# fmt: off
def forward(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, n_sel: int,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    """`select_blocks` itself, past PyTorch's dispatcher."""
    B, T, H, Dk = q.shape
    if k_cmp.shape[1] == 0:  # a row to read, of which no query sees anything
        k_cmp = k_cmp.new_zeros(B, 1, *k_cmp.shape[2:])
    N, G = k_cmp.shape[1:3]
    q, k_cmp = make_rows_contiguous(q), make_rows_contiguous(k_cmp)
    blocks = q.new_empty(B, T, G, n_sel, dtype=torch.int32)
    n_strides, reach = l_sel // d, l // d
    spill = ceil_div(reach - 1, n_strides)
    bounds = make_compressed_bounds(documents, longest, T + first)
    tf32 = CAN_COMPILE_TF32_SHIFT and not launch_table.is_blackwell(q.device)
    tile = launch_table.block_topk(q.dtype, Dk, n_strides, spill, ceil_div(bounds.longest, l_sel), q.device)
    at_once = padded_width(n_strides)
    if lse is None:
        at_once = min(at_once, launch_table.block_topk_strides(q.dtype, Dk))
        tile = launch_table.block_topk_without_lse(tile, q.device)
    columns = launch_table.block_topk_columns(q.dtype, Dk, at_once, tile)
    nsa_block_topk[(bounds.count_tiles(T, tile.rows) * B * G,)](
        q, k_cmp, None if lse is None else lse.contiguous(), blocks, bounds.q, bounds.k,
        *get_strides(q, k_cmp),
        T, N, B, G, bounds.n_documents, first or None, Dk**-0.5 * kernel_names.LOG2E,
        HEADS=H // G, L=l, STRIDE=d, L_SEL=l_sel, N_SEL=n_sel,
        STRIDES=n_strides, STRIDES_PAD=at_once, REACH=reach, SPILL=spill, N_SEL_PAD=padded_width(n_sel),
        DK=Dk, DK_PAD=padded_width(Dk), COLUMNS=columns, QUERIES=tile.rows, BLOCKS=tile.keys, TF32=tf32, **tile.compile_options(),
    )
    return blocks
# fmt: on


torch.library.impl("nsa_lab::select_blocks", ("cpu", "cuda"), forward)


@torch.library.register_fake("nsa_lab::select_blocks")
def _(q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, n_sel: int, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_sel, dtype=torch.int32)


# fmt: off
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, l: int, d: int, l_sel: int, n_sel: int,
    documents: Tensor | None = None, longest: int = 0, first: int = 0,
) -> Tensor:
    """The n_sel blocks that each query and group reads: int32 [B, T, G, n_sel], ascending, distinct, then -1.

    q [B, T, H, Dk], k_cmp [B, N, G, Dk], lse float32 [B, T, H] of the compressed branch; None is for one head per group
    and l = d, which need none. Block 0, the query's own and the one before it are always in; the rest by importance in
    float32, ties to the lower index. Carries no gradient.
    With `documents` (`Span.row_bounds`; B = 1), none of more than `longest` tokens, block numbers are each document's own.
    Query 0 stands at `first`, and keys from 0 on.
    """
    with torch.no_grad():
        lse = None if lse is None else lse.detach()
        return _select_blocks(q.detach(), k_cmp.detach(), lse, l, d, l_sel, n_sel, documents, longest, first)
# fmt: on
