"""The gated sum of two or three branches in one pass over memory, forward and backward (arXiv 2502.11089, eq. 5)."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# The decorators of torch.library have no type annotations.
# pyright: reportUntypedFunctionDecorator=false
from __future__ import annotations

from collections.abc import Sequence
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
def _get_gate_base(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh):
    """Return the pointer to the first gate of each row."""
    return gates_ptr + row // (T * H) * stride_gb + row // H % T * stride_gt + row % H * stride_gh


@triton.jit
def _load_gated(out_ptr, gate_base, number: tl.constexpr, stride_g3, offsets, inside, mask):
    """Return the output of branch `number`, times its gate, in float32."""
    gate = tl.load(gate_base + number * stride_g3, mask=inside, other=0.0).to(tl.float32)
    return tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * gate[:, None]


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_forward(
    first_ptr, second_ptr, third_ptr, gates_ptr, out_ptr,
    n_rows, T, H,
    stride_gb, stride_gt, stride_gh, stride_g3,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute the gated sum of two or three branches; with two, `third_ptr` is None."""
    row, inside, columns, mask = _get_row_tile(n_rows, DV, DV_PAD, ROWS)
    gate_base = _get_gate_base(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh)
    offsets = row[:, None] * DV + columns[None, :]
    out = _load_gated(first_ptr, gate_base, 0, stride_g3, offsets, inside, mask)
    out += _load_gated(second_ptr, gate_base, 1, stride_g3, offsets, inside, mask)
    if third_ptr is not None:
        out += _load_gated(third_ptr, gate_base, 2, stride_g3, offsets, inside, mask)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _branch_backward(
    out_ptr, d_out_ptr, dgates_ptr, deltas_ptr, do, gate_base, number: tl.constexpr, stride_g3, offsets, row, n_rows,
    inside, mask, BRANCHES: tl.constexpr, HAS_DELTAS: tl.constexpr,
):
    """Store the gradients of the output and of the gate of one branch, and its delta."""
    gate = tl.load(gate_base + number * stride_g3, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_out_ptr + offsets, (do * gate[:, None]).to(d_out_ptr.dtype.element_ty), mask=mask)
    dgate = tl.sum(out * do, 1)
    tl.store(dgates_ptr + row * BRANCHES + number, dgate.to(dgates_ptr.dtype.element_ty), mask=inside)
    if HAS_DELTAS:
        tl.store(deltas_ptr + number * tl.cast(n_rows, tl.int64) + row, dgate * gate, mask=inside)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_gate_backward(
    do_ptr, first_ptr, second_ptr, third_ptr, gates_ptr, d_first_ptr, d_second_ptr, d_third_ptr, dgates_ptr, deltas_ptr,
    n_rows, T, H,
    stride_gb, stride_gt, stride_gh, stride_g3,
    BRANCHES: tl.constexpr, HAS_DELTAS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute the gradients of the branch outputs and of the gates.

    HAS_DELTAS: also store the delta of each branch, [BRANCHES, rows] float32, for the backward passes of the branches.
    """
    row, inside, columns, mask = _get_row_tile(n_rows, DV, DV_PAD, ROWS)
    gate_base = _get_gate_base(gates_ptr, row, T, H, stride_gb, stride_gt, stride_gh)
    offsets = row[:, None] * DV + columns[None, :]
    do = tl.load(do_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    _branch_backward(
        first_ptr, d_first_ptr, dgates_ptr, deltas_ptr, do, gate_base, 0, stride_g3, offsets, row, n_rows, inside, mask,
        BRANCHES, HAS_DELTAS,
    )
    _branch_backward(
        second_ptr, d_second_ptr, dgates_ptr, deltas_ptr, do, gate_base, 1, stride_g3, offsets, row, n_rows, inside, mask,
        BRANCHES, HAS_DELTAS,
    )
    if third_ptr is not None:
        _branch_backward(
            third_ptr, d_third_ptr, dgates_ptr, deltas_ptr, do, gate_base, 2, stride_g3, offsets, row, n_rows, inside, mask,
            BRANCHES, HAS_DELTAS,
        )
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
torch.library.define(
    "nsa_lab::gated_sum_of_two",
    "(Tensor first, Tensor second, Tensor gates) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "nsa_lab::gated_sum_of_two_backward",
    "(Tensor do, Tensor first, Tensor second, Tensor gates) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def forward(outs: Sequence[Tensor], gates: Tensor) -> Tensor:
    """Compute `gated_sum` of two or three outputs without PyTorch's dispatcher."""
    out = outs[0].new_empty(outs[0].shape)
    grid, sizes, constants = _get_launch_args(outs[0], gates)
    nsa_gate_forward[grid](*_pad_to_three([x.contiguous() for x in outs]), gates, out, *sizes, **constants)
    return out


def _pad_to_three(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return *tensors, *[None] * (3 - len(tensors))


@torch.library.impl("nsa_lab::gated_sum", ("cpu", "cuda"))
def _(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    return forward((out_cmp, out_sel, out_win), gates)


@torch.library.impl("nsa_lab::gated_sum_of_two", ("cpu", "cuda"))
def _(first: Tensor, second: Tensor, gates: Tensor) -> Tensor:
    return forward((first, second), gates)


def _fake(first: Tensor, *_: Tensor) -> Tensor:
    return first.new_empty(first.shape)


torch.library.register_fake("nsa_lab::gated_sum", _fake)
torch.library.register_fake("nsa_lab::gated_sum_of_two", _fake)


def backward(do: Tensor, outs: Sequence[Tensor], gates: Tensor, deltas: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of the two or three outputs, and of the gates.

    If given, `deltas`, float32 [branches, B, T, H], is filled with sum(out * d_out) of each branch.
    """
    d_outs, dgates = [x.new_empty(x.shape) for x in outs], gates.new_empty(gates.shape)
    grid, sizes, constants = _get_launch_args(outs[0], gates)
    # fmt: off
    nsa_gate_backward[grid](
        do.contiguous(), *_pad_to_three([x.contiguous() for x in outs]), gates, *_pad_to_three(d_outs), dgates, deltas,
        *sizes, BRANCHES=len(outs), HAS_DELTAS=deltas is not None, **constants,
    )
    # fmt: on
    return *d_outs, dgates


def _get_launch_args(out: Tensor, gates: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Return (grid, sizes and strides, compile-time sizes) of both kernels."""
    B, T, H, Dv = out.shape
    rows, tile_rows = B * T * H, launch_table.gate_rows(Dv)
    constants = {"DV": Dv, "DV_PAD": padded_width(Dv), "ROWS": tile_rows, "num_warps": launch_table.STREAMING_WARPS}
    return (ceil_div(rows, tile_rows),), (rows, T, H, *gates.stride()), constants


@torch.library.impl("nsa_lab::gated_sum_backward", ("cpu", "cuda"))
def _(do: Tensor, out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    return backward(do, (out_cmp, out_sel, out_win), gates)


@torch.library.impl("nsa_lab::gated_sum_of_two_backward", ("cpu", "cuda"))
def _(do: Tensor, first: Tensor, second: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    return backward(do, (first, second), gates)


def _fake_backward(do: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


torch.library.register_fake("nsa_lab::gated_sum_backward", _fake_backward)
torch.library.register_fake("nsa_lab::gated_sum_of_two_backward", _fake_backward)


def _autograd_backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
    return _GATED_SUM_BACKWARD[len(ctx.saved_tensors)](do, *ctx.saved_tensors)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


register_autograd("gated_sum", _autograd_backward, _setup_context)
register_autograd("gated_sum_of_two", _autograd_backward, _setup_context)
_GATED_SUM = {2: torch.ops.nsa_lab.gated_sum_of_two.default, 3: torch.ops.nsa_lab.gated_sum.default}
_GATED_SUM_BACKWARD = {
    3: torch.ops.nsa_lab.gated_sum_of_two_backward.default,
    4: torch.ops.nsa_lab.gated_sum_backward.default,
}


def gated_sum(*outs_and_gates: Tensor) -> Tensor:
    """Return the sum of two or three outputs [B, T, H, Dv], weighted by the last argument, the gates [B, T, H, outputs].

    Returns [B, T, H, Dv] in the dtype of the outputs. Gates are after sigmoid or softmax. Products and sums are in float32.
    Raises ValueError if the shapes do not match, because no public function checks them before.
    """
    *outs, gates = outs_and_gates
    shape = outs[0].shape
    if (
        len(outs) not in _GATED_SUM
        or len(shape) != 4
        or any(out.shape != shape for out in outs)
        or gates.shape != (*shape[:3], len(outs))
    ):
        raise ValueError(
            "gated_sum: expected two or three outputs [B, T, H, Dv] and one gate [B, T, H] for each; got "
            f"{[list(out.shape) for out in outs]} and gates {list(gates.shape)}"
        )
    return _GATED_SUM[len(outs)](*outs, gates)
