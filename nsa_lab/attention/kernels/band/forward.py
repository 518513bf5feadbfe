"""Forward kernel of attention over a band of keys. launch.py launches it."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.band.band_ranges import get_key_range, get_key_tile, get_row_tile, is_in_band, name_by_branch
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.packed_tiles import find_document_of_tile
from nsa_lab.attention.kernels.tiles import (
    LN2,
    dot_transposed,
    get_reversed_tile,
    load_consecutive_parts,
    load_parts,
    rescale_and_add,
    row_offsets,
    store_parts,
    zero_parts,
)


# fmt: off
@triton.jit
def compute_tile_scores(
    q, q_rest, k_base, v_base, stride_kn, stride_vn, t, step, left, full, N,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):
    """Return (scores, k, k_rest, v, v_rest) of the key tile at step `step` (see `get_key_tile`).

    Scores are unscaled, and -inf where a query must not attend to the key.
    """
    n = get_key_tile(step, left, full, MASKED)
    k, k_rest = load_consecutive_parts(k_base, stride_kn, n, N, DK, DK_PART, DK_REST, KEYS, MASKED)
    v, v_rest = load_consecutive_parts(v_base, stride_vn, n, N, DV, DV_PART, DV_REST, KEYS, MASKED)
    scores = dot_transposed(q, q_rest, k, k_rest, DK_REST)
    if MASKED:
        i = n + tl.arange(0, KEYS)
        scores = tl.where(is_in_band(i[None, :], t[:, None], N, L, STRIDE, W), scores, float("-inf"))
    return scores, k, k_rest, v, v_rest


@triton.jit
def _attend(
    acc, acc_rest, peak, total, q, q_rest, k_base, v_base, stride_kn, stride_vn, t, start, left, full, stop, N, scale_log2,
    L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):
    """Update the online softmax with all key tiles of a loop (see `get_key_tile`)."""
    for step in range(start if MASKED else left, stop - full + left if MASKED else full, KEYS):
        scores, _, _, v, v_rest = compute_tile_scores(
            q, q_rest, k_base, v_base, stride_kn, stride_vn, t, step, left, full, N,
            L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, KEYS, MASKED,
        )
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(p, 1)
        acc, acc_rest = rescale_and_add(acc, acc_rest, rescale, p.to(v.dtype), v, v_rest, DV_REST)
        peak = new_peak
    return acc, acc_rest, peak, total


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS, repr=name_by_branch("forward"))
def nsa_band_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_bounds_ptr, k_bounds_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    T, N, B, G, n_documents, first_query, scale_log2,
    HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PART: tl.constexpr, DV_PART: tl.constexpr,
    DK_REST: tl.constexpr, DV_REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """Compute out and lse, both contiguous, of one tile of rows."""
    tile, b, g = get_reversed_tile(B, G)
    if q_bounds_ptr is not None:
        _, tile, first, T, first_key, N = find_document_of_tile(q_bounds_ptr, k_bounds_ptr, n_documents, tile, HEADS, ROWS)
        if tile * ROWS >= T * HEADS:
            return
        q_ptr += first * stride_qt
        out_ptr += first * (G * HEADS * DV)
        lse_ptr += first * (G * HEADS)
        k_ptr += first_key * stride_kn
        v_ptr += first_key * stride_vn
    t, head, t_first, t_last = get_row_tile(tile, T, HEADS, ROWS)
    q_base = q_ptr + b * stride_qb + g * HEADS * stride_qh
    q, q_rest = load_parts(q_base, row_offsets(t, head, stride_qt, stride_qh, True), DK, DK_PART, DK_REST)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    position = t
    if first_query is not None:
        position += first_query
        t_first += first_query
        t_last += first_query
    start, left, full, stop = get_key_range(t_first, t_last, L, STRIDE, W, KEYS)

    acc, acc_rest = zero_parts(ROWS, DV_PART, DV_REST)
    # Finite, so that a fully masked tile gives exp2(-inf - peak) = 0 and never inf - inf.
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for MASKED in tl.static_range(2):  # the tiles that need no mask come first
        acc, acc_rest, peak, total = _attend(
            acc, acc_rest, peak, total, q, q_rest, k_base, v_base, stride_kn, stride_vn,
            position, start, left, full, stop, N, scale_log2,
            L, STRIDE, W, DK, DV, DK_PART, DV_PART, DK_REST, DV_REST, KEYS, MASKED == 1,
        )

    is_empty = total == 0.0
    safe_total = tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), (peak + tl.log2(tl.where(is_empty, 1.0, total))) * LN2)
    inside = tile * ROWS + tl.arange(0, ROWS) < T * HEADS
    offsets = (b * T + t) * (G * HEADS) + g * HEADS + head
    tl.store(lse_ptr + offsets, lse, mask=inside)
    store_parts(out_ptr, offsets * DV, acc / safe_total, acc_rest / safe_total, inside, DV, DV_PART, DV_REST)
# fmt: on
