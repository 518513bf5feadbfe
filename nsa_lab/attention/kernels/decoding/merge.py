"""The partial outputs of all branches, merged and gated (eq. 5). launch.py launches this kernel."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.decoding.kv_tiles import NO_PEAK, load_sums
from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS


# fmt: off
@triton.jit
def compute_branch_weights(part_peak, part_total, own, gate):
    """What the partial outputs of a branch weigh in the gated sum: its `own` parts; all others nothing."""
    part_peak = tl.where(own, part_peak, NO_PEAK)
    shrink = tl.where(own, tl.exp2(part_peak - tl.max(part_peak, 0)), 0.0)
    total = tl.sum(shrink * part_total, 0)
    return shrink * (gate / tl.where(total == 0.0, 1.0, total))


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_merge(
    part_out_ptr, part_sums_ptr, gates_ptr, out_ptr,
    T, H, stride_gb, stride_gt, stride_gh, stride_g3,
    CMP_PARTS: tl.constexpr, WIN_PARTS: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    DV: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):
    """COLUMNS columns of the output of one row (b, t, head)."""
    row = tl.program_id(0).to(tl.int64)
    gates = gates_ptr + row // (T * H) * stride_gb + row // H % T * stride_gt + row % H * stride_gh
    cmp_gate, sel_gate = tl.load(gates).to(tl.float32), tl.load(gates + stride_g3).to(tl.float32)
    win_gate = tl.load(gates + 2 * stride_g3).to(tl.float32)
    pdl_wait(EARLY)
    part = tl.arange(0, PARTS_PAD)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pointers = part_out_ptr + (row * PARTS + part)[:, None] * DV + columns[None, :]
    # Asked for at once: to wait for the sums first would be to wait twice.
    part_out = tl.load(pointers, mask=(part < PARTS)[:, None] & (columns < DV)[None, :], other=0.0)
    peak, total = load_sums(part_sums_ptr, row * PARTS + part, part < PARTS)
    windowed = (part >= CMP_PARTS) & (part < CMP_PARTS + WIN_PARTS)
    weight = compute_branch_weights(peak, total, part < CMP_PARTS, cmp_gate)
    weight += compute_branch_weights(peak, total, part >= CMP_PARTS + WIN_PARTS, sel_gate)
    weight += compute_branch_weights(peak, total, windowed, win_gate)
    # Of a part without keys nothing was stored, so that anything may lie there.
    out = tl.sum(tl.where((total != 0.0)[:, None], part_out, 0.0) * weight[:, None], 0)
    tl.store(out_ptr + row * DV + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)
# fmt: on
