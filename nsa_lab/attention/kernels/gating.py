"""The gated sum of the three branches in one pass over memory, forward and backward (arXiv 2502.11089, eq. 5)."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# The decorators of torch.library have no type annotations.
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
    """Return (rows (batch, time, head) of this program, mask of existing rows, columns, mask of both)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DV_PAD)
    inside = row < n_rows
    mask = inside[:, None] & (columns < DV)[None, :]
    return row, inside, columns, mask


@triton.jit
def _load_gates(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh, stride_g3, inside):
    """Load the three gates of each row, in float32."""
    offsets = gates_ptr + row // (T * H) * stride_gb + row // H % T * stride_gt + row % H * stride_gh
    cmp = tl.load(offsets, mask=inside, other=0.0).to(tl.float32)
    sel = tl.load(offsets + stride_g3, mask=inside, other=0.0).to(tl.float32)
    win = tl.load(offsets + 2 * stride_g3, mask=inside, other=0.0).to(tl.float32)
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
    offsets = row[:, None] * DV + columns[None, :]
    out = tl.load(cmp_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * gate_cmp[:, None]
    out += tl.load(sel_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * gate_sel[:, None]
    out += tl.load(win_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * gate_win[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _branch_backward(out_ptr, d_out_ptr, do, gate, offsets, mask):
    """Store the gradient of one branch's output and return the gradient of its gate."""
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_out_ptr + offsets, (do * gate[:, None]).to(d_out_ptr.dtype.element_ty), mask=mask)
    return tl.sum(out * do, 1)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_backward(
    do_ptr, cmp_ptr, sel_ptr, win_ptr, gates_ptr, d_cmp_ptr, d_sel_ptr, d_win_ptr, dgates_ptr, deltas_ptr,
    n_rows, T, H,
    stride_gb, stride_gt, stride_gh, stride_g3,
    HAS_DELTAS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute the gradients of the branch outputs and of the gates.

    HAS_DELTAS: also store the delta of each branch, [3, rows] float32, for the backward passes of the branches.
    """
    row, inside, columns, mask = _get_row_tile(n_rows, DV, DV_PAD, ROWS)
    gate_cmp, gate_sel, gate_win = _load_gates(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh, stride_g3, inside)
    offsets = row[:, None] * DV + columns[None, :]
    do = tl.load(do_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dgate_cmp = _branch_backward(cmp_ptr, d_cmp_ptr, do, gate_cmp, offsets, mask)
    dgate_sel = _branch_backward(sel_ptr, d_sel_ptr, do, gate_sel, offsets, mask)
    dgate_win = _branch_backward(win_ptr, d_win_ptr, do, gate_win, offsets, mask)
    dtype: tl.constexpr = dgates_ptr.dtype.element_ty
    tl.store(dgates_ptr + row * 3, dgate_cmp.to(dtype), mask=inside)
    tl.store(dgates_ptr + row * 3 + 1, dgate_sel.to(dtype), mask=inside)
    tl.store(dgates_ptr + row * 3 + 2, dgate_win.to(dtype), mask=inside)
    if HAS_DELTAS:
        tl.store(deltas_ptr + row, dgate_cmp * gate_cmp, mask=inside)
        tl.store(deltas_ptr + n_rows + row, dgate_sel * gate_sel, mask=inside)
        tl.store(deltas_ptr + 2 * tl.cast(n_rows, tl.int64) + row, dgate_win * gate_win, mask=inside)
# fmt: on


# Defined by schema to save host time; see selected/launch.py for the measurement.
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
    """Compute `gated_sum` without PyTorch's dispatcher."""
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
    """Return the gradients of the three outputs and the gates.

    If given, `deltas`, float32 [3, B, T, H], is filled with sum(out * d_out) of each branch.
    """
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
    """Return (grid, sizes and strides, compile-time sizes) of both kernels."""
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
    """Return the sum of out_* [B, T, H, Dv] weighted by gates [B, T, H, 3]: [B, T, H, Dv] in the dtype of the outputs.

    Gates are after sigmoid or softmax. Products and sums are in float32. Raises ValueError if the shapes do not match,
    because no public function checks them before.
    """
    shape = out_cmp.shape
    if len(shape) != 4 or out_sel.shape != shape or out_win.shape != shape or gates.shape != (*shape[:3], 3):
        raise ValueError(
            "gated_sum: expected three outputs [B, T, H, Dv] and gates [B, T, H, 3]; got "
            f"{list(shape)}, {list(out_sel.shape)}, {list(out_win.shape)}, {list(gates.shape)}"
        )
    return _gated_sum(out_cmp, out_sel, out_win, gates)
