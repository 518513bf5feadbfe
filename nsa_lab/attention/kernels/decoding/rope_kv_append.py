"""New tokens turned by their positions' angles and written into a layer's cache, and the blocks that they complete.
launch.py launches these kernels."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# An outer `if` of two is decided when a kernel is compiled: of what is not there nothing can be.
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
    """Where the row of a sequence, slot and group begins, in keys or in values; without values, in keys."""
    place = k_ptr + b * stride_kb + slot * stride_kn + g * stride_kg
    if v_ptr is not None:
        if not is_key:
            place = v_ptr + b * stride_vb + slot * stride_vn + g * stride_vg
    return place


@triton.jit
def convolve_keys(x, mix_base, NEXT: tl.constexpr, late_base, columns, own, late):
    """x times its own weight, and what came before it, where `late`, times its weight, NEXT numbers further on; x itself
    where it is not `own`."""
    this = tl.load(mix_base + columns, mask=own, other=1.0).to(tl.float32)
    that = tl.load(mix_base + NEXT + columns, mask=own, other=0.0).to(tl.float32)
    return x * this + tl.load(late_base + columns, mask=late, other=0.0).to(tl.float32) * that


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_rope_kv_append(
    roped_ptr, values_ptr, cos_ptr, sin_ptr, lengths_ptr, q_ptr,
    k_raw_ptr, v_raw_ptr, k_sel_ptr, v_sel_ptr, k_win_ptr, v_win_ptr, past_ptr, mix_ptr,
    stride_rb, stride_rt, stride_rh, stride_vb, stride_vt, stride_vh,
    stride_krb, stride_krn, stride_krg, stride_vrb, stride_vrn, stride_vrg,
    stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
    stride_at, stride_ap,
    T, N, n_angles, raw_ring, ring, past_ring, G,
    H: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr,
):
    """One row of one token: of a query, which is turned; of a key, which is turned and written; of a value. Rows of keys
    and of values are KEYS each, those of the branches cmp, sel and win from the FIRST on. cos and sin are float32
    [n_angles, HALF], of the first 2 HALF columns at every position, with the same strides.

    Where there is a `past_ptr`, a ring [B, past_ring, KEYS, DK] of keys as they came, keys are first mixed with those of
    the token before, by the weights [2, KEYS, DK] of `mix_ptr`.
    """
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // T, token % T
    position = tl.load(lengths_ptr + b) + t
    is_key = (row >= H) & (row < H + KEYS)
    turns = row < H + KEYS
    base, width = roped_ptr + b * stride_rb + t * stride_rt + row * stride_rh, DK
    if values_ptr is not None:
        if not turns:
            base, width = values_ptr + b * stride_vb + t * stride_vt + (row - H - KEYS) * stride_vh, DV
    columns = tl.arange(0, PAD)
    kept = columns < width
    turned = (columns < 2 * HALF) & turns
    early = columns < HALF
    partners = tl.where(early, columns + HALF, columns - HALF)
    # What stands past the last position is padding.
    angle = tl.minimum(position, n_angles - 1) * stride_at + tl.where(early, columns, columns - HALF) * stride_ap
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
    pdl_wait(EARLY)
    came = tl.load(base + columns, mask=kept, other=0.0)
    x, partner = came.to(tl.float32), tl.load(base + partners, mask=turned, other=0.0).to(tl.float32)
    if past_ptr is not None:
        key = tl.maximum(row - H, 0)
        past_base = past_ptr + b * past_ring * KEYS * DK + key * DK
        if t > 0:
            late_base = base - stride_rt
        else:
            late_base = past_base + (tl.maximum(position - 1, 0) % past_ring) * KEYS * DK
        # Nothing comes before a sequence.
        late = is_key & (position > 0)
        mix_base, NEXT = mix_ptr + key * DK, KEYS * DK
        x = convolve_keys(x, mix_base, NEXT, late_base, columns, kept & is_key, kept & late)
        partner = convolve_keys(partner, mix_base, NEXT, late_base, partners, turned & is_key, turned & late)
        tl.store(past_base + (position % past_ring) * KEYS * DK + columns, came, mask=kept & is_key)
    x = x * cos + tl.where(early, -partner, partner) * sin
    place = q_ptr + (token * H + row) * DK
    if row >= H:
        head = (row - H) % KEYS
        branch, g = head // G + FIRST, (head % G).to(tl.int64)
        if k_raw_ptr is not None:
            if branch == 0:
                place = get_cache_row(
                    k_raw_ptr, v_raw_ptr, stride_krb, stride_krn, stride_krg, stride_vrb, stride_vrn, stride_vrg,
                    b, (position % raw_ring).to(tl.int64), g, turns,
                )
        if k_sel_ptr is not None:
            if branch == 1:
                place = get_cache_row(
                    k_sel_ptr, v_sel_ptr, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
                    b, position.to(tl.int64), g, turns,
                )
                # What stands past the cache's last row is padding.
                kept = kept & (position < N)
        if k_win_ptr is not None:
            if branch == 2:
                place = get_cache_row(
                    k_win_ptr, v_win_ptr, stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
                    b, (position % ring).to(tl.int64), g, turns,
                )
    tl.store(place + columns, x.to(q_ptr.dtype.element_ty), mask=kept)
# fmt: on
