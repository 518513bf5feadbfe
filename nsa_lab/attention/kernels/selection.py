"""Block choice in Triton: importance of selection blocks from saved LSE, and the n_sel best (eq. 8 to 11).

One program owns a tile of queries and one group. It walks the selection blocks a few at a time, rebuilds the compressed
probabilities p = exp(score - lse) of every head, sums heads and blocks in registers, and keeps the best blocks seen so
far. Nothing larger than that tile exists at once, nothing is left to the order of execution, and nothing waits on the host.

* Forced blocks need no score: only blocks 1 .. own-2 compete, for n_sel - 3 places. Where all of them fit, none is scored.
* A place is an int64 key, score bits over inverted index. Non-negative floats order as their bits do, so the greater key is
  the better score or, at equal scores, the lower index: the tie rule is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.geometry import num_compressed
from nsa_lab.attention.kernels.common import LOG2E, ceil_div, check_attention_inputs, padded_width, with_short_rows
from nsa_lab.config import NSAConfig

_LOG2E = tl.constexpr(LOG2E)
ABSENT = tl.constexpr(0x7FFFFFFF)
"""Sorts after every block index."""
N_SEL_LIMIT = 64
STRIDES_LIMIT = 16


class Tile(NamedTuple):
    """Queries and selection blocks of a step; `registers` caps a thread's, so that more tiles share a multiprocessor."""

    queries: int
    blocks: int
    warps: int
    stages: int
    registers: int | None = None


def choice_tile(dtype: torch.dtype, width: int, strides: int, n_selection: int) -> Tile:
    """A step scores blocks * strides compressed keys. Measured on one H200 (docs/decisions.md)."""
    if dtype == torch.float32:
        return Tile(32, max(64 // strides, 4), 4, 1)
    return Tile(64, max(128 // strides, 4), 4, 3, 168 if n_selection > 256 and width <= 64 else None)


def _compiles_tf32_moves() -> bool:
    """Triton 3.2 divides by zero on such products, and the process ends: on sm_80 always, elsewhere for float32 inputs."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@triton.jit
def _add_shifted(total, x, step: tl.constexpr, BLOCKS: tl.constexpr, TF32: tl.constexpr):
    """total[:, j] + x[:, j - step], float32 [Q, BLOCKS]; x finite.

    A product with a 0/1 matrix: it leaves the result in the layout that the scores have, where a gather or a scan would
    move every later reduction to a slower one. Three parts of at most 11 bits make it exact in the tensor cores' tf32;
    without TF32 it is one product, slower and as exact.
    """
    column = tl.arange(0, BLOCKS)
    move = (column[:, None] + step == column[None, :]).to(tl.float32)
    if not TF32:
        return total + tl.dot(x, move, input_precision="ieee")
    high = _top_bits(x)
    middle = _top_bits(x - high)
    low = x - high - middle
    moved = tl.dot(high, move, input_precision="tf32") + tl.dot(middle, move, input_precision="tf32")
    return total + (moved + tl.dot(low, move, input_precision="tf32"))


@triton.jit
def _top_bits(x):
    """x without the 13 low bits of its mantissa: what tf32 holds."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _step_importance(
    q_base,
    k_base,
    lse_base,
    q_t,
    q_h,
    k_n,
    t,
    last_free,
    j0,
    N,
    H,
    scale,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    A: tl.constexpr,
    AP: tl.constexpr,
    C: tl.constexpr,
    SPILL: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TF32: tl.constexpr,
):
    """Importance [QUERIES, BLOCKS] of selection blocks j0 ..; the first SPILL columns lack what spills in from before j0.

    Columns of the score tile are ordered stride-major: column s*BLOCKS + jj is compressed block A*(j0+jj) + s, so that a
    sum over s stays within a thread.
    """
    column = tl.arange(0, AP * BLOCKS)
    i = (j0 + column % BLOCKS) * A + column // BLOCKS
    c = tl.arange(0, DP)
    safe = tl.minimum(tl.maximum(i, 0), N - 1)
    k_pointers = k_base + safe.to(tl.int64)[:, None] * k_n + c[None, :]
    q_pointers = q_base + t.to(tl.int64)[:, None] * q_t + c[None, :]
    k = tl.load(k_pointers) if D == DP else tl.load(k_pointers, mask=c[None, :] < D, other=0.0)
    weight = tl.zeros([QUERIES, AP * BLOCKS], tl.float32)
    for head in range(h):
        q = tl.load(q_pointers) if D == DP else tl.load(q_pointers, mask=c[None, :] < D, other=0.0)
        lse2 = tl.load(lse_base + t.to(tl.int64) * H + head) * _LOG2E
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        weight += tl.math.exp2(s * scale - lse2[:, None])
        q_pointers += q_h
    if SPILL > 1:
        # Only a block longer than l_sel + d reaches past what every competing query sees.
        seen = (i[None, :] >= 0) & (i[None, :] * STRIDE + L - 1 <= t[:, None])
        weight = tl.where(seen, weight, 0.0)

    by_stride = tl.reshape(weight, [QUERIES, AP, BLOCKS])
    s = tl.arange(0, AP)
    own = tl.where(s < A, tl.minimum(s + C, A) - s, 0).to(tl.float32)
    importance = tl.sum(by_stride * own[None, :, None], 1)
    jj = tl.arange(0, BLOCKS)
    for step in tl.static_range(1, SPILL + 1):
        # Strides of block s that fall in the selection block `step` further on.
        reach = tl.maximum(tl.minimum(s + C, (step + 1) * A) - step * A, 0)
        spilled = tl.sum(by_stride * tl.where(s < A, reach, 0).to(tl.float32)[None, :, None], 1)
        # Blocks past those that compete may hold infinities: scores of keys that their query does not see.
        spilled = tl.where(j0 + jj[None, :] <= last_free[:, None], spilled, 0.0)
        importance = _add_shifted(importance, spilled, step, BLOCKS, TF32)
    return importance


@triton.jit
def _merge(best, score, j0, n_free: tl.constexpr, BLOCKS: tl.constexpr):
    """Put those of `score` [Q, BLOCKS] (negative: no candidate) that beat the worst place into `best` int64 [Q, P]."""
    column = tl.arange(0, BLOCKS)
    worst = (tl.min(best, 1) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    beats = tl.sum((score > worst[:, None]).to(tl.int32), 1)
    rounds = tl.minimum(tl.max(beats, 0), n_free)
    for _ in range(rounds):
        top = tl.max(score, 1)
        at = tl.min(tl.where(score == top[:, None], column[None, :], BLOCKS), 1)
        key = (top.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ((at + j0) ^ ABSENT).to(tl.int64)
        score = tl.where(column[None, :] == at[:, None], -1.0, score)
        lowest = tl.min(best, 1)
        best = tl.where((best == lowest[:, None]) & ((key > lowest) & (top >= 0.0))[:, None], key[:, None], best)
    return best


@triton.jit(do_not_specialize=("T", "N", "B", "G"))
def _select_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    out_ptr,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_g,
    T,
    N,
    B,
    G,
    scale,
    h: tl.constexpr,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    L_SEL: tl.constexpr,
    N_SEL: tl.constexpr,
    A: tl.constexpr,
    AP: tl.constexpr,
    C: tl.constexpr,
    SPILL: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TF32: tl.constexpr,
):
    # The last queries have most candidates: start them first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // (B * G)
    bg = tl.program_id(0) % (B * G)
    b = (bg // G).to(tl.int64)
    g = (bg % G).to(tl.int64)
    t = tl.minimum(tile * QUERIES + tl.arange(0, QUERIES), T - 1)
    own = t // L_SEL
    n_free: tl.constexpr = N_SEL - 3
    place = tl.arange(0, PLACES)

    # Empty places carry the bits of -1.0, below every score, and differ in the index half. Places past n_free never fall.
    empty = (tl.full([PLACES], -1.0, tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32) | place.to(tl.int64)
    best = tl.where(place < n_free, empty, 0x7FFFFFFFFFFFFFFF)
    best = tl.broadcast_to(best[None, :], [QUERIES, PLACES])
    stop = tl.minimum(tile * QUERIES + QUERIES - 1, T - 1) // L_SEL - 1
    if (stop - 1 > n_free) & (n_free > 0):
        column = tl.arange(0, BLOCKS)
        first = 1 - SPILL
        for j0 in range(first, stop - SPILL, BLOCKS - SPILL):
            score = _step_importance(
                q_ptr + b * q_b + g * h * q_h,
                k_ptr + b * k_b + g * k_g,
                lse_ptr + (b * T * G + g) * h,
                q_t,
                q_h,
                k_n,
                t,
                own - 2,
                j0,
                N,
                G * h,
                scale,
                h,
                L,
                STRIDE,
                A,
                AP,
                C,
                SPILL,
                D,
                DP,
                QUERIES,
                BLOCKS,
                TF32,
            )
            j = j0 + column
            competes = ((column >= SPILL) & (j >= 1))[None, :] & (j[None, :] <= own[:, None] - 2)
            # A NaN score ranks as zero, so that what is chosen stays a valid set.
            score = tl.where(competes, tl.where(score > 0.0, score, 0.0), -1.0)
            best = _merge(best, score, j0, n_free, BLOCKS)
        chosen = tl.where(best >= 0, (best & ABSENT).to(tl.int32) ^ ABSENT, ABSENT)
    else:
        chosen = tl.where(place[None, :] + 1 <= own[:, None] - 2, place[None, :] + 1, ABSENT)

    forced = tl.where(place[None, :] == n_free, 0, own[:, None] + n_free + 1 - place[None, :])
    # Places n_free .. n_free+2: block 0, own, own-1; the latter two only where they are blocks of their own.
    exists = (place[None, :] == n_free) | (forced >= 1)
    chosen = tl.where(place[None, :] < n_free, chosen, tl.where(exists & (place[None, :] < N_SEL), forced, ABSENT))
    chosen = tl.sort(chosen, dim=1)
    rows = (b * T + t) * G + g
    live = tile * QUERIES + tl.arange(0, QUERIES) < T
    tl.store(
        out_ptr + rows[:, None] * N_SEL + place[None, :],
        tl.where(chosen == ABSENT, -1, chosen),
        mask=live[:, None] & (place[None, :] < N_SEL),
    )


# Defined by schema for the host's sake; selected.py has the figures.
torch.library.define(
    "nsa_lab::select_blocks",
    "(Tensor q, Tensor k_cmp, Tensor lse, int l, int d, int l_sel, int n_sel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_select_blocks = torch.ops.nsa_lab.select_blocks.default


def forward(q: Tensor, k_cmp: Tensor, lse: Tensor, l: int, d: int, l_sel: int, n_sel: int) -> Tensor:
    """`select_blocks` itself, past its checks and PyTorch's dispatcher."""
    B, T, H, D = q.shape
    N, G = k_cmp.shape[1], k_cmp.shape[2]
    q, k_cmp = with_short_rows(q), with_short_rows(k_cmp)
    out = q.new_empty(B, T, G, n_sel, dtype=torch.int32)
    strides, reach = l_sel // d, l // d
    spill = -(-(reach - 1) // strides)
    padded = padded_width(strides)
    tile = choice_tile(q.dtype, D, padded, ceil_div(T, l_sel))
    blocks = max(tile.blocks, padded_width(2 * spill), 16)  # 16: the least a tensor core takes
    _select_kernel[(ceil_div(T, tile.queries) * B * G,)](
        q,
        k_cmp,
        lse.contiguous(),
        out,
        *q.stride()[:3],
        *k_cmp.stride()[:3],
        T,
        N,
        B,
        G,
        D**-0.5 * LOG2E,
        h=H // G,
        L=l,
        STRIDE=d,
        L_SEL=l_sel,
        N_SEL=n_sel,
        A=strides,
        AP=padded,
        C=reach,
        SPILL=spill,
        PLACES=padded_width(n_sel),
        D=D,
        DP=padded_width(D),
        QUERIES=tile.queries,
        BLOCKS=blocks,
        TF32=_compiles_tf32_moves(),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
    )
    return out


torch.library.impl("nsa_lab::select_blocks", ("cpu", "cuda"), forward)


@torch.library.register_fake("nsa_lab::select_blocks")
def _(q, k_cmp, lse, l, d, l_sel, n_sel):
    return q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_sel, dtype=torch.int32)


def check_limits(q: Tensor, nsa: NSAConfig) -> None:
    """Raise NotImplementedError for a geometry past the kernel's limits."""
    if nsa.n_sel > N_SEL_LIMIT:
        raise NotImplementedError(
            f"select_blocks: the Triton kernel keeps at most {N_SEL_LIMIT} blocks, and nsa.n_sel = {nsa.n_sel}"
        )
    if nsa.l_sel // nsa.d > STRIDES_LIMIT or nsa.l // nsa.d > 4 * STRIDES_LIMIT:
        raise NotImplementedError(
            f"select_blocks: the Triton kernel takes l_sel <= {STRIDES_LIMIT} d and l <= {4 * STRIDES_LIMIT} d; "
            f"nsa.l, d, l_sel = {nsa.l}, {nsa.d}, {nsa.l_sel}"
        )


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig) -> Tensor:
    """The n_sel blocks that each query and group reads: int32 [B, T, G, n_sel], ascending, distinct, then -1.

    q [B, T, H, Dk], k_cmp [B, N, G, Dk], lse float32 [B, T, H] from `compressed_attention`. Block 0, the query's own and
    the one before it are always in; the rest by importance in float32, ties to the lower index. Carries no gradient.
    ValueError for shapes that do not fit, NotImplementedError past the kernels' limits.
    """
    check_attention_inputs("select_blocks", q, k_cmp, k_cmp, num_compressed(q.shape[1], nsa))
    check_limits(q, nsa)
    if lse.shape != q.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(f"select_blocks: expected lse float32 {list(q.shape[:3])}, got {lse.dtype} {list(lse.shape)}")
    with torch.no_grad():
        return _select_blocks(q.detach(), k_cmp.detach(), lse.detach(), nsa.l, nsa.d, nsa.l_sel, nsa.n_sel)
