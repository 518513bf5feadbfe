"""Compress the blocks that new tokens complete (eq. 7, phi avg and pool). launch.py launches this kernel."""

# Parameters of triton.jit functions have no Python types.
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
    """Load the rows of `tokens` from the ring, float32 [tokens, columns]; rows that are not `inside` are zero."""
    slots = (tokens % raw_ring).to(tl.int64)
    mask = inside[:, None] & (columns < width)[None, :]
    return tl.load(raw_base + slots[:, None] * stride_n + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def compute_pool_weights(
    x, score_ptr, bias_ptr, inside, columns, width, L: tl.constexpr, L_PAD: tl.constexpr, PAD: tl.constexpr
):
    """Return the weights [L_PAD, PAD] of the tokens of a block x: softmax over tokens of score @ token + bias."""
    i, inner = tl.arange(0, L_PAD), tl.arange(0, PAD)
    square = (columns < width)[:, None] & (inner < width)[None, :]
    score = tl.load(score_ptr + columns[:, None] * width + inner[None, :], mask=square, other=0.0).to(tl.float32)
    exists = inside[:, None] & (columns < width)[None, :]
    weights = tl.load(bias_ptr + columns[None, :] * L + i[:, None], mask=exists, other=0.0).to(tl.float32)
    for token in range(L):
        is_token = (i == token)[:, None]
        token_x = tl.sum(tl.where(is_token, x, 0.0), 0)
        weights += tl.where(is_token, tl.sum(score * token_x[None, :], 1)[None, :], 0.0)
    weights = tl.where(exists, weights, float("-inf"))
    weights = tl.exp2((weights - tl.max(tl.where(exists, weights, -3.0e38), 0)[None, :]) * LOG2E)
    return weights / tl.maximum(tl.sum(weights, 0), 1e-38)[None, :]


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_compress_update(
    k_raw_ptr, v_raw_ptr, k_ptr, v_ptr, k_score_ptr, v_score_ptr, k_bias_ptr, v_bias_ptr, lengths_ptr,
    stride_krb, stride_krn, stride_krg, stride_kb, stride_kn, stride_kg,
    stride_vrb, stride_vrn, stride_vrg, stride_vb, stride_vn, stride_vg,
    T, N, raw_ring, G,
    L: tl.constexpr, L_PAD: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Compress the keys or values of one block that T new tokens may complete, of one sequence and group.

    N is the number of blocks that fit in the cache. The tokens are already in the rings. Without scores, phi is the mean.
    """
    b, g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    before = tl.load(lengths_ptr + b)
    pdl_wait(USE_PDL)
    block = count_visible_keys(before - 1, L, STRIDE) + tl.program_id(1)
    if block >= tl.minimum(count_visible_keys(before + T - 1, L, STRIDE), N):
        return
    raw_base, target, width = k_raw_ptr + b * stride_krb + g * stride_krg, k_ptr + b * stride_kb + g * stride_kg, DK
    stride_rn, stride_n = stride_krn, stride_kn
    score_ptr = k_score_ptr
    bias_ptr = k_bias_ptr
    if v_ptr is not None:
        is_value = tl.program_id(2) == 1
        raw_base = tl.where(is_value, v_raw_ptr + b * stride_vrb + g * stride_vrg, raw_base)
        target, width = tl.where(is_value, v_ptr + b * stride_vb + g * stride_vg, target), tl.where(is_value, DV, DK)
        stride_rn, stride_n = tl.where(is_value, stride_vrn, stride_krn), tl.where(is_value, stride_vn, stride_kn)
        if k_score_ptr is not None:
            score_ptr = tl.where(is_value, v_score_ptr, k_score_ptr)
            bias_ptr = tl.where(is_value, v_bias_ptr, k_bias_ptr)
    i, columns = tl.arange(0, L_PAD), tl.arange(0, PAD)
    x = load_tokens(raw_base, stride_rn, raw_ring, block * STRIDE + i, i < L, columns, width)
    if k_score_ptr is None:
        x = tl.sum(x, 0) / L
    else:
        x = tl.sum(x * compute_pool_weights(x, score_ptr, bias_ptr, i < L, columns, width, L, L_PAD, PAD), 0)
    tl.store(target + block.to(tl.int64) * stride_n + columns, x.to(k_ptr.dtype.element_ty), mask=columns < width)
# fmt: on
