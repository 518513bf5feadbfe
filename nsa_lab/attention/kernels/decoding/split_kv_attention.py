"""Split-KV attention over a cache, and the gated merge of the partial outputs (eq. 5). launch.py launches these kernels."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
# The outer of two nested `if`s is evaluated at compile time, so that code for absent inputs is not compiled.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import count_visible_keys
from nsa_lab.attention.kernels.decoding.decode_topk import select_topk
from nsa_lab.attention.kernels.decoding.kv_tiles import (
    NO_PEAK,
    add_tile,
    attend_range,
    compute_scores,
    get_part_range,
    get_slot_offsets,
    init_sums,
    load_queries,
    load_sums,
    store_part,
)
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.tiles import get_batch_and_group, load_rows_masked


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_compressed_decode(
    q_ptr, k_ptr, v_ptr, lengths_ptr, scores_ptr, part_out_ptr, part_sums_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    T, N, B, G, row_tiles, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, CMP_PARTS: tl.constexpr, PARTS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute one part of the compressed branch for one tile of rows.

    If `scores_ptr` is given, float32 [B, T, H, N], the scores are stored there in units of log2. Without values, the keys
    take their place. FORMAT: how the keys are stored.
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
    stop = tl.minimum(count_visible_keys(before + T - 1, L, STRIDE), N)
    start, stop = get_part_range(0, stop, part, CMP_PARTS, KEYS)
    v_base = None
    if v_ptr is not None:
        v_base = v_ptr + b * stride_vb + g * stride_vg
    acc, peak, total = attend_range(
        q, k_ptr + b * stride_kb + g * stride_kg, v_base, stride_kn, stride_vn, position, start, stop, STRIDE, L - 1,
        scores_ptr, rows, inside, N, scale_log2, DK, DV, DK_PAD, DV_PAD, ROWS, KEYS, FORMAT,
    )
    store_part(part_out_ptr, part_sums_ptr, rows * PARTS + part, acc, peak, total, inside, DV, DV_PAD)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_selected_and_window(
    q_ptr, k_sel_ptr, v_sel_ptr, k_win_ptr, v_win_ptr, given_blocks_ptr, scores_ptr, lengths_ptr,
    blocks_ptr, part_out_ptr, part_sums_ptr,
    stride_qb, stride_qt, stride_qh, stride_ksb, stride_ksn, stride_ksg, stride_vsb, stride_vsn, stride_vsg,
    stride_kwb, stride_kwn, stride_kwg, stride_vwb, stride_vwn, stride_vwg,
    T, N, ring, B, G, row_tiles, n_blocks, scale_log2,
    HEADS: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, W: tl.constexpr,
    SINK: tl.constexpr, LOCAL: tl.constexpr, SCORE_HEADS: tl.constexpr, SCORE_HEADS_PAD: tl.constexpr,
    BLOCKS: tl.constexpr, FIRST_PART: tl.constexpr, WIN_PARTS: tl.constexpr, SEL_PARTS: tl.constexpr, PARTS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute one part of the window branch or of the selected branch for one tile of the heads of one query.

    Blocks are selected by `scores_ptr` (see `select_topk`), float32 [B, T, G SCORE_HEADS, n_blocks], and stored in
    `blocks_ptr`, or they are given, int32 [B, T, G, N_SEL]. The keys of the window are in a ring of `ring` slots. A branch
    without parts does not exist. N is the number of tokens that fit in the cache.
    """
    TILES: tl.constexpr = (L_SEL + KEYS - 1) // KEYS
    b, g = get_batch_and_group(B, G)
    tile = tl.program_id(0) // (B * G)
    part, tile = tile // row_tiles, tile % row_tiles
    part, t = part // T, part % T
    position = tl.load(lengths_ptr + b) + t
    pdl_wait(USE_PDL)
    q_base = q_ptr + b * stride_qb + t * stride_qt + g * HEADS * stride_qh
    q, _, head, inside = load_queries(q_base, stride_qt, stride_qh, tile, 1, HEADS, DK, DK_PAD, ROWS)
    is_window = part < WIN_PARTS
    slot = tl.arange(0, N_SEL_PAD)
    blocks = tl.zeros([N_SEL_PAD], tl.int32)
    row = (b * T + t) * G + g
    if SEL_PARTS > 0:
        if not is_window:
            if given_blocks_ptr is not None:
                blocks = tl.load(given_blocks_ptr + row * N_SEL + slot, mask=slot < N_SEL, other=-1)
            else:
                row_scores_ptr = scores_ptr
                if scores_ptr is not None:
                    row_scores_ptr += row * (SCORE_HEADS * n_blocks)
                blocks = select_topk(
                    row_scores_ptr, position, n_blocks,
                    L_SEL, N_SEL, N_SEL_PAD, SINK, LOCAL, SCORE_HEADS, SCORE_HEADS_PAD, BLOCKS,
                )
                is_first = (part == WIN_PARTS) & (tile == 0)
                tl.store(blocks_ptr + row * N_SEL + slot, blocks, mask=(slot < N_SEL) & is_first)
    # One loop handles both branches: two loops would each allocate shared memory. There is no `if`, because compilers
    # before Triton 3.6 abort on pointers that are assigned in one.
    k_base = tl.where(is_window, k_win_ptr + b * stride_kwb + g * stride_kwg, k_sel_ptr + b * stride_ksb + g * stride_ksg)
    v_base = tl.where(is_window, v_win_ptr + b * stride_vwb + g * stride_vwg, v_sel_ptr + b * stride_vsb + g * stride_vsg)
    stride_kn, stride_vn = tl.where(is_window, stride_kwn, stride_ksn), tl.where(is_window, stride_vwn, stride_vsn)
    slots = tl.where(is_window, ring, N)
    window_start = tl.maximum(position - W + 1, 0)
    window_start, window_stop = get_part_range(window_start, position + 1, part, tl.maximum(WIN_PARTS, 1), KEYS)
    # All blocks that have started are selected if they fit into n_sel, so this many slots are not -1.
    n_selected = tl.minimum(position // L_SEL + 1, N_SEL)
    first_slot, last_slot = get_part_range(0, n_selected, part - WIN_PARTS, tl.maximum(SEL_PARTS, 1), 1)
    first_step = tl.where(is_window, 0, first_slot * TILES)
    last_step = tl.where(is_window, tl.cdiv(window_stop - window_start, KEYS), last_slot * TILES)
    acc, peak, total = init_sums(ROWS, DV_PAD)
    for step in range(first_step, last_step):
        block_start = tl.sum(tl.where(slot == step // TILES, blocks, 0), 0) * L_SEL
        block_stop = tl.minimum(tl.minimum(block_start + L_SEL, position + 1), N)
        first = tl.where(is_window, window_start + step * KEYS, block_start + step % TILES * KEYS)
        n = first + tl.arange(0, KEYS)
        seen = n < tl.where(is_window, window_stop, block_stop)
        k_rows, v_rows = get_slot_offsets(n, stride_kn, slots), get_slot_offsets(n, stride_vn, slots)
        k = load_rows_masked(k_base, k_rows, tl.arange(0, DK_PAD), seen, DK, DK_PAD)
        v = load_rows_masked(v_base, v_rows, tl.arange(0, DV_PAD), seen, DV, DV_PAD)
        scores = compute_scores(q, k) * scale_log2
        acc, peak, total = add_tile(acc, peak, total, tl.where(seen[None, :], scores, float("-inf")), v)
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
