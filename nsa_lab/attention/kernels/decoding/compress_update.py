"""The blocks that new tokens complete, compressed (eq. 7, phi avg and pool). launch.py launches this kernel."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import LOG2E as LOG2E_FLOAT
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS

LOG2E = tl.constexpr(LOG2E_FLOAT)


# fmt: off
@triton.jit
def load_tokens(raw_base, stride_n, raw_ring, tokens, inside, columns, width):
    """Rows of the ring that hold `tokens`, float32 [tokens, columns]; those that are not `inside` are zero."""
    slots = (tokens % raw_ring).to(tl.int64)
    mask = inside[:, None] & (columns < width)[None, :]
    return tl.load(raw_base + slots[:, None] * stride_n + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def compute_pool_weights(x, score_ptr, place_ptr, inside, columns, width, L: tl.constexpr, L_PAD: tl.constexpr, PAD: tl.constexpr):
    """What each token of a block x [L_PAD, PAD] weighs in each channel: softmax over the block of score @ token + place."""
    i, inner = tl.arange(0, L_PAD), tl.arange(0, PAD)
    square = (columns < width)[:, None] & (inner < width)[None, :]
    score = tl.load(score_ptr + columns[:, None] * width + inner[None, :], mask=square, other=0.0).to(tl.float32)
    there = inside[:, None] & (columns < width)[None, :]
    weights = tl.load(place_ptr + columns[None, :] * L + i[:, None], mask=there, other=0.0).to(tl.float32)
    for token in range(L):
        own = (i == token)[:, None]
        across = tl.sum(tl.where(own, x, 0.0), 0)
        weights += tl.where(own, tl.sum(score * across[None, :], 1)[None, :], 0.0)
    weights = tl.where(there, weights, float("-inf"))
    weights = tl.exp2((weights - tl.max(tl.where(there, weights, -3.0e38), 0)[None, :]) * LOG2E)
    return weights / tl.maximum(tl.sum(weights, 0), 1e-38)[None, :]


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_compress_update(
    k_raw_ptr, v_raw_ptr, k_ptr, v_ptr, k_score_ptr, v_score_ptr, k_place_ptr, v_place_ptr, lengths_ptr,
    stride_krb, stride_krn, stride_krg, stride_kb, stride_kn, stride_kg,
    stride_vrb, stride_vrn, stride_vrg, stride_vb, stride_vn, stride_vg,
    T, N, raw_ring, G,
    L: tl.constexpr, L_PAD: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Keys or values of one of the blocks that T new tokens may complete, of one sequence and group; N is how many blocks
    the cache has room for. Tokens are in the rings already. Without scores phi is a mean."""
    b, g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    before = tl.load(lengths_ptr + b)
    pdl_wait(EARLY)
    block = count_visible_keys(before - 1, L, STRIDE) + tl.program_id(1)
    if block >= tl.minimum(count_visible_keys(before + T - 1, L, STRIDE), N):
        return
    raw_base, place, width = k_raw_ptr + b * stride_krb + g * stride_krg, k_ptr + b * stride_kb + g * stride_kg, DK
    stride_rn, stride_n = stride_krn, stride_kn
    score_ptr = k_score_ptr
    place_ptr = k_place_ptr
    if v_ptr is not None:
        of_values = tl.program_id(2) == 1
        raw_base = tl.where(of_values, v_raw_ptr + b * stride_vrb + g * stride_vrg, raw_base)
        place, width = tl.where(of_values, v_ptr + b * stride_vb + g * stride_vg, place), tl.where(of_values, DV, DK)
        stride_rn, stride_n = tl.where(of_values, stride_vrn, stride_krn), tl.where(of_values, stride_vn, stride_kn)
        if k_score_ptr is not None:
            score_ptr = tl.where(of_values, v_score_ptr, k_score_ptr)
            place_ptr = tl.where(of_values, v_place_ptr, k_place_ptr)
    i, columns = tl.arange(0, L_PAD), tl.arange(0, PAD)
    x = load_tokens(raw_base, stride_rn, raw_ring, block * STRIDE + i, i < L, columns, width)
    if k_score_ptr is None:
        x = tl.sum(x, 0) / L
    else:
        x = tl.sum(x * compute_pool_weights(x, score_ptr, place_ptr, i < L, columns, width, L, L_PAD, PAD), 0)
    tl.store(place + block.to(tl.int64) * stride_n + columns, x.to(k_ptr.dtype.element_ty), mask=columns < width)
# fmt: on
