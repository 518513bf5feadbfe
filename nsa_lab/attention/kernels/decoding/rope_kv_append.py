"""Rotate new tokens (RoPE) and write their keys and values to the cache of a layer. launch.py launches this kernel."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# The outer of two nested `if`s is evaluated at compile time, so that code for absent inputs is not compiled.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS


# fmt: off
@triton.jit
def get_cache_row(
    k_ptr, v_ptr, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, b, slot, g, is_key
):
    """Return the pointer to the row of a sequence, slot and group in the keys or in the values."""
    target = k_ptr + b * stride_kb + slot * stride_kn + g * stride_kg
    if not is_key:
        target = v_ptr + b * stride_vb + slot * stride_vn + g * stride_vg
    return target


@triton.jit
def convolve_keys(x, conv_weight_base, WEIGHT_STRIDE: tl.constexpr, previous_base, columns, own_mask, has_previous):
    """Return weight[0] * x + weight[1] * previous key. The previous key counts only where `has_previous`; x is returned
    unchanged outside of `own_mask`. weight[1] is WEIGHT_STRIDE elements after weight[0]."""
    own_weight = tl.load(conv_weight_base + columns, mask=own_mask, other=1.0).to(tl.float32)
    previous_weight = tl.load(conv_weight_base + WEIGHT_STRIDE + columns, mask=own_mask, other=0.0).to(tl.float32)
    return x * own_weight + tl.load(previous_base + columns, mask=has_previous, other=0.0).to(tl.float32) * previous_weight


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_rope_kv_append(
    qk_ptr, values_ptr, cos_ptr, sin_ptr, lengths_ptr, q_ptr,
    k_raw_ptr, v_raw_ptr, k_sel_ptr, v_sel_ptr, k_win_ptr, v_win_ptr, k_before_conv_ptr, conv_weight_ptr,
    stride_rb, stride_rt, stride_rh, stride_vb, stride_vt, stride_vh,
    stride_krb, stride_krn, stride_krg, stride_vrb, stride_vrn, stride_vrg,
    stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
    stride_at, stride_ap,
    T, N, n_angles, raw_ring, ring, conv_ring, G,
    H: tl.constexpr, KEYS: tl.constexpr, FIRST_BRANCH: tl.constexpr, HALF: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Process one row of one token: rotate a query; rotate a key and write it; write a value.

    A token has KEYS rows of keys and KEYS rows of values, of the branches cmp, sel and win from FIRST_BRANCH on that have a
    buffer; FIRST_BRANCH is the first of them.
    cos and sin are float32 [n_angles, HALF], for the first 2 HALF columns at every position, with equal strides.
    If `k_before_conv_ptr` is given, a ring [B, conv_ring, KEYS, DK], keys are first convolved with the key of the previous
    token, with the weights [2, KEYS, DK] of `conv_weight_ptr`.
    """
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // T, token % T
    position = tl.load(lengths_ptr + b) + t
    is_key = (row >= H) & (row < H + KEYS)
    is_rotated = row < H + KEYS
    base, width = qk_ptr + b * stride_rb + t * stride_rt + row * stride_rh, DK
    if not is_rotated:
        base, width = values_ptr + b * stride_vb + t * stride_vt + (row - H - KEYS) * stride_vh, DV
    columns = tl.arange(0, PAD)
    mask = columns < width
    rotary_mask = (columns < 2 * HALF) & is_rotated
    is_first_half = columns < HALF
    partners = tl.where(is_first_half, columns + HALF, columns - HALF)
    # Tokens past the last position are padding.
    angle = tl.minimum(position, n_angles - 1) * stride_at + tl.where(is_first_half, columns, columns - HALF) * stride_ap
    cos = tl.load(cos_ptr + angle, mask=rotary_mask, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=rotary_mask, other=0.0)
    pdl_wait(USE_PDL)
    raw = tl.load(base + columns, mask=mask, other=0.0)
    x, partner = raw.to(tl.float32), tl.load(base + partners, mask=rotary_mask, other=0.0).to(tl.float32)
    if k_before_conv_ptr is not None:
        key = tl.maximum(row - H, 0)
        history_base = k_before_conv_ptr + b * conv_ring * KEYS * DK + key * DK
        if t > 0:
            previous_base = base - stride_rt
        else:
            previous_base = history_base + (tl.maximum(position - 1, 0) % conv_ring) * KEYS * DK
        # The first token of a sequence has no previous key.
        has_previous = is_key & (position > 0)
        conv_weight_base, WEIGHT_STRIDE = conv_weight_ptr + key * DK, KEYS * DK
        x = convolve_keys(x, conv_weight_base, WEIGHT_STRIDE, previous_base, columns, mask & is_key, mask & has_previous)
        partner = convolve_keys(
            partner, conv_weight_base, WEIGHT_STRIDE, previous_base, partners,
            rotary_mask & is_key, rotary_mask & has_previous,
        )
        tl.store(history_base + (position % conv_ring) * KEYS * DK + columns, raw, mask=mask & is_key)
    x = x * cos + tl.where(is_first_half, -partner, partner) * sin
    target = q_ptr + (token * H + row) * DK
    if row >= H:
        head = (row - H) % KEYS
        branch, g = head // G + FIRST_BRANCH, (head % G).to(tl.int64)
        if k_sel_ptr is None:
            branch = tl.where(branch == 1, 2, branch)
        if k_raw_ptr is not None:
            if branch == 0:
                target = get_cache_row(
                    k_raw_ptr, v_raw_ptr, stride_krb, stride_krn, stride_krg, stride_vrb, stride_vrn, stride_vrg,
                    b, (position % raw_ring).to(tl.int64), g, is_rotated,
                )
        if k_sel_ptr is not None:
            if branch == 1:
                target = get_cache_row(
                    k_sel_ptr, v_sel_ptr, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
                    b, position.to(tl.int64), g, is_rotated,
                )
                # Tokens past the last row of the cache are padding.
                mask = mask & (position < N)
        if k_win_ptr is not None:
            if branch == 2:
                target = get_cache_row(
                    k_win_ptr, v_win_ptr, stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
                    b, (position % ring).to(tl.int64), g, is_rotated,
                )
    tl.store(target + columns, x.to(q_ptr.dtype.element_ty), mask=mask)
# fmt: on
