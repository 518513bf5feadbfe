"""Device functions that the kernels of all branches share: load and store tiles, multiply them, find a program's tile."""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels import kernel_names

LOG2E = tl.constexpr(kernel_names.LOG2E)
LN2 = tl.constexpr(1 / kernel_names.LOG2E)
DEFAULT_EVICTION = tl.constexpr("")  # eviction policy of a store: the default order of the L2 cache


@triton.jit
def load_at(pointers, columns, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Load a tile whose rows all exist. `columns` are less than STOP; those from WIDTH on are zero."""
    if STOP <= WIDTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows(base, offsets, columns, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Load rows at `offsets` elements from `base`, all of which exist."""
    return load_at(base + offsets[:, None] + columns[None, :], columns, WIDTH, STOP)


@triton.jit
def load_rows_masked(base, offsets, columns, inside, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Like `load_rows`. Rows that are not `inside` are not read and are zero."""
    pointers = base + offsets[:, None] + columns[None, :]
    if STOP <= WIDTH:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    return tl.load(pointers, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def row_offsets(t, head, stride_t, stride_h, WIDE: tl.constexpr):
    """Return element offsets of (query, head) rows. They have 32 bits unless WIDE, which halves the instructions."""
    if WIDE:
        offsets = t.to(tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h
    else:
        offsets = t.to(tl.int32) * stride_t + tl.cast(head, tl.int32) * stride_h
    return offsets


@triton.jit
def get_batch_and_group(B, G):
    """Return (sequence, group) of this program. They vary fastest along axis 0 of the grid, the tile slowest."""
    bg = tl.program_id(0) % (B * G)
    return (bg // G).to(tl.int64), (bg % G).to(tl.int64)


@triton.jit
def get_reversed_tile(B, G):
    """Return (tile, sequence, group) of this program. The last queries read most keys, so their programs start first."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // (B * G)
    b, g = get_batch_and_group(B, G)
    return tile, b, g


@triton.jit
def load_consecutive(
    base, stride, start, N, columns, WIDTH: tl.constexpr, STOP: tl.constexpr, ROWS: tl.constexpr, CLAMP: tl.constexpr
):  # fmt: skip
    """Load rows start .. start+ROWS-1 of a [N, WIDTH] matrix.

    CLAMP: rows past the end repeat the last row, and the caller masks them. Without CLAMP the offsets inside a tile are the
    same for all tiles, so the compiler hoists them out of the loop; they fit in 32 bits.
    """
    i = tl.arange(0, ROWS)
    if CLAMP:
        i = tl.minimum(i, N - 1 - start)
    pointers = base + tl.cast(start, tl.int64) * stride + (i[:, None] * stride + columns[None, :])
    return load_at(pointers, columns, WIDTH, STOP)


IS_INTERPRETED = not isinstance(load_at, triton.runtime.JITFunction)
"""True if Triton was imported with TRITON_INTERPRET=1 and runs kernels on CPU tensors."""


@triton.jit
def add_product(total, a, b):
    """Return total + a @ b.

    In float32 the product is summed separately and then added. A sum over all queries of a long sequence is then rounded
    once per tile, not once per query, which is the error of a blocked matrix product. The addition is an `fma`, because the
    compiler would merge a plain addition into the accumulator of the product.
    """
    if a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision="ieee"), tl.full(total.shape, 1.0, tl.float32), total)
    return tl.dot(a, b, total, input_precision="ieee")


# A head width can be split into two tiles: columns [0, PART), all of which exist, and then REST columns, some of which may
# be past the width. If REST is 0, the first tile is passed in place of the second, which is not used.


@triton.jit
def load_parts(base, offsets, WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr):
    """Load rows at `offsets` elements from `base`, all of which exist, as two tiles."""
    first = load_rows(base, offsets, tl.arange(0, PART), WIDTH, PART)
    rest = first
    if REST > 0:
        rest = load_rows(base, offsets, PART + tl.arange(0, REST), WIDTH, PART + REST)
    return first, rest


@triton.jit
def load_parts_masked(base, offsets, inside, WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr):
    """Like `load_parts`. Rows that are not `inside` are not read and are zero."""
    first = load_rows_masked(base, offsets, tl.arange(0, PART), inside, WIDTH, PART)
    rest = first
    if REST > 0:
        rest = load_rows_masked(base, offsets, PART + tl.arange(0, REST), inside, WIDTH, PART + REST)
    return first, rest


@triton.jit
def load_consecutive_parts(
    base, stride, start, N,
    WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Like `load_consecutive`, as two tiles."""
    first = load_consecutive(base, stride, start, N, tl.arange(0, PART), WIDTH, PART, ROWS, CLAMP)
    rest = first
    if REST > 0:
        rest = load_consecutive(base, stride, start, N, PART + tl.arange(0, REST), WIDTH, PART + REST, ROWS, CLAMP)
    return first, rest


@triton.jit
def _store_columns(
    base, offsets, tile, inside, WIDTH: tl.constexpr, START: tl.constexpr, COLUMNS: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    columns = START + tl.arange(0, COLUMNS)
    mask = None
    if START + COLUMNS > WIDTH:
        mask = (columns < WIDTH)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    pointers = (base + offsets)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask, eviction_policy=EVICTION)


@triton.jit
def store_parts(
    base, offsets, first, rest, inside, WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr,
    EVICTION: tl.constexpr = DEFAULT_EVICTION,
):  # fmt: skip
    """Store rows at `offsets` elements from `base`, only those that are `inside`; None: all of them."""
    _store_columns(base, offsets, first, inside, WIDTH, 0, PART, EVICTION)
    if REST > 0:
        _store_columns(base, offsets, rest, inside, WIDTH, PART, REST, EVICTION)


@triton.jit
def zero_parts(ROWS: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr):
    first = tl.zeros([ROWS, PART], tl.float32)
    rest = first
    if REST > 0:
        rest = tl.zeros([ROWS, REST], tl.float32)
    return first, rest


@triton.jit
def dot_transposed(a, a_rest, b, b_rest, REST: tl.constexpr):
    """Return a @ b^T. Both matrices are given in two parts of their columns."""
    product = tl.dot(a, tl.trans(b), input_precision="ieee")
    if REST > 0:
        product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision="ieee")
    return product


@triton.jit
def rescale_and_add(total, total_rest, rescale, a, b, b_rest, REST: tl.constexpr):
    """Return total * rescale + a @ b. b and the total are in two parts."""
    total = tl.dot(a, b, total * rescale[:, None], input_precision="ieee")
    if REST > 0:
        total_rest = tl.dot(a, b_rest, total_rest * rescale[:, None], input_precision="ieee")
    return total, total_rest


@triton.jit
def add_product_parts(total, total_rest, a, b, b_rest, REST: tl.constexpr):
    """Return total + a @ b. b and the total are in two parts."""
    total = add_product(total, a, b)
    if REST > 0:
        total_rest = add_product(total_rest, a, b_rest)
    return total, total_rest


@triton.jit
def add_product_compensated(total, error, a, b):
    """Return (total + a @ b, rounding error of that sum), with Kahan's compensated summation (1965) in float32.

    `error` is the rounding error of the previous additions. With it, a sum over thousands of tiles has the error of a sum
    over a few. For half-precision inputs, whose own rounding error is much larger, `error` is returned unchanged.
    """
    if a.dtype == tl.float32:
        addend = add_product(-error, a, b)
        new_total = total + addend
        error = (new_total - total) - addend
        total = new_total
    else:
        total = add_product(total, a, b)
    return total, error
