"""Embeddings of new tokens and of the n-grams that end with them. launch.py launches these kernels.

In PyTorch, the hashes of a single token take about forty launches, as long as three layers of a decoding step.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportConstantRedefinition=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels.decoding.pdl import pdl_wait
from nsa_lab.attention.kernels.fast_launch import cache_launches
from nsa_lab.attention.kernels.kernel_names import UNSPECIALIZED_ARGS


# fmt: off
@triton.jit
def copy_row(source, target, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    columns = tl.arange(0, WIDTH_PAD)
    tl.store(target + columns, tl.load(source + columns, mask=columns < WIDTH, other=0.0), mask=columns < WIDTH)


@triton.jit
def scramble(hashes, SHIFT: tl.constexpr):
    return hashes ^ (hashes >> SHIFT)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_ngram_lookup(
    tokens_ptr, latest_ptr, lengths_ptr, embedding_ptr, table_ptr, x_ptr, features_ptr,
    T, ring, n_rows,
    MAX_N: tl.constexpr, BASE: tl.constexpr, MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, USE_PDL: tl.constexpr,
):
    """Look up the embedding of one token, or the feature of the n-gram of one length that ends with it.

    Program 0 of a token copies its embedding, and the token to the ring of the latest tokens, int64 [B, ring]. Program n
    hashes the n + 1 latest tokens, as `NgramEmbedding.compute_rows` does; a token before the sequence counts as 0. `n_rows`
    is the number of rows of `table_ptr` per length. Stores x [B, T, DIM] and features [B, T, MAX_N - 1, WIDTH].
    """
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = row // T, (row % T).to(tl.int32)
    position = tl.load(lengths_ptr + b) + t
    latest_ptr += b * ring
    pdl_wait(USE_PDL)
    if n == 0:
        token = tl.load(tokens_ptr + row)
        tl.store(latest_ptr + position % ring, token)
        copy_row(embedding_ptr + token * DIM, x_ptr + row * DIM, DIM, DIM_PAD)
    else:
        # Vectors of one element: the interpreter warns about the overflow of scalars.
        hashes, power = tl.zeros([1], tl.int64), tl.full([1], 1, tl.int64)
        for i in tl.static_range(MAX_N):
            exists, slot = (i <= n) & (i <= position), tl.maximum(position - i, 0) % ring
            new = tl.load(tokens_ptr + row - i, mask=exists & (i <= t), other=-1)
            cached = tl.load(latest_ptr + slot, mask=exists & (i > t), other=-1)
            power *= BASE
            hashes += (new + cached + 2) * power  # the token plus 1, or 0
        hashes = scramble(scramble(hashes, SHIFT) * MULTIPLIER, SHIFT) % n_rows
        # On a GPU the remainder of a negative number is negative.
        hashes += tl.where(hashes < 0, n_rows, 0)
        table_row = tl.sum(hashes, 0) + (n - 1).to(tl.int64) * n_rows
        copy_row(table_ptr + table_row * WIDTH, features_ptr + (row * (MAX_N - 1) + n - 1) * WIDTH, WIDTH, WIDTH_PAD)


@cache_launches
@triton.jit(do_not_specialize=UNSPECIALIZED_ARGS)
def nsa_rms_norm(x_ptr, y_ptr, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, USE_PDL: tl.constexpr):
    """Compute one row of x / rms(x)."""
    columns = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH_PAD)
    inside = tl.arange(0, WIDTH_PAD) < WIDTH
    pdl_wait(USE_PDL)
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
# fmt: on
