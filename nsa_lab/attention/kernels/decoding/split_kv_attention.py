"""The kernels that read the cache's keys and values. launch.py launches them."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.decoding.kv_tiles import (
    attend_blocks,
    attend_range,
    get_part_range,
    load_queries,
    store_part,
)
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.tiles import get_batch_and_group

NO_WINDOW = tl.constexpr(1 << 30)
"""Tokens after which a compressed key is not read any more."""


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_compressed_and_window(
    q_ptr, k_cmp_ptr, v_cmp_ptr, k_win_ptr, v_win_ptr, lengths_ptr, scores_ptr, part_out_ptr, part_sums_ptr,
    stride_qb, stride_qt, stride_qh, stride_kcb, stride_kcn, stride_kcg, stride_vcb, stride_vcn, stride_vcg,
    stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
    T, N, ring, B, G, row_tiles, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    CMP_PARTS: tl.constexpr, WIN_PARTS: tl.constexpr, PARTS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
):
    """One part of the compressed branch, or of the window's, of one tile of rows; both in one launch, since neither waits
    for the other. Where there is a `scores_ptr`, float32 [B, T, H, N], it takes the compressed scores in units of log2."""
    pdl_wait(EARLY)
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    before = tl.load(lengths_ptr + b)
    q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
    q, t, head, inside = load_queries(q_base, stride_qt, stride_qh, tile, T, HEADS, DK, DK_PAD, ROWS)
    position = before + t
    rows = (b * T + t) * (G * HEADS) + g * HEADS + head
    # One loop takes either branch: two would each have shared memory of their own. No `if`: pointers that come out of one
    # abort the compilers before Triton 3.6.
    compressed = part < CMP_PARTS
    start = tl.where(compressed, 0, tl.maximum(before - W + 1, 0))
    stop = tl.where(compressed, tl.minimum(count_visible_keys(before + T - 1, L, STRIDE), N), before + T)
    parts, parts_before = tl.where(compressed, CMP_PARTS, WIN_PARTS), tl.where(compressed, 0, CMP_PARTS)
    start, stop = get_part_range(start, stop, part - parts_before, parts, KEYS)
    k_ptr, v_ptr = tl.where(compressed, k_cmp_ptr, k_win_ptr), tl.where(compressed, v_cmp_ptr, v_win_ptr)
    k_base = k_ptr + b * tl.where(compressed, stride_kcb, stride_kwb) + g * tl.where(compressed, stride_kcg, stride_kwg)
    v_base = v_ptr + b * tl.where(compressed, stride_vcb, stride_vwb) + g * tl.where(compressed, stride_vcg, stride_vwg)
    stride_kn, stride_vn = tl.where(compressed, stride_kcn, stride_kwn), tl.where(compressed, stride_vcn, stride_vwn)
    slots, period = tl.where(compressed, N, ring), tl.where(compressed, STRIDE, 1)
    reach, near = tl.where(compressed, L - 1, 0), tl.where(compressed, NO_WINDOW, W)
    acc, peak, total = attend_range(
        q, k_base, v_base, stride_kn, stride_vn, position, start, stop, slots, period, reach, near,
        scores_ptr, rows, inside & compressed, N, scale_log2, DK, DV, DK_PAD, DV_PAD, ROWS, KEYS,
    )
    store_part(part_out_ptr, part_sums_ptr, rows * PARTS + part, acc, peak, total, inside, DV, DV_PAD)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_decode(
    q_ptr, k_ptr, v_ptr, blocks_ptr, lengths_ptr, part_out_ptr, part_sums_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    T, N, B, G, row_tiles, scale_log2,
    HEADS: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    FIRST_PART: tl.constexpr, SEL_PARTS: tl.constexpr, PARTS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
):
    """One part of the selected branch of one tile of the heads of one query."""
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    part, t = part // T, part % T
    position = tl.load(lengths_ptr + b) + t
    # Every block that has begun is chosen while there is room for it, so that so many are not -1.
    chosen = tl.minimum(position // L_SEL + 1, N_SEL)
    start, stop = get_part_range(0, chosen, part, SEL_PARTS, 1)
    q_base = q_ptr + b * stride_qb + t * stride_qt + g * HEADS * stride_qh
    q, _, head, inside = load_queries(q_base, stride_qt, stride_qh, tile, 1, HEADS, DK, DK_PAD, ROWS)
    pdl_wait(EARLY)
    acc, peak, total = attend_blocks(
        q, k_ptr + b * stride_kb + g * stride_kg, v_ptr + b * stride_vb + g * stride_vg, stride_kn, stride_vn,
        blocks_ptr + ((b * T + t) * G + g) * N_SEL, position, start, stop, N, scale_log2,
        L_SEL, DK, DV, DK_PAD, DV_PAD, ROWS, KEYS,
    )
    place = ((b * T + t) * (G * HEADS) + g * HEADS + head) * PARTS + FIRST_PART + part
    store_part(part_out_ptr, part_sums_ptr, place, acc, peak, total, inside, DV, DV_PAD)
# fmt: on
