"""Rotate the index queries of new tokens, and write their index keys. launch.py launches this kernel.

An index key covers a block of tokens, which are pooled. It can be normalized, rotated, and stored in 8 or 4 bits.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
# The outer of two nested `if`s is evaluated at compile time, so that code for absent inputs is not compiled.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention import key_storage
from nsa_lab.attention.kernels import stored_keys
from nsa_lab.attention.kernels.decoding.compress_update import compute_pool_weights
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.config.model_config import MXFP4_BLOCK

FP8, MXFP4 = tl.constexpr(stored_keys.FP8.value), tl.constexpr(stored_keys.MXFP4.value)
SCALED_CHANNELS, NAN_SCALE = tl.constexpr(MXFP4_BLOCK), tl.constexpr(key_storage.NAN_SCALE)
MIN_SCALE, MAX_SCALE = tl.constexpr(key_storage.MIN_SCALE), tl.constexpr(key_storage.MAX_SCALE)
FP8_MAX = tl.constexpr(key_storage.FP8_MAX)


# fmt: off
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
def find_partners(columns, HALF: tl.constexpr, DK: tl.constexpr):
    """Return the other column of the RoPE pair of each column; DK for columns that are not rotated."""
    return tl.where(columns < HALF, columns + HALF, tl.where(columns < 2 * HALF, columns - HALF, DK))


@triton.jit
def rotate(x, partner, columns, position, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, HALF: tl.constexpr):
    """Return x rotated to `position`. `partner`: x at `find_partners`. Positions past the last angle are padding."""
    pair = tl.where(columns < HALF, columns, columns - HALF)
    angle = tl.minimum(position, n_angles - 1) * stride_at + pair * stride_ap
    cos = tl.load(cos_ptr + angle, mask=columns < 2 * HALF, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=columns < 2 * HALF, other=0.0)
    return x * cos + tl.where(columns < HALF, -partner, partner) * sin


@triton.jit
def load_new_keys(
    new_base, stride_t, history_base, conv_ring, stride_history, weight_base, t, position, is_new, columns,
    DK: tl.constexpr,
):
    """Load the new keys t [tokens, 1] at `columns` [1, columns], float32; zeros where a token is not new.

    With `history_base`, a ring of earlier keys, they are convolved with the key of the previous token. `stride_history`:
    elements from one key of the ring to the next, and from one row of the weights to the next.
    """
    mask = is_new & (columns < DK)
    x = tl.load(new_base + t.to(tl.int64) * stride_t + columns, mask=mask, other=0.0).to(tl.float32)
    if history_base is not None:
        slot = (tl.maximum(position - 1, 0) % conv_ring).to(tl.int64)
        # The first token of a sequence has no previous key.
        stored = tl.load(history_base + slot * stride_history + columns, mask=mask & (t == 0) & (position > 0), other=0.0)
        previous = tl.load(new_base + (t - 1).to(tl.int64) * stride_t + columns, mask=mask & (t > 0), other=0.0)
        own_weight = tl.load(weight_base + columns, mask=columns < DK, other=0.0).to(tl.float32)
        previous_weight = tl.load(weight_base + stride_history + columns, mask=columns < DK, other=0.0).to(tl.float32)
        x = x * own_weight + (stored.to(tl.float32) + previous.to(tl.float32)) * previous_weight
    return x


@triton.jit
def load_block_tokens(
    new_base, stride_t, history_base, conv_ring, stride_history, weight_base,
    raw_base, stride_rn, raw_ring, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, t, position, is_new, is_old, columns,
    ROTATE: tl.constexpr, HALF: tl.constexpr, DK: tl.constexpr,
):
    """Return the keys of the tokens of a block at `columns`, float32 [tokens, columns], before pooling.

    New tokens are convolved, rotated with ROTATE, and rounded to the dtype of the ring, which has the older ones.
    """
    x = load_new_keys(
        new_base, stride_t, history_base, conv_ring, stride_history, weight_base, t, position, is_new, columns, DK,
    )
    if ROTATE:
        partner = load_new_keys(
            new_base, stride_t, history_base, conv_ring, stride_history, weight_base, t, position, is_new,
            find_partners(columns, HALF, DK), DK,
        )
        x = rotate(x, partner, columns, position, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, HALF)
    slot = (position % raw_ring).to(tl.int64)
    old = tl.load(raw_base + slot * stride_rn + columns, mask=is_old & (columns < DK), other=0.0).to(tl.float32)
    return tl.where(is_new, x.to(raw_base.dtype.element_ty).to(tl.float32), old)


@triton.jit
def pool_tokens(tokens, weights, L: tl.constexpr):
    """Return the weighted mean of the tokens of a block, [columns]; without weights, the mean."""
    if weights is None:
        pooled = tl.sum(tokens, 0) / L
    else:
        pooled = tl.sum(tokens * weights, 0)
    return pooled


@triton.jit
def normalize(x, columns, partner, partners, norm_ptr, eps, DK: tl.constexpr):
    """Return x / rms(x) * weight, float32, and its channels `partners`, given as `partner` before; x is 0 in padding."""
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DK + eps)
    weight = tl.load(norm_ptr + columns, mask=columns < DK, other=0.0).to(tl.float32)
    partner_weight = tl.load(norm_ptr + partners, mask=partners < DK, other=0.0).to(tl.float32)
    return x * inverse * weight, partner * inverse * partner_weight


@triton.jit
def store_key(target, x, index, columns, FORMAT: tl.constexpr, DK: tl.constexpr, PAD: tl.constexpr):
    """Store a key x [PAD], float32, in a format of `stored_keys`. `columns`: the order of x, which MXFP4 needs."""
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
        tl.store(target + columns, x.to(target.dtype.element_ty), mask=columns < DK)


@triton.jit
def append_block(
    new_base, raw_base, target, history_base, weight_base, score_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr,
    stride_pt, stride_rn, stride_history, stride_at, stride_ap, block, before, T, N, n_angles, raw_ring, conv_ring, eps,
    L: tl.constexpr, L_PAD: tl.constexpr, HALF: tl.constexpr, ROTATE_TOKENS: tl.constexpr, ROTATE_BLOCKS: tl.constexpr,
    NORM_FIRST: tl.constexpr, FORMAT: tl.constexpr, DK: tl.constexpr, PAD: tl.constexpr,
):
    """Write the new tokens of one block to the rings and, if they complete the block, its key to `target`."""
    dtype = raw_base.dtype.element_ty
    index = tl.arange(0, PAD)
    position = block * L + tl.arange(0, L_PAD)[:, None]
    t = position - before
    in_block = (tl.arange(0, L_PAD) < L)[:, None]
    is_new, is_old = in_block & (t >= 0) & (t < T), in_block & (t < 0)
    # The two halves of a row are adjacent to the middle of the tile, because MXFP4 packs channels c and c + DK / 2.
    in_half = index % (PAD // 2)
    columns = tl.where(in_half < DK // 2, in_half + tl.where(index < PAD // 2, 0, DK // 2), DK)
    partners = find_partners(columns, HALF, DK)
    tokens = load_block_tokens(
        new_base, stride_pt, history_base, conv_ring, stride_history, weight_base,
        raw_base, stride_rn, raw_ring, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, t, position, is_new, is_old,
        columns[None, :], ROTATE_TOKENS, HALF, DK,
    )
    mask = is_new & (columns < DK)[None, :]
    slots = (position % raw_ring).to(tl.int64)
    tl.store(raw_base + slots * stride_rn + columns[None, :], tokens.to(dtype), mask=mask)
    if history_base is not None:
        new = tl.load(new_base + t.to(tl.int64) * stride_pt + columns[None, :], mask=mask, other=0.0)
        slots = (position % conv_ring).to(tl.int64)
        tl.store(history_base + slots * stride_history + columns[None, :], new, mask=mask)
    if (block * L + L <= before + T) & (block < N):
        weights = None
        partner_weights = None
        if score_ptr is not None:
            all_columns = load_block_tokens(
                new_base, stride_pt, history_base, conv_ring, stride_history, weight_base,
                raw_base, stride_rn, raw_ring, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap,
                t, position, is_new, is_old, index[None, :], ROTATE_TOKENS, HALF, DK,
            )
            inside = tl.arange(0, L_PAD) < L
            weights = compute_pool_weights(all_columns, score_ptr, bias_ptr, inside, columns, DK, L, L_PAD, PAD)
            partner_weights = compute_pool_weights(all_columns, score_ptr, bias_ptr, inside, partners, DK, L, L_PAD, PAD)
        x = pool_tokens(tokens, weights, L).to(dtype).to(tl.float32)
        partner = tl.zeros([PAD], tl.float32)
        if ROTATE_BLOCKS:
            partner_tokens = load_block_tokens(
                new_base, stride_pt, history_base, conv_ring, stride_history, weight_base,
                raw_base, stride_rn, raw_ring, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap,
                t, position, is_new, is_old, partners[None, :], ROTATE_TOKENS, HALF, DK,
            )
            partner = pool_tokens(partner_tokens, partner_weights, L).to(dtype).to(tl.float32)
        if NORM_FIRST:
            x, partner = normalize(x, columns, partner, partners, norm_ptr, eps, DK)
            x, partner = x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)
        if ROTATE_BLOCKS:
            x = rotate(x, partner, columns, block * L, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, HALF)
            x = x.to(dtype).to(tl.float32)
        if norm_ptr is not None:
            if not NORM_FIRST:
                x, _ = normalize(x, columns, partner, partners, norm_ptr, eps, DK)
                x = x.to(dtype).to(tl.float32)
        store_key(target, x, index, columns, FORMAT, DK, PAD)


@triton.jit
def rotate_query(
    source, target, position, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, HALF: tl.constexpr, DK: tl.constexpr,
    PAD: tl.constexpr,
):
    """Rotate one row at `source` and store it at `target`."""
    columns = tl.arange(0, PAD)
    partners = find_partners(columns, HALF, DK)
    x = tl.load(source + columns, mask=columns < DK, other=0.0).to(tl.float32)
    partner = tl.load(source + partners, mask=partners < DK, other=0.0).to(tl.float32)
    x = rotate(x, partner, columns, position, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, HALF)
    tl.store(target + columns, x.to(target.dtype.element_ty), mask=columns < DK)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_index_append(
    qk_ptr, q_ptr, raw_ptr, k_ptr, history_ptr, conv_weight_ptr, score_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr,
    lengths_ptr,
    stride_pb, stride_pt, stride_ph, stride_rb, stride_rn, stride_rg, stride_kb, stride_kn, stride_kg, stride_at, stride_ap,
    T, N, n_angles, raw_ring, conv_ring, G, eps,
    H: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, HALF: tl.constexpr,
    ROTATE_TOKENS: tl.constexpr, ROTATE_BLOCKS: tl.constexpr, NORM_FIRST: tl.constexpr, FORMAT: tl.constexpr,
    DK: tl.constexpr, PAD: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Rotate one index query of one token; or process the new tokens of one block of L tokens (see `append_block`).

    A token has H queries and then G keys in `qk_ptr`. Keys are convolved if `history_ptr` is given, a ring
    [B, conv_ring, G, DK] of keys before the convolution, and rotated before pooling with ROTATE_TOKENS. Pooled keys are
    normalized (if `norm_ptr` is given) and rotated to the position of the first token (ROTATE_BLOCKS), with NORM_FIRST in
    this order, otherwise in the other. Every step is rounded to the dtype of the tokens, as in a forward pass.
    """
    b, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    before = tl.load(lengths_ptr + b)
    pdl_wait(USE_PDL)
    if row < T * H:
        source = qk_ptr + b * stride_pb + (row // H).to(tl.int64) * stride_pt + (row % H) * stride_ph
        target = q_ptr + (b * T * H + row) * DK
        position = before + row // H
        rotate_query(source, target, position, cos_ptr, sin_ptr, n_angles, stride_at, stride_ap, HALF, DK, PAD)
    else:
        g, block = ((row - T * H) % G).to(tl.int64), before // L + (row - T * H) // G
        history_base = history_ptr
        weight_base = conv_weight_ptr
        if history_ptr is not None:
            history_base += (b * conv_ring * G + g) * DK
            weight_base += g * DK
        append_block(
            qk_ptr + b * stride_pb + (H + g) * stride_ph, raw_ptr + b * stride_rb + g * stride_rg,
            k_ptr + b * stride_kb + g * stride_kg + block.to(tl.int64) * stride_kn,
            history_base, weight_base, score_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr,
            stride_pt, stride_rn, G * DK, stride_at, stride_ap, block, before, T, N, n_angles, raw_ring, conv_ring, eps,
            L, L_PAD, HALF, ROTATE_TOKENS, ROTATE_BLOCKS, NORM_FIRST, FORMAT, DK, PAD,
        )
# fmt: on
