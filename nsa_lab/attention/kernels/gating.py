"""The gated sum of the three branches in one pass over memory, forward and backward (arXiv 2502.11089, eq. 5)."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# Nor are torch.library's decorators annotated.
# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS
from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width, register_autograd


# fmt: off
@triton.jit
def _get_row_tile(n_rows, DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Rows (batch, time, head) of this program, whether they exist, their columns, and the mask of both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DV_PAD)
    inside = row < n_rows
    mask = inside[:, None] & (columns < DV)[None, :]
    return row, inside, columns, mask


@triton.jit
def _load_gates(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh, stride_g3, inside):
    """The three gates of each row, in float32."""
    at = gates_ptr + row // (T * H) * stride_gb + row // H % T * stride_gt + row % H * stride_gh
    cmp = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    sel = tl.load(at + stride_g3, mask=inside, other=0.0).to(tl.float32)
    win = tl.load(at + 2 * stride_g3, mask=inside, other=0.0).to(tl.float32)
    return cmp, sel, win


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_forward(
    cmp_ptr, sel_ptr, win_ptr, gates_ptr, out_ptr,
    n_rows, T, H,
    stride_gb, stride_gt, stride_gh, stride_g3,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    row, inside, columns, mask = _get_row_tile(n_rows, DV, DV_PAD, ROWS)
    gate_cmp, gate_sel, gate_win = _load_gates(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh, stride_g3, inside)
    at = row[:, None] * DV + columns[None, :]
    out = tl.load(cmp_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate_cmp[:, None]
    out += tl.load(sel_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate_sel[:, None]
    out += tl.load(win_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate_win[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _branch_backward(out_ptr, d_out_ptr, do, gate, at, mask):
    """Stores the gradient of one branch's output and returns its gate's."""
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_out_ptr + at, (do * gate[:, None]).to(d_out_ptr.dtype.element_ty), mask=mask)
    return tl.sum(out * do, 1)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_backward(
    do_ptr, cmp_ptr, sel_ptr, win_ptr, gates_ptr, d_cmp_ptr, d_sel_ptr, d_win_ptr, dgates_ptr, deltas_ptr,
    n_rows, T, H,
    stride_gb, stride_gt, stride_gh, stride_g3,
    HAS_DELTAS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """HAS_DELTAS: also the delta of each branch, [3, rows] float32, which the branches' backward passes ask for."""
    row, inside, columns, mask = _get_row_tile(n_rows, DV, DV_PAD, ROWS)
    gate_cmp, gate_sel, gate_win = _load_gates(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh, stride_g3, inside)
    at = row[:, None] * DV + columns[None, :]
    do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dgate_cmp = _branch_backward(cmp_ptr, d_cmp_ptr, do, gate_cmp, at, mask)
    dgate_sel = _branch_backward(sel_ptr, d_sel_ptr, do, gate_sel, at, mask)
    dgate_win = _branch_backward(win_ptr, d_win_ptr, do, gate_win, at, mask)
    dtype: tl.constexpr = dgates_ptr.dtype.element_ty
    tl.store(dgates_ptr + row * 3, dgate_cmp.to(dtype), mask=inside)
    tl.store(dgates_ptr + row * 3 + 1, dgate_sel.to(dtype), mask=inside)
    tl.store(dgates_ptr + row * 3 + 2, dgate_win.to(dtype), mask=inside)
    if HAS_DELTAS:
        tl.store(deltas_ptr + row, dgate_cmp * gate_cmp, mask=inside)
        tl.store(deltas_ptr + n_rows + row, dgate_sel * gate_sel, mask=inside)
        tl.store(deltas_ptr + 2 * tl.cast(n_rows, tl.int64) + row, dgate_win * gate_win, mask=inside)
# fmt: on


# Defined by schema for the host's sake; selected/launch.py has the figures.
torch.library.define(
    "nsa_lab::gated_sum",
    "(Tensor out_cmp, Tensor out_sel, Tensor out_win, Tensor gates) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::gated_sum_backward",
    "(Tensor do, Tensor out_cmp, Tensor out_sel, Tensor out_win, Tensor gates) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_gated_sum = torch.ops.nsa_lab.gated_sum.default
_gated_sum_backward = torch.ops.nsa_lab.gated_sum_backward.default


def forward(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    """`gated_sum` itself, past PyTorch's dispatcher."""
    out = out_cmp.new_empty(out_cmp.shape)
    grid, sizes, constants = _get_launch_args(out_cmp, gates)
    # fmt: off
    nsa_gate_forward[grid](
        out_cmp.contiguous(), out_sel.contiguous(), out_win.contiguous(), gates, out,
        *sizes, **constants,
    )
    # fmt: on
    return out


torch.library.impl("nsa_lab::gated_sum", ("cpu", "cuda"), forward)


@torch.library.register_fake("nsa_lab::gated_sum")
def _(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    return out_cmp.new_empty(out_cmp.shape)


def backward(
    do: Tensor, out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor, deltas: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the outputs and the gates. `deltas` float32 [3, B, T, H] takes sum(out * d_out) of each branch."""
    d_cmp, d_sel, d_win, dgates = (x.new_empty(x.shape) for x in (out_cmp, out_sel, out_win, gates))
    grid, sizes, constants = _get_launch_args(out_cmp, gates)
    # fmt: off
    nsa_gate_backward[grid](
        do.contiguous(), out_cmp.contiguous(), out_sel.contiguous(), out_win.contiguous(), gates,
        d_cmp, d_sel, d_win, dgates, deltas,
        *sizes, HAS_DELTAS=deltas is not None, **constants,
    )
    # fmt: on
    return d_cmp, d_sel, d_win, dgates


def _get_launch_args(out: Tensor, gates: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Grid, sizes and strides, and compile-time sizes of either kernel."""
    B, T, H, Dv = out.shape
    rows, tile_rows = B * T * H, launch_table.gate_rows(Dv)
    constants = {"DV": Dv, "DV_PAD": padded_width(Dv), "ROWS": tile_rows, "num_warps": launch_table.STREAMING_WARPS}
    return (ceil_div(rows, tile_rows),), (rows, T, H, *gates.stride()), constants


torch.library.impl("nsa_lab::gated_sum_backward", ("cpu", "cuda"), backward)


@torch.library.register_fake("nsa_lab::gated_sum_backward")
def _(
    do: Tensor, out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_cmp, d_sel, d_win, dgates = (x.new_empty(x.shape) for x in (out_cmp, out_sel, out_win, gates))
    return d_cmp, d_sel, d_win, dgates


def _autograd_backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gated_sum_backward(do, *ctx.saved_tensors)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


register_autograd("gated_sum", _autograd_backward, _setup_context)


def gated_sum(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    """out_* [B, T, H, Dv] of one dtype, gates [B, T, H, 3] after sigmoid or softmax -> [B, T, H, Dv] in that dtype.

    Products and sums are in float32. ValueError for shapes that do not fit: no public function stands before this part.
    """
    shape = out_cmp.shape
    if len(shape) != 4 or out_sel.shape != shape or out_win.shape != shape or gates.shape != (*shape[:3], 3):
        raise ValueError(
            "gated_sum: expected three outputs [B, T, H, Dv] and gates [B, T, H, 3]; got "
            f"{list(shape)}, {list(out_sel.shape)}, {list(out_win.shape)}, {list(gates.shape)}"
        )
    return _gated_sum(out_cmp, out_sel, out_win, gates)
