"""The partial outputs of all branches, merged and gated (eq. 5). launch.py launches this kernel."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.vocabulary import SIZES


# fmt: off
@triton.jit
def branch_weights(part_lse, own, gate):
    """What each of a branch's OWN parts weighs in the gated sum; zero where a part, or the branch, saw nothing."""
    part_lse = tl.where(own, part_lse, float("-inf"))
    peak = tl.maximum(tl.max(part_lse, 0), -3.0e38)
    p = tl.exp2(part_lse - peak)
    total = tl.sum(p, 0)
    return p * (gate / tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=SIZES)
def nsa_gate_merge(
    part_out_ptr, part_lse_ptr, gates_ptr, out_ptr,
    T, H, stride_gb, stride_gt, stride_gh, stride_g3,
    CMP_PARTS: tl.constexpr, WIN_PARTS: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    DV: tl.constexpr, COLUMNS: tl.constexpr,
):
    """COLUMNS columns of the output of one row (b, t, head)."""
    row = tl.program_id(0).to(tl.int64)
    gates = gates_ptr + row // (T * H) * stride_gb + row // H % T * stride_gt + row % H * stride_gh
    part = tl.arange(0, PARTS_PAD)
    part_lse = tl.load(part_lse_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    windowed = (part >= CMP_PARTS) & (part < CMP_PARTS + WIN_PARTS)
    weight = branch_weights(part_lse, part < CMP_PARTS, tl.load(gates).to(tl.float32))
    weight += branch_weights(part_lse, part >= CMP_PARTS + WIN_PARTS, tl.load(gates + stride_g3).to(tl.float32))
    weight += branch_weights(part_lse, windowed, tl.load(gates + 2 * stride_g3).to(tl.float32))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pointers = part_out_ptr + (row * PARTS + part)[:, None] * DV + columns[None, :]
    # Of a part without keys nothing was stored.
    stored = (part_lse != float("-inf"))[:, None] & (columns < DV)[None, :]
    out = tl.sum(tl.load(pointers, mask=stored, other=0.0) * weight[:, None], 0)
    tl.store(out_ptr + row * DV + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)
# fmt: on
