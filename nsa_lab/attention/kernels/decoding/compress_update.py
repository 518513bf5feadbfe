"""Compress the blocks that new tokens complete (eq. 7, phi avg and pool). launch.py launches these kernels.

One kernel writes keys and values of the compressed branch. The other writes index keys, whose pooled values can be
normalized, rotated and stored in 8 or 4 bits.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# The outer of two nested `if`s is evaluated at compile time, so that code for absent inputs is not compiled.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention import key_storage
from nsa_lab.attention.kernels import stored_keys
from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import LOG2E as LOG2E_FLOAT
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.config.model_config import MXFP4_BLOCK

LOG2E = tl.constexpr(LOG2E_FLOAT)


FP8, MXFP4 = tl.constexpr(stored_keys.FP8.value), tl.constexpr(stored_keys.MXFP4.value)
SCALED_CHANNELS, NAN_SCALE = tl.constexpr(MXFP4_BLOCK), tl.constexpr(key_storage.NAN_SCALE)
MIN_SCALE, MAX_SCALE = tl.constexpr(key_storage.MIN_SCALE), tl.constexpr(key_storage.MAX_SCALE)
FP8_MAX = tl.constexpr(key_storage.FP8_MAX)


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


@triton.jit
def round_to_even(x):
    """Return x, float32 from 0 to 2 ** 22, rounded to an integer; ties go to the even one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_fp8(x):
    """Return the e4m3 codes, int32, of float32 values; saturated."""
    bits = x.to(tl.int32, bitcast=True)
    is_nan, sign = (bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 24) & 128
    magnitude = tl.minimum(tl.abs(tl.where(is_nan, 0.0, x)), FP8_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = round_to_even(magnitude * 512.0).to(tl.int32)
    return sign | tl.where(is_nan, 127, tl.where(magnitude < 0.015625, subnormal, normal))


@triton.jit
def encode_mxfp4(x, scale):
    """Return the e2m1 codes, int32, of float32 values with these scales, int32 and biased by 127."""
    magnitude = tl.abs(x) * ((254 - scale) << 23).to(tl.float32, bitcast=True)
    large = tl.where(magnitude < 4.0, 2.0 + round_to_even(magnitude), 4.0 + round_to_even(magnitude * 0.5))
    code = tl.where(magnitude < 2.0, round_to_even(magnitude * 2.0), tl.minimum(large, 7.0)).to(tl.int32)
    return tl.where(scale == NAN_SCALE, 0, code + tl.where(x < 0.0, 8, 0))


@triton.jit
def pool_columns(
    raw_base, stride_rn, raw_ring, first, all_columns, score_ptr, bias_ptr, columns, DK: tl.constexpr, L: tl.constexpr,
    L_PAD: tl.constexpr, PAD: tl.constexpr,
):
    """Return these columns of the pooled tokens of a block, float32 [PAD]. `all_columns`: the block, [L_PAD, PAD]."""
    i = tl.arange(0, L_PAD)
    x = load_tokens(raw_base, stride_rn, raw_ring, first + i, i < L, columns, DK)
    if score_ptr is None:
        x = tl.sum(x, 0) / L
    else:
        x = tl.sum(x * compute_pool_weights(all_columns, score_ptr, bias_ptr, i < L, columns, DK, L, L_PAD, PAD), 0)
    return x


@triton.jit
def normalize(x, columns, partner, partners, norm_ptr, eps, DK: tl.constexpr):
    """Return x / rms(x) * weight, float32, and its channels `partners`, given as `partner` before; x is 0 in padding."""
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DK + eps)
    weight = tl.load(norm_ptr + columns, mask=columns < DK, other=0.0).to(tl.float32)
    partner_weight = tl.load(norm_ptr + partners, mask=partners < DK, other=0.0).to(tl.float32)
    return x * inverse * weight, partner * inverse * partner_weight


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_index_update(
    raw_ptr, k_ptr, score_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, lengths_ptr,
    stride_rb, stride_rn, stride_rg, stride_kb, stride_kn, stride_kg, stride_at, stride_ap,
    T, N, n_angles, raw_ring, G, eps,
    L: tl.constexpr, L_PAD: tl.constexpr, HALF: tl.constexpr, NORM_FIRST: tl.constexpr, FORMAT: tl.constexpr,
    DK: tl.constexpr, PAD: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Write the index key of one block of L tokens that T new tokens may complete, of one sequence and group.

    The tokens are pooled, normalized (if `norm_ptr` is given), rotated to the position of the first token (if `cos_ptr` is)
    and stored in a format of `stored_keys`. NORM_FIRST: the norm is before the rotation. Every step is rounded to the dtype
    of the tokens, as in a forward pass.
    """
    b, g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    before = tl.load(lengths_ptr + b)
    pdl_wait(USE_PDL)
    block = count_visible_keys(before - 1, L, L) + tl.program_id(1)
    if block >= tl.minimum(count_visible_keys(before + T - 1, L, L), N):
        return
    raw_base = raw_ptr + b * stride_rb + g * stride_rg
    target = k_ptr + b * stride_kb + g * stride_kg + block.to(tl.int64) * stride_kn
    dtype = raw_ptr.dtype.element_ty
    # The two halves of a row are adjacent to the middle of the tile, because MXFP4 packs channels c and c + DK / 2.
    index = tl.arange(0, PAD)
    in_half = index % (PAD // 2)
    columns = tl.where(in_half < DK // 2, in_half + tl.where(index < PAD // 2, 0, DK // 2), DK)
    is_first_half = columns < HALF
    partners = tl.where(is_first_half, columns + HALF, tl.where(columns < 2 * HALF, columns - HALF, DK))
    i = tl.arange(0, L_PAD)
    tokens = load_tokens(raw_base, stride_rn, raw_ring, block * L + i, i < L, index, DK)
    x = pool_columns(
        raw_base, stride_rn, raw_ring, block * L, tokens, score_ptr, bias_ptr, columns, DK, L, L_PAD, PAD
    ).to(dtype).to(tl.float32)
    partner = tl.zeros([PAD], tl.float32)
    if cos_ptr is not None:
        partner = pool_columns(
            raw_base, stride_rn, raw_ring, block * L, tokens, score_ptr, bias_ptr, partners, DK, L, L_PAD, PAD
        ).to(dtype).to(tl.float32)
    if NORM_FIRST:
        x, partner = normalize(x, columns, partner, partners, norm_ptr, eps, DK)
        x, partner = x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)
    if cos_ptr is not None:
        is_rotated = columns < 2 * HALF
        pair = tl.where(is_first_half, columns, columns - HALF)
        angle = tl.minimum(block * L, n_angles - 1) * stride_at + pair * stride_ap
        cos = tl.load(cos_ptr + angle, mask=is_rotated, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=is_rotated, other=0.0)
        x = (x * cos + tl.where(is_first_half, -partner, partner) * sin).to(dtype).to(tl.float32)
    if norm_ptr is not None:
        if not NORM_FIRST:
            x, _ = normalize(x, columns, partner, partners, norm_ptr, eps, DK)
            x = x.to(dtype).to(tl.float32)
    if FORMAT == MXFP4:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scales = tl.zeros([PAD], tl.int32)
        for group in tl.static_range((DK + SCALED_CHANNELS - 1) // SCALED_CHANNELS):
            is_own = (columns // SCALED_CHANNELS == group) & (columns < DK)
            exponent = tl.max(tl.where(is_own, bits, 0), 0) >> 23
            scale = tl.minimum(tl.maximum(exponent - 2, MIN_SCALE), MAX_SCALE)
            scale = tl.where(exponent == NAN_SCALE, NAN_SCALE, scale)
            tl.store(target + DK // 2 + group, scale.to(tl.uint8))
            scales = tl.where(is_own, scale, scales)
        code = encode_mxfp4(x, scales)
        # The upper half has the four high bits of each byte.
        packed = tl.sum(tl.reshape(code << tl.where(index < PAD // 2, 0, 4), [2, PAD // 2]), 0)
        byte = tl.arange(0, PAD // 2)
        tl.store(target + byte, packed.to(tl.uint8), mask=byte < DK // 2)
    elif FORMAT == FP8:
        tl.store(target + columns, encode_fp8(x).to(tl.uint8), mask=columns < DK)
    else:
        tl.store(target + columns, x.to(dtype), mask=columns < DK)
# fmt: on
