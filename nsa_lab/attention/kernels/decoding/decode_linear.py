"""Linear layers of a few rows, fused with the norm before them and the activation or residual after them.

The time of such a layer is the time to read its weights. A separate norm, activation or residual would take as long as the
layer, because of its launch. launch.py launches this kernel.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
# The outer of two nested `if`s is evaluated at compile time, so that code for absent inputs is not compiled.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.decoding.pdl import pdl_wait, prefetch_to_l2
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS

SILU, SIGMOID = tl.constexpr(1), tl.constexpr(2)
ACTIVATIONS = {"": 0, "silu": 1, "sigmoid": 2}
"""Activation after a linear layer: name in `kernels.linear` -> constant in the kernel."""


# fmt: off
@triton.jit
def load_norm(norm_ptr, k, K: tl.constexpr):
    """Load the weight of the norm, float32 [k]; ones without a norm."""
    norm = tl.full(k.shape, 1.0, tl.float32)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    return norm


@triton.jit
def load_inputs(x_ptr, row, rows, k, K: tl.constexpr):
    """Load x at `row` and `k`, which broadcast to the shape of the tile; float32."""
    return tl.load(x_ptr + row * K + k, mask=(row < rows) & (k < K), other=0.0).to(tl.float32)


@triton.jit
def load_residual(residual_ptr, row, rows, n, N):
    """Load the residual, float32 [ROWS, n]; zeros without a residual."""
    residual = tl.zeros([row.shape[0], n.shape[0]], tl.float32)
    if residual_ptr is not None:
        inside = (row < rows)[:, None] & (n < N)[None, :]
        residual = tl.load(residual_ptr + row[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    return residual


@triton.jit
def load_weights(w_ptr, n, N, N0: tl.constexpr, k, K: tl.constexpr, IS_GATED: tl.constexpr):
    """Load weights of the layer and of its gate at `n` and `k`, which broadcast to the shape of the tile.

    The rows of the gate come first; without one, both are equal.
    """
    place = n.to(tl.int64) * K + k
    inside = (n < N) & (k < K)
    gate = tl.load(w_ptr + place, mask=inside, other=0.0)
    w = gate
    if IS_GATED:
        w = tl.load(w_ptr + N0 * K + place, mask=inside, other=0.0)
    return w, gate


@triton.jit
def prefetch_weights(w_ptr, n, N, K: tl.constexpr):
    """Prefetch rows n of a weight, 16 cache lines of each at once."""
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, 16) * LINE
    for start in tl.static_range(0, K, 16 * LINE):
        k = start + line
        prefetch_to_l2(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :])


@triton.jit
def compute_outer_products(x, w):
    """Return the elementwise products of x [ROWS, K] and w [N, K]: [ROWS, N, K]."""
    return x[:, None, :] * w.to(tl.float32)[None, :, :]


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_linear(
    x_ptr, norm_ptr, residual_ptr, w0_ptr, w1_ptr, w2_ptr, y0_ptr, y1_ptr, y2_ptr,
    n_rows, eps,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr,
    ACTIVATION0: tl.constexpr, ACTIVATION1: tl.constexpr, ACTIVATION2: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Compute COLUMNS columns of one of up to three layers of the same ROWS rows: y = residual + activation(norm(x) @ w^T).

    IS_GATED: w0 has 2 N0 rows, the gate first, and y is activation(gate) times the product with the other rows.
    The normalization factor of a row is applied to the sum. A chunk of K is split into SPLITS products, one per warp: the
    tile is too small for one product by all warps. USE_PDL: see pdl.py; weights are loaded before x is available.
    """
    WIDE: tl.constexpr = ROWS >= 16
    TILES0: tl.constexpr = (N0 + COLUMNS - 1) // COLUMNS
    TILES1: tl.constexpr = (N1 + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    w_ptr, y_ptr, N, activation = w0_ptr, y0_ptr, N0, ACTIVATION0
    if N1 > 0:
        if tile >= TILES0:
            w_ptr, y_ptr, N, activation = w1_ptr, y1_ptr, N1, ACTIVATION1
            tile -= TILES0
            if N2 > 0:
                if tile >= TILES1:
                    w_ptr, y_ptr, N, activation = w2_ptr, y2_ptr, N2, ACTIVATION2
                    tile -= TILES1
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if WIDE:
        if USE_PDL:
            prefetch_weights(w_ptr, n, N, K)
            if IS_GATED:
                prefetch_weights(w_ptr + N0 * K, n, N, K)
        residual = load_residual(residual_ptr, row, n_rows, n, N)
        pdl_wait(USE_PDL)
        acc = tl.zeros([SPLITS, ROWS, COLUMNS], tl.float32)
        gate = acc
        products = tl.zeros([SPLITS, ROWS, ROWS], tl.float32)  # of the rows with each other
        part = tl.arange(0, SPLITS)[:, None] * (CHUNK // SPLITS) + tl.arange(0, CHUNK // SPLITS)[None, :]
        for chunk_start in range(0, K, CHUNK):
            k = chunk_start + part
            inside = (row < n_rows)[None, :, None] & (k < K)[:, None, :]
            x = tl.load(x_ptr + row[None, :, None] * K + k[:, None, :], mask=inside, other=0.0)
            w, gate_w = load_weights(w_ptr, n[None, :, None], N, N0, k[:, None, :], K, IS_GATED)
            if norm_ptr is not None:
                # The tensor cores sum the squares in a fraction of the time of elementwise operations.
                products = tl.dot(x, tl.permute(x, [0, 2, 1]), products, input_precision="ieee")
                x = x.to(tl.float32) * load_norm(norm_ptr, k, K)[:, None, :]
            x = x.to(w.dtype)
            acc = tl.dot(x, tl.permute(w, [0, 2, 1]), acc, input_precision="ieee")
            if IS_GATED:
                gate = tl.dot(x, tl.permute(gate_w, [0, 2, 1]), gate, input_precision="ieee")
        acc, gate = tl.sum(acc, 0), tl.sum(gate, 0)
        index = tl.arange(0, ROWS)
        squares = tl.sum(tl.sum(tl.where((index[:, None] == index[None, :])[None, :, :], products, 0.0), 2), 0)
    else:
        # A tensor-core product needs 16 rows; fewer rows are multiplied elementwise and summed over K at the end.
        k = tl.arange(0, CHUNK)
        w, gate_w = load_weights(w_ptr, n[:, None], N, N0, k[None, :], K, IS_GATED)
        norm = load_norm(norm_ptr, k, K)
        residual = load_residual(residual_ptr, row, n_rows, n, N)
        pdl_wait(USE_PDL)
        x = load_inputs(x_ptr, row[:, None], n_rows, k[None, :], K)
        squares = tl.sum(x * x, 1)
        x *= norm[None, :]
        acc = compute_outer_products(x, w)
        gate = compute_outer_products(x, gate_w)
        for chunk_start in range(CHUNK, K, CHUNK):
            k = chunk_start + tl.arange(0, CHUNK)
            w, gate_w = load_weights(w_ptr, n[:, None], N, N0, k[None, :], K, IS_GATED)
            x = load_inputs(x_ptr, row[:, None], n_rows, k[None, :], K)
            squares += tl.sum(x * x, 1)
            x *= load_norm(norm_ptr, k, K)[None, :]
            acc += compute_outer_products(x, w)
            if IS_GATED:
                gate += compute_outer_products(x, gate_w)
        acc, gate = tl.sum(acc, 2), tl.sum(gate, 2)
    if norm_ptr is not None:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        acc, gate = acc * scale, gate * scale
    activation_input = gate if IS_GATED else acc
    sigmoid = tl.sigmoid(activation_input)
    y = tl.where(activation == SILU, activation_input * sigmoid, tl.where(activation == SIGMOID, sigmoid, activation_input))
    if IS_GATED:
        y = y * acc
    inside = (row < n_rows)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + n[None, :], (y + residual).to(y_ptr.dtype.element_ty), mask=inside)
# fmt: on
