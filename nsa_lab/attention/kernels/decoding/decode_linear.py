"""Linear maps of a few rows, with the norm before them and what follows them. launch.py launches this kernel.

Such a map costs the reading of its weights. A norm, an activation or a residual by itself would cost as much as the map:
not for what it does, but for being launched.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
# An outer `if` of two is decided when a kernel is compiled: of what is not there nothing can be.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS

SILU, SIGMOID = tl.constexpr(1), tl.constexpr(2)
ACTIVATIONS = {"": 0, "silu": 1, "sigmoid": 2}
"""What may follow a map, as `kernels.linear` and the kernel name it."""


# fmt: off
@triton.jit
def load_norm(norm_ptr, k, K: tl.constexpr):
    """The norm's weight, float32 [k]; without a norm 1."""
    norm = tl.full(k.shape, 1.0, tl.float32)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    return norm


@triton.jit
def load_inputs(x_ptr, norm, row, rows, k, K: tl.constexpr):
    """x [ROWS, k] of rows that exist, times the norm's weight, and its squares summed; float32."""
    x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=(row < rows)[:, None] & (k < K)[None, :], other=0.0)
    x = x.to(tl.float32)
    return x * norm[None, :], tl.sum(x * x, 1)


@triton.jit
def load_residual(residual_ptr, row, rows, n, N):
    """float32 [ROWS, n]; without a residual 0."""
    residual = tl.zeros([row.shape[0], n.shape[0]], tl.float32)
    if residual_ptr is not None:
        inside = (row < rows)[:, None] & (n < N)[None, :]
        residual = tl.load(residual_ptr + row[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    return residual


@triton.jit
def load_weights(w_ptr, n, N, N0: tl.constexpr, k, K: tl.constexpr, GATED: tl.constexpr):
    """w [N, k] of what is mapped, and of its gate, whose rows come first; without a gate the same twice."""
    place = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    gate = tl.load(w_ptr + place, mask=inside, other=0.0)
    w = gate
    if GATED:
        w = tl.load(w_ptr + N0 * K + place, mask=inside, other=0.0)
    return w, gate


@triton.jit
def compute_outer_products(x, w):
    """Of x [ROWS, K] and w [N, K], each number by each: [ROWS, N, K]."""
    return x[:, None, :] * w.to(tl.float32)[None, :, :]


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_linear(
    x_ptr, norm_ptr, residual_ptr, w0_ptr, w1_ptr, w2_ptr, y0_ptr, y1_ptr, y2_ptr,
    n_rows, eps,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr,
    THEN0: tl.constexpr, THEN1: tl.constexpr, THEN2: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):
    """COLUMNS columns of one of up to three maps of the same ROWS rows: y = residual + then(norm(x) @ w^T).

    GATED: w0 has 2 N0 rows, those of a gate first, and y is then(gate) times what the others give. The norm's scale, which
    is a row's own, is applied to the sum. EARLY: see turn.py; of few rows the first weights are here before x is.
    """
    WIDE: tl.constexpr = ROWS >= 16
    TILES0: tl.constexpr = (N0 + COLUMNS - 1) // COLUMNS
    TILES1: tl.constexpr = (N1 + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    w_ptr, y_ptr, N, then = w0_ptr, y0_ptr, N0, THEN0
    if N1 > 0:
        if tile >= TILES0:
            w_ptr, y_ptr, N, then = w1_ptr, y1_ptr, N1, THEN1
            tile -= TILES0
            if N2 > 0:
                if tile >= TILES1:
                    w_ptr, y_ptr, N, then = w2_ptr, y2_ptr, N2, THEN2
                    tile -= TILES1
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if WIDE:
        residual = load_residual(residual_ptr, row, n_rows, n, N)
        pdl_wait(EARLY)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        gate = acc
        squares = tl.zeros([ROWS], tl.float32)
        for first in range(0, K, CHUNK):
            k = first + tl.arange(0, CHUNK)
            x, more = load_inputs(x_ptr, load_norm(norm_ptr, k, K), row, n_rows, k, K)
            squares += more
            w, w_gate = load_weights(w_ptr, n, N, N0, k, K, GATED)
            acc = tl.dot(x.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
            if GATED:
                gate = tl.dot(x.to(w.dtype), tl.trans(w_gate), gate, input_precision="ieee")
    else:
        # A tensor core takes 16 rows; fewer are multiplied number by number, and summed over K at the end.
        k = tl.arange(0, CHUNK)
        w, w_gate = load_weights(w_ptr, n, N, N0, k, K, GATED)
        norm = load_norm(norm_ptr, k, K)
        residual = load_residual(residual_ptr, row, n_rows, n, N)
        pdl_wait(EARLY)
        x, squares = load_inputs(x_ptr, norm, row, n_rows, k, K)
        acc = compute_outer_products(x, w)
        gate = compute_outer_products(x, w_gate)
        for first in range(CHUNK, K, CHUNK):
            w, w_gate = load_weights(w_ptr, n, N, N0, first + k, K, GATED)
            x, more = load_inputs(x_ptr, load_norm(norm_ptr, first + k, K), row, n_rows, first + k, K)
            squares += more
            acc += compute_outer_products(x, w)
            if GATED:
                gate += compute_outer_products(x, w_gate)
        acc, gate = tl.sum(acc, 2), tl.sum(gate, 2)
    if norm_ptr is not None:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        acc, gate = acc * scale, gate * scale
    fed = gate if GATED else acc
    squashed = tl.sigmoid(fed)
    y = tl.where(then == SILU, fed * squashed, tl.where(then == SIGMOID, squashed, fed))
    if GATED:
        y = y * acc
    inside = (row < n_rows)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + n[None, :], (y + residual).to(y_ptr.dtype.element_ty), mask=inside)
# fmt: on
