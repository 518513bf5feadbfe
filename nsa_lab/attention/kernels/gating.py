"""The gated sum of the three branches in one pass over memory, forward and backward (arXiv 2502.11089, eq. 5)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels.common import ceil_div, check_kernel_limits, padded_width

_TILE = 2048  # elements of one tensor that a program holds; with twice as many the backward pass takes a seventh longer


@triton.jit
def _load_gates(gates_ptr, row, T, H, g_b, g_t, g_h, g_3, rows_live):
    """The three gates of each (batch, time, head) row, in float32."""
    at = gates_ptr + row // (T * H) * g_b + row // H % T * g_t + row % H * g_h
    cmp = tl.load(at, mask=rows_live, other=0.0).to(tl.float32)
    sel = tl.load(at + g_3, mask=rows_live, other=0.0).to(tl.float32)
    win = tl.load(at + 2 * g_3, mask=rows_live, other=0.0).to(tl.float32)
    return cmp, sel, win


@triton.jit
def _gated_sum_kernel(
    cmp_ptr,
    sel_ptr,
    win_ptr,
    gates_ptr,
    out_ptr,
    n_rows,
    T,
    H,
    g_b,
    g_t,
    g_h,
    g_3,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DP)
    live = row < n_rows
    mask = live[:, None] & (c < D)[None, :]
    g_cmp, g_sel, g_win = _load_gates(gates_ptr, row, T, H, g_b, g_t, g_h, g_3, live)
    at = row[:, None] * D + c[None, :]
    out = tl.load(cmp_ptr + at, mask=mask, other=0.0).to(tl.float32) * g_cmp[:, None]
    out += tl.load(sel_ptr + at, mask=mask, other=0.0).to(tl.float32) * g_sel[:, None]
    out += tl.load(win_ptr + at, mask=mask, other=0.0).to(tl.float32) * g_win[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _branch_backward(out_ptr, dout_ptr, do, gate, at, mask):
    """Stores the branch's output gradient and returns its gate's."""
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dout_ptr + at, (do * gate[:, None]).to(dout_ptr.dtype.element_ty), mask=mask)
    return tl.sum(out * do, 1)


@triton.jit
def _gated_sum_backward_kernel(
    do_ptr,
    cmp_ptr,
    sel_ptr,
    win_ptr,
    gates_ptr,
    dcmp_ptr,
    dsel_ptr,
    dwin_ptr,
    dgates_ptr,
    deltas_ptr,
    n_rows,
    T,
    H,
    g_b,
    g_t,
    g_h,
    g_3,
    HAS_DELTAS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DP)
    live = row < n_rows
    mask = live[:, None] & (c < D)[None, :]
    g_cmp, g_sel, g_win = _load_gates(gates_ptr, row, T, H, g_b, g_t, g_h, g_3, live)
    at = row[:, None] * D + c[None, :]
    do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dg_cmp = _branch_backward(cmp_ptr, dcmp_ptr, do, g_cmp, at, mask)
    dg_sel = _branch_backward(sel_ptr, dsel_ptr, do, g_sel, at, mask)
    dg_win = _branch_backward(win_ptr, dwin_ptr, do, g_win, at, mask)
    dtype: tl.constexpr = dgates_ptr.dtype.element_ty
    tl.store(dgates_ptr + row * 3, dg_cmp.to(dtype), mask=live)
    tl.store(dgates_ptr + row * 3 + 1, dg_sel.to(dtype), mask=live)
    tl.store(dgates_ptr + row * 3 + 2, dg_win.to(dtype), mask=live)
    if HAS_DELTAS:
        tl.store(deltas_ptr + row, dg_cmp * g_cmp, mask=live)
        tl.store(deltas_ptr + n_rows + row, dg_sel * g_sel, mask=live)
        tl.store(deltas_ptr + 2 * tl.cast(n_rows, tl.int64) + row, dg_win * g_win, mask=live)


# Defined by schema for the host's sake; selected.py has the figures.
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
    """`gated_sum` itself, past its checks and PyTorch's dispatcher."""
    B, T, H, D = out_cmp.shape
    rows = B * T * H
    out = out_cmp.new_empty(out_cmp.shape)
    tile_rows = _TILE // padded_width(D)
    _gated_sum_kernel[(ceil_div(rows, tile_rows),)](
        out_cmp.contiguous(),
        out_sel.contiguous(),
        out_win.contiguous(),
        gates,
        out,
        rows,
        T,
        H,
        *gates.stride(),
        D=D,
        DP=padded_width(D),
        ROWS=tile_rows,
        num_warps=4,
    )
    return out


torch.library.impl("nsa_lab::gated_sum", ("cpu", "cuda"), forward)


@torch.library.register_fake("nsa_lab::gated_sum")
def _(out_cmp, out_sel, out_win, gates):
    return out_cmp.new_empty(out_cmp.shape)


def backward(
    do: Tensor, out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor, deltas: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the outputs and the gates. `deltas` float32 [3, B, T, H] takes sum(out * d_out) of each branch."""
    B, T, H, D = out_cmp.shape
    rows = B * T * H
    dcmp, dsel, dwin, dgates = (x.new_empty(x.shape) for x in (out_cmp, out_sel, out_win, gates))
    tile_rows = _TILE // padded_width(D)
    _gated_sum_backward_kernel[(ceil_div(rows, tile_rows),)](
        do.contiguous(),
        out_cmp.contiguous(),
        out_sel.contiguous(),
        out_win.contiguous(),
        gates,
        dcmp,
        dsel,
        dwin,
        dgates,
        deltas,
        rows,
        T,
        H,
        *gates.stride(),
        HAS_DELTAS=deltas is not None,
        D=D,
        DP=padded_width(D),
        ROWS=tile_rows,
        num_warps=4,
    )
    return dcmp, dsel, dwin, dgates


torch.library.impl("nsa_lab::gated_sum_backward", ("cpu", "cuda"), backward)


@torch.library.register_fake("nsa_lab::gated_sum_backward")
def _(do, out_cmp, out_sel, out_win, gates):
    return tuple(x.new_empty(x.shape) for x in (out_cmp, out_sel, out_win, gates))


def _backward(ctx, do):
    return _gated_sum_backward(do, *ctx.saved_tensors)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


torch.library.register_autograd("nsa_lab::gated_sum", _backward, setup_context=_setup_context)


def gated_sum(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    """out_* [B, T, H, Dv] of one dtype, gates [B, T, H, 3] after sigmoid or softmax -> [B, T, H, Dv] in that dtype.

    Products and sums are in float32. ValueError for shapes that do not fit, NotImplementedError past the kernels' limits.
    """
    shape = out_cmp.shape
    if len(shape) != 4 or out_sel.shape != shape or out_win.shape != shape or gates.shape != (*shape[:3], 3):
        raise ValueError(
            "gated_sum: expected three outputs [B, T, H, Dv] and gates [B, T, H, 3]; got "
            f"{list(shape)}, {list(out_sel.shape)}, {list(out_win.shape)}, {list(gates.shape)}"
        )
    check_kernel_limits("gated_sum", (out_cmp, out_sel, out_win), (shape[3],))
    return _gated_sum(out_cmp, out_sel, out_win, gates)
