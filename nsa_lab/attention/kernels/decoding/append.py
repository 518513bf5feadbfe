"""New tokens turned by their positions' angles and written into a layer's cache. launch.py launches this kernel."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.vocabulary import SIZES


# fmt: off
@triton.jit
def key_or_value(
    k_ptr, v_ptr, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, b, slot, g, is_key
):
    """Where the row of a sequence, slot and group begins, in keys or in values."""
    if is_key:
        place = k_ptr + b * stride_kb + slot * stride_kn + g * stride_kg
    else:
        place = v_ptr + b * stride_vb + slot * stride_vn + g * stride_vg
    return place


@triton.jit(do_not_specialize=SIZES)
def nsa_append(
    roped_ptr, values_ptr, cos_ptr, sin_ptr, lengths_ptr, q_ptr,
    k_raw_ptr, v_raw_ptr, k_sel_ptr, v_sel_ptr, k_win_ptr, v_win_ptr,
    stride_rb, stride_rt, stride_rh, stride_vb, stride_vt, stride_vh,
    stride_krb, stride_krn, stride_krg, stride_vrb, stride_vrn, stride_vrg,
    stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
    T, N, raw_ring, ring, G,
    H: tl.constexpr, HALF: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
):
    """One row of one token: of a query, which is turned; of a key, which is turned and written; of a value. Rows of keys
    and of values are those of cmp, sel and win. cos and sin are float32 [B, T, HALF], of the first 2 HALF columns."""
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = token // T, token % T
    position = tl.load(lengths_ptr + b) + t
    turns = row < H + 3 * G
    if turns:
        base, width = roped_ptr + b * stride_rb + t * stride_rt + row * stride_rh, DK
    else:
        base, width = values_ptr + b * stride_vb + t * stride_vt + (row - H - 3 * G) * stride_vh, DV
    columns = tl.arange(0, PAD)
    turned = (columns < 2 * HALF) & turns
    early = columns < HALF
    x = tl.load(base + columns, mask=columns < width, other=0.0).to(tl.float32)
    partner = tl.load(base + tl.where(early, columns + HALF, columns - HALF), mask=turned, other=0.0).to(tl.float32)
    angle = token * HALF + tl.where(early, columns, columns - HALF)
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
    x = x * cos + tl.where(early, -partner, partner) * sin
    kept = columns < width
    if row < H:
        place = q_ptr + (token * H + row) * DK
    else:
        head = (row - H) % (3 * G)
        branch, g = head // G, (head % G).to(tl.int64)
        if branch == 0:
            place = key_or_value(
                k_raw_ptr, v_raw_ptr, stride_krb, stride_krn, stride_krg, stride_vrb, stride_vrn, stride_vrg,
                b, (position % raw_ring).to(tl.int64), g, turns,
            )
        elif branch == 1:
            place = key_or_value(
                k_sel_ptr, v_sel_ptr, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
                b, position.to(tl.int64), g, turns,
            )
            # What stands past the cache's last row is padding.
            kept = kept & (position < N)
        else:
            place = key_or_value(
                k_win_ptr, v_win_ptr, stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
                b, (position % ring).to(tl.int64), g, turns,
            )
    tl.store(place + columns, x.to(q_ptr.dtype.element_ty), mask=kept)
# fmt: on
