"""Attention mass of blocks for sampled queries: the probability of each block under softmax attention, and its gradient.

The selection loss compares the mass of the selected branch's keys with the mass of an indexer's keys, for a few queries
of a long text. Each query sees the keys of its document up to its position, and blocks start at its document, so two
queries can divide the same keys differently. One program therefore handles the heads of one query in one group, as in
decoding:

* forward: the peak of the scores of each block, and the sum of exp(score - peak). A logarithm of the sum would round the
  mass once more, and the loss subtracts masses that are nearly equal;
* gradient of the queries: partial sums over parts of the keys, summed in a fixed order;
* gradient of the keys: one program per tile of keys loops over all sampled queries.

The gradient of a score is its probability within its block times mass * (dmass - sum(mass * dmass)) of the block.

A key that is not finite makes the rows that see it NaN, and no others, as in `nsa_lab.attention.selection_loss`.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# The decorators of torch.library have no type annotations.
# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import LOG2E, UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.launch_utils import (
    ceil_div,
    get_strides,
    make_rows_contiguous,
    padded_width,
    register_autograd,
)
from nsa_lab.attention.kernels.tiles import add_product, get_batch_and_group, load_rows_masked


# fmt: off
@triton.jit
def _load_finite(base, offsets, columns, inside, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Load rows; return (rows with 0 in place of values that are not finite, [rows] 0 or NaN if a value is not finite)."""
    x = load_rows_masked(base, offsets, columns, inside, WIDTH, STOP)
    values = x.to(tl.float32)
    is_finite = tl.abs(values) < float("inf")
    marker = tl.sum(tl.where(is_finite, 0.0, float("nan")), 1)
    return tl.where(is_finite, values, 0.0).to(x.dtype), marker


@triton.jit
def _load_keys_of_block(
    k_base, stride_kn, first, j, s0, n_visible, KEYS_PER_BLOCK: tl.constexpr, KEYS: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr,
):
    """Return (keys s0, s0 + 1, ... of block j, their markers, mask of those that the query sees)."""
    s = s0 + tl.arange(0, KEYS)
    n = j * KEYS_PER_BLOCK + s
    seen = (s < KEYS_PER_BLOCK) & (n < n_visible)
    offsets = (first + n).to(tl.int64) * stride_kn
    k, marker = _load_finite(k_base, offsets, tl.arange(0, DK_PAD), seen, DK, DK_PAD)
    return k, marker, seen


@triton.jit
def _compute_scores(q, q_marker, k, k_marker, seen, scale_log2):
    """Return scores [rows, keys] in units of log2; -inf for keys that are not seen."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    return tl.where(seen, scores + q_marker[:, None] + k_marker[None, :], float("-inf"))


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selection_loss_forward(
    q_ptr, k_ptr, first_key_ptr, n_visible_ptr, peak_ptr, total_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, B, G, n_blocks, scale_log2,
    HEADS: tl.constexpr, KEYS_PER_BLOCK: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Compute peak and total of BLOCKS blocks for the heads of one query in one group.

    Query r sees the keys `first_key[r]` .. `first_key[r] + n_visible[r] - 1`. The peak is the largest score in units of
    log2, and the total is the sum of 2 ** (score - peak). Stores float32 [B, T, H, n_blocks]; -inf and 0 for a block
    without visible keys.
    """
    b, g = get_batch_and_group(B, G)
    r = (tl.program_id(0) // (B * G)).to(tl.int64)
    first, n_visible = tl.load(first_key_ptr + r), tl.load(n_visible_ptr + r)
    head = tl.arange(0, ROWS)
    q_base = q_ptr + b * stride_qb + r * stride_qt + g * HEADS * stride_qh
    q, q_marker = _load_finite(q_base, head * stride_qh, tl.arange(0, DK_PAD), head < HEADS, DK, DK_PAD)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    out = ((b * T + r) * (G * HEADS) + g * HEADS + head) * n_blocks
    first_block = tl.program_id(1) * BLOCKS
    stop = tl.minimum(first_block + BLOCKS, n_blocks)
    last_block = tl.minimum(tl.cdiv(n_visible, KEYS_PER_BLOCK), stop)
    for j in range(first_block, last_block):
        peak, total = tl.full([ROWS], -3.0e38, tl.float32), tl.zeros([ROWS], tl.float32)
        # Unrolled, so that the loop over blocks is the innermost one, and keys are loaded ahead.
        for s0 in tl.static_range(0, KEYS_PER_BLOCK, KEYS):
            k, k_marker, seen = _load_keys_of_block(
                k_base, stride_kn, first, j, s0, n_visible, KEYS_PER_BLOCK, KEYS, DK, DK_PAD
            )
            scores = _compute_scores(q, q_marker, k, k_marker, seen[None, :], scale_log2)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None]), 1)
            peak = new_peak
        tl.store(peak_ptr + out + j, tl.where(total == 0.0, float("-inf"), peak), mask=head < HEADS)
        tl.store(total_ptr + out + j, total, mask=head < HEADS)
    for j in range(tl.maximum(first_block, last_block), stop):
        tl.store(peak_ptr + out + j, tl.full([ROWS], float("-inf"), tl.float32), mask=head < HEADS)
        tl.store(total_ptr + out + j, tl.zeros([ROWS], tl.float32), mask=head < HEADS)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selection_loss_dq(
    q_ptr, k_ptr, first_key_ptr, n_visible_ptr, peak_ptr, weight_ptr, part_dq_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, B, G, n_blocks, scale_log2,
    HEADS: tl.constexpr, KEYS_PER_BLOCK: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Compute the gradient of the heads of one query in one group from BLOCKS blocks, without the softmax scale.

    `peak` of the forward pass, and `weight`, the gradient of a score with the value of the peak: float32
    [B, T, H, n_blocks]. Stores float32 [parts, B, T, H, DK].
    """
    b, g = get_batch_and_group(B, G)
    r = (tl.program_id(0) // (B * G)).to(tl.int64)
    first, n_visible = tl.load(first_key_ptr + r), tl.load(n_visible_ptr + r)
    head, columns = tl.arange(0, ROWS), tl.arange(0, DK_PAD)
    inside = head < HEADS
    q_base = q_ptr + b * stride_qb + r * stride_qt + g * HEADS * stride_qh
    q, q_marker = _load_finite(q_base, head * stride_qh, columns, inside, DK, DK_PAD)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    row = (b * T + r) * (G * HEADS) + g * HEADS + head
    first_block = tl.program_id(1) * BLOCKS
    last_block = tl.minimum(tl.cdiv(n_visible, KEYS_PER_BLOCK), first_block + BLOCKS)
    dq = tl.zeros([ROWS, DK_PAD], tl.float32)
    for j in range(first_block, last_block):
        peak = tl.load(peak_ptr + row * n_blocks + j, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + row * n_blocks + j, mask=inside, other=0.0)
        for s0 in tl.static_range(0, KEYS_PER_BLOCK, KEYS):
            k, k_marker, seen = _load_keys_of_block(
                k_base, stride_kn, first, j, s0, n_visible, KEYS_PER_BLOCK, KEYS, DK, DK_PAD
            )
            scores = _compute_scores(q, q_marker, k, k_marker, seen[None, :], scale_log2)
            ds = tl.where(seen[None, :], tl.exp2(scores - peak[:, None]) * weight[:, None], 0.0)
            dq = add_product(dq, ds.to(k.dtype), k)
    part_row = tl.program_id(1) * (B * T * G * HEADS).to(tl.int64) + row
    tl.store(part_dq_ptr + part_row[:, None] * DK + columns[None, :], dq, mask=inside[:, None] & (columns < DK)[None, :])


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selection_loss_dk(
    q_ptr, k_ptr, first_key_ptr, n_visible_ptr, peak_ptr, weight_ptr, dk_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg,
    T, N, B, G, n_blocks, scale, scale_log2,
    HEADS: tl.constexpr, KEYS_PER_BLOCK: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """Compute the gradient of KEYS keys of one group from all sampled queries. Stores [B, N, G, DK] in the dtype of k."""
    b, g = get_batch_and_group(B, G)
    n = tl.program_id(0) // (B * G) * KEYS + tl.arange(0, KEYS)
    columns, exists = tl.arange(0, DK_PAD), n < N
    k_base = k_ptr + b * stride_kb + g * stride_kg
    k, k_marker = _load_finite(k_base, n.to(tl.int64) * stride_kn, columns, exists, DK, DK_PAD)
    dk = tl.zeros([KEYS, DK_PAD], tl.float32)
    for first_row in range(0, T * HEADS, ROWS):
        row = first_row + tl.arange(0, ROWS)
        inside = row < T * HEADS
        r, head = (row // HEADS).to(tl.int64), row % HEADS
        first = tl.load(first_key_ptr + r, mask=inside, other=0)
        n_visible = tl.load(n_visible_ptr + r, mask=inside, other=0)
        position = n[None, :] - first[:, None]
        seen = (position >= 0) & (position < n_visible[:, None]) & exists[None, :]
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
            q, q_marker = _load_finite(q_base, r * stride_qt + head * stride_qh, columns, inside, DK, DK_PAD)
            index = (b * T + r) * (G * HEADS) + g * HEADS + head
            offsets, is_loaded = index[:, None] * n_blocks + position // KEYS_PER_BLOCK, seen & inside[:, None]
            peak = tl.load(peak_ptr + offsets, mask=is_loaded, other=0.0)
            weight = tl.load(weight_ptr + offsets, mask=is_loaded, other=0.0)
            scores = _compute_scores(q, q_marker, k, k_marker, seen, scale_log2)
            ds = tl.where(seen, tl.exp2(scores - peak) * weight, 0.0)
            dk = add_product(dk, tl.trans(ds.to(q.dtype)), q)
    dk_rows = ((b * N + n) * G + g) * DK
    tl.store(
        dk_ptr + dk_rows[:, None] + columns[None, :], (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=exists[:, None] & (columns < DK)[None, :],
    )
# fmt: on


# Defined by schema to save host time; see selected/launch.py for the measurement.
torch.library.define(
    "nsa_lab::block_mass",
    "(Tensor q, Tensor k, Tensor first_key, Tensor n_visible, int keys_per_block, int n_blocks)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::block_mass_backward",
    "(Tensor dmass, Tensor mass, Tensor peak, Tensor total, Tensor q, Tensor k, Tensor first_key, Tensor n_visible,"
    " int keys_per_block) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_block_mass = torch.ops.nsa_lab.block_mass.default
_block_mass_backward = torch.ops.nsa_lab.block_mass_backward.default


def _get_launch_args(q: Tensor, k: Tensor, keys_per_block: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return (grid of one query and group per program, compile-time sizes) of the kernels with one program per query."""
    B, R, H, Dk = q.shape
    G = k.shape[2]
    tile = launch_table.block_mass(q.dtype, Dk, keys_per_block)
    constants = {
        "HEADS": H // G, "KEYS_PER_BLOCK": keys_per_block, "DK": Dk, "DK_PAD": padded_width(Dk),
        "ROWS": max(padded_width(H // G), 16), "KEYS": tile.keys, "BLOCKS": launch_table.BLOCK_MASS_BLOCKS,
    }  # fmt: skip
    return (B * R * G,), {**constants, **tile.compile_options()}


@torch.library.impl("nsa_lab::block_mass", ("cpu", "cuda"))
def _(
    q: Tensor, k: Tensor, first_key: Tensor, n_visible: Tensor, keys_per_block: int, n_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    (B, R, H, Dk), G = q.shape, k.shape[2]
    q, k = make_rows_contiguous(q), make_rows_contiguous(k)
    peak, total = (q.new_empty(B, R, H, n_blocks, dtype=torch.float32) for _ in range(2))
    grid, constants = _get_launch_args(q, k, keys_per_block)
    nsa_selection_loss_forward[(*grid, ceil_div(n_blocks, launch_table.BLOCK_MASS_BLOCKS))](
        q, k, first_key, n_visible, peak, total, *get_strides(q, k), R, B, G, n_blocks, Dk**-0.5 * LOG2E, **constants
    )  # fmt: skip
    # A query that sees no key has mass 0.
    row_peak = peak.amax(-1, keepdim=True)
    mass = total * (peak - row_peak.masked_fill(row_peak.isneginf(), 0)).exp2_()
    row_total = mass.sum(-1, keepdim=True)
    return mass.div_(row_total.masked_fill(row_total == 0, 1)), peak, total


def _fake(
    q: Tensor, k: Tensor, first_key: Tensor, n_visible: Tensor, keys_per_block: int, n_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    mass = q.new_empty(*q.shape[:3], n_blocks, dtype=torch.float32)
    return mass, torch.empty_like(mass), torch.empty_like(mass)


torch.library.register_fake("nsa_lab::block_mass", _fake)


@torch.library.impl("nsa_lab::block_mass_backward", ("cpu", "cuda"))
def _(
    dmass: Tensor, mass: Tensor, peak: Tensor, total: Tensor, q: Tensor, k: Tensor, first_key: Tensor, n_visible: Tensor,
    keys_per_block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (B, R, H, Dk), (N, G), n_blocks = q.shape, k.shape[1:3], mass.shape[3]
    q, k = make_rows_contiguous(q), make_rows_contiguous(k)
    weight = mass * (dmass - (mass * dmass).sum(-1, keepdim=True)) / total.masked_fill(total == 0, 1)
    grid, constants = _get_launch_args(q, k, keys_per_block)
    parts, scale = ceil_div(n_blocks, launch_table.BLOCK_MASS_BLOCKS), Dk**-0.5
    part_dq, dk = q.new_empty(parts, *q.shape, dtype=torch.float32), k.new_empty(B, N, G, Dk)
    tensors = q, k, first_key, n_visible, peak, weight
    nsa_selection_loss_dq[(*grid, parts)](
        *tensors, part_dq, *get_strides(q, k), R, B, G, n_blocks, scale * LOG2E, **constants
    )  # fmt: skip
    tile = launch_table.block_mass_dk(q.dtype, Dk)
    nsa_selection_loss_dk[(ceil_div(N, tile.keys) * B * G,)](
        *tensors, dk, *get_strides(q, k), R, N, B, G, n_blocks, scale, scale * LOG2E,
        HEADS=H // G, KEYS_PER_BLOCK=keys_per_block, DK=Dk, DK_PAD=padded_width(Dk), ROWS=tile.rows, KEYS=tile.keys,
        **tile.compile_options(),
    )  # fmt: skip
    return (part_dq.sum(0) * scale).to(q.dtype), dk


def _fake_backward(
    dmass: Tensor, mass: Tensor, peak: Tensor, total: Tensor, q: Tensor, k: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


torch.library.register_fake("nsa_lab::block_mass_backward", _fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, first_key, n_visible, ctx.keys_per_block, _ = inputs
    mass, peak, total = output
    ctx.mark_non_differentiable(peak, total)
    ctx.save_for_backward(mass, peak, total, q, k, first_key, n_visible)


def _autograd_backward(ctx: Any, dmass: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_block_mass_backward(dmass, *ctx.saved_tensors, ctx.keys_per_block), None, None, None, None


register_autograd("block_mass", _autograd_backward, _setup_context)


def block_mass(q: Tensor, k: Tensor, first_key: Tensor, n_visible: Tensor, keys_per_block: int, n_blocks: int) -> Tensor:
    """Return the attention mass of blocks: float32 [B, R, H, n_blocks].

    q [B, R, H, D], k [B, N, G, D]. Query r sees keys `first_key[r]` .. `first_key[r] + n_visible[r] - 1` ([R], integers),
    and its block j consists of the `keys_per_block` keys from `first_key[r] + j * keys_per_block` on. The rows of a query
    that sees no key are 0. Gradients reach q and k.
    """
    mass, *_ = _block_mass(q, k, first_key, n_visible, keys_per_block, n_blocks)
    return mass
