"""Split-KV attention over a cache, and the gated merge of the partial outputs (eq. 5). launch.py launches these kernels."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.decoding.kv_tiles import (
    NO_PEAK,
    attend_blocks,
    attend_range,
    get_part_range,
    load_queries,
    load_sums,
    store_part,
)
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.tiles import get_batch_and_group

NO_WINDOW = tl.constexpr(1 << 30)
"""Window of the compressed branch: longer than any sequence."""


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
    ROWS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute one part of the compressed branch or of the window branch for one tile of rows.

    Both are in one launch, because they are independent. If `scores_ptr` is given, float32 [B, T, H, N], the compressed
    scores are stored there in units of log2. Without values, the keys take their place. FORMAT: how the keys are stored.
    """
    pdl_wait(USE_PDL)
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    before = tl.load(lengths_ptr + b)
    q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
    q, t, head, inside = load_queries(q_base, stride_qt, stride_qh, tile, T, HEADS, DK, DK_PAD, ROWS)
    position = before + t
    rows = (b * T + t) * (G * HEADS) + g * HEADS + head
    # One loop handles both branches: two loops would each allocate shared memory. There is no `if`, because compilers
    # before Triton 3.6 abort on pointers that are assigned in one.
    is_cmp = part < CMP_PARTS
    start = tl.where(is_cmp, 0, tl.maximum(before - W + 1, 0))
    stop = tl.where(is_cmp, tl.minimum(count_visible_keys(before + T - 1, L, STRIDE), N), before + T)
    n_parts, first_part = tl.where(is_cmp, CMP_PARTS, WIN_PARTS), tl.where(is_cmp, 0, CMP_PARTS)
    start, stop = get_part_range(start, stop, part - first_part, n_parts, KEYS)
    k_ptr = tl.where(is_cmp, k_cmp_ptr, k_win_ptr)
    k_base = k_ptr + b * tl.where(is_cmp, stride_kcb, stride_kwb) + g * tl.where(is_cmp, stride_kcg, stride_kwg)
    if v_cmp_ptr is None:
        v_base = None
    else:
        v_ptr = tl.where(is_cmp, v_cmp_ptr, v_win_ptr)
        v_base = v_ptr + b * tl.where(is_cmp, stride_vcb, stride_vwb) + g * tl.where(is_cmp, stride_vcg, stride_vwg)
    stride_kn, stride_vn = tl.where(is_cmp, stride_kcn, stride_kwn), tl.where(is_cmp, stride_vcn, stride_vwn)
    slots, key_stride = tl.where(is_cmp, N, ring), tl.where(is_cmp, STRIDE, 1)
    key_end, window = tl.where(is_cmp, L - 1, 0), tl.where(is_cmp, NO_WINDOW, W)
    acc, peak, total = attend_range(
        q, k_base, v_base, stride_kn, stride_vn, position, start, stop, slots, key_stride, key_end, window,
        scores_ptr, rows, inside & is_cmp, N, scale_log2, DK, DV, DK_PAD, DV_PAD, ROWS, KEYS, FORMAT,
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
    ROWS: tl.constexpr, KEYS: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute one part of the selected branch for one tile of the heads of one query."""
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    part, t = part // T, part % T
    position = tl.load(lengths_ptr + b) + t
    # All blocks that have started are selected if they fit into n_sel, so this many slots are not -1.
    n_selected = tl.minimum(position // L_SEL + 1, N_SEL)
    start, stop = get_part_range(0, n_selected, part, SEL_PARTS, 1)
    q_base = q_ptr + b * stride_qb + t * stride_qt + g * HEADS * stride_qh
    q, _, head, inside = load_queries(q_base, stride_qt, stride_qh, tile, 1, HEADS, DK, DK_PAD, ROWS)
    pdl_wait(USE_PDL)
    acc, peak, total = attend_blocks(
        q, k_ptr + b * stride_kb + g * stride_kg, v_ptr + b * stride_vb + g * stride_vg, stride_kn, stride_vn,
        blocks_ptr + ((b * T + t) * G + g) * N_SEL, position, start, stop, N, scale_log2,
        L_SEL, DK, DV, DK_PAD, DV_PAD, ROWS, KEYS,
    )
    offsets = ((b * T + t) * (G * HEADS) + g * HEADS + head) * PARTS + FIRST_PART + part
    store_part(part_out_ptr, part_sums_ptr, offsets, acc, peak, total, inside, DV, DV_PAD)


@triton.jit
def compute_branch_weights(part_peak, part_total, is_branch, gate):
    """Return the weights of the partial outputs of a branch in the gated sum; zero for parts of other branches."""
    part_peak = tl.where(is_branch, part_peak, NO_PEAK)
    rescale = tl.where(is_branch, tl.exp2(part_peak - tl.max(part_peak, 0)), 0.0)
    total = tl.sum(rescale * part_total, 0)
    return rescale * (gate / tl.where(total == 0.0, 1.0, total))


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_merge(
    part_out_ptr, part_sums_ptr, gates_ptr, out_ptr,
    T, H, stride_gb, stride_gt, stride_gh, stride_g3,
    CMP_PARTS: tl.constexpr, WIN_PARTS: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    DV: tl.constexpr, COLUMNS: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute COLUMNS columns of the output of one row (b, t, head).

    A branch without parts does not exist. Gates belong to the branches that exist; None: a single branch.
    """
    row = tl.program_id(0).to(tl.int64)
    cmp_gate, sel_gate, win_gate = 1.0, 1.0, 1.0
    if gates_ptr is not None:
        gates = gates_ptr + row // (T * H) * stride_gb + row // H % T * stride_gt + row % H * stride_gh
        if CMP_PARTS > 0:
            cmp_gate = tl.load(gates).to(tl.float32)
            gates += stride_g3
        if CMP_PARTS + WIN_PARTS < PARTS:
            sel_gate = tl.load(gates).to(tl.float32)
            gates += stride_g3
        if WIN_PARTS > 0:
            win_gate = tl.load(gates).to(tl.float32)
    pdl_wait(USE_PDL)
    part = tl.arange(0, PARTS_PAD)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pointers = part_out_ptr + (row * PARTS + part)[:, None] * DV + columns[None, :]
    # Loaded before the sums are needed: waiting for the sums first would be a second memory latency.
    part_out = tl.load(pointers, mask=(part < PARTS)[:, None] & (columns < DV)[None, :], other=0.0)
    peak, total = load_sums(part_sums_ptr, row * PARTS + part, part < PARTS)
    is_window = (part >= CMP_PARTS) & (part < CMP_PARTS + WIN_PARTS)
    weight = compute_branch_weights(peak, total, part < CMP_PARTS, cmp_gate)
    weight += compute_branch_weights(peak, total, part >= CMP_PARTS + WIN_PARTS, sel_gate)
    weight += compute_branch_weights(peak, total, is_window, win_gate)
    # A part without keys stored no output, so its memory is uninitialized.
    out = tl.sum(tl.where((total != 0.0)[:, None], part_out, 0.0) * weight[:, None], 0)
    tl.store(out_ptr + row * DV + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)
# fmt: on
