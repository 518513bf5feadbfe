"""What the kernels of all branches do alike: rows into a tile, and which tile a program works on."""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl

from nsa_lab.attention.kernels import kernel_names

LOG2E = tl.constexpr(kernel_names.LOG2E)
LN2 = tl.constexpr(1 / kernel_names.LOG2E)
DEFAULT_EVICTION = tl.constexpr("")  # of a store: what it writes leaves the L2 cache when its turn comes


@triton.jit
def load_at(pointers, columns, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """The tile at `pointers`, all of whose rows exist, of `columns` before STOP: zero past WIDTH columns."""
    if STOP <= WIDTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows(base, offsets, columns, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """Rows at `offsets` elements from `base`, all of which exist."""
    return load_at(base + offsets[:, None] + columns[None, :], columns, WIDTH, STOP)


@triton.jit
def load_rows_masked(base, offsets, columns, inside, WIDTH: tl.constexpr, STOP: tl.constexpr):
    """As `load_rows`; rows that are not `inside` are not read, and come out zero."""
    pointers = base + offsets[:, None] + columns[None, :]
    if STOP <= WIDTH:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    return tl.load(pointers, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def row_offsets(t, head, stride_t, stride_h, WIDE: tl.constexpr):
    """Element offsets of (query, head) rows; 32 bits unless WIDE, for half of the instructions."""
    if WIDE:
        offsets = t.to(tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h
    else:
        offsets = t.to(tl.int32) * stride_t + tl.cast(head, tl.int32) * stride_h
    return offsets


@triton.jit
def get_batch_and_group(B, G):
    """Sequence and group of this program, of which the fastest axis of the grid has all for every tile."""
    bg = tl.program_id(0) % (B * G)
    return (bg // G).to(tl.int64), (bg % G).to(tl.int64)


@triton.jit
def get_reversed_tile(B, G):
    """Tile, sequence and group of this program. The last queries have most to read, so their programs start first."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // (B * G)
    b, g = get_batch_and_group(B, G)
    return tile, b, g


@triton.jit
def load_consecutive(
    base, stride, start, N, columns, WIDTH: tl.constexpr, STOP: tl.constexpr, ROWS: tl.constexpr, CLAMP: tl.constexpr
):  # fmt: skip
    """Rows start .. start+ROWS-1 of a [N, WIDTH] matrix.

    CLAMP: some may lie past the end; they repeat the last row, and the caller masks them. Without it the offsets inside the
    tile do not change from one tile to the next, and the compiler takes them out of the loop; they fit 32 bits.
    """
    i = tl.arange(0, ROWS)
    if CLAMP:
        i = tl.minimum(i, N - 1 - start)
    pointers = base + tl.cast(start, tl.int64) * stride + (i[:, None] * stride + columns[None, :])
    return load_at(pointers, columns, WIDTH, STOP)


IS_INTERPRETED = not isinstance(load_at, triton.runtime.JITFunction)
"""True when Triton was imported under TRITON_INTERPRET=1, and so runs kernels on CPU tensors."""


@triton.jit
def add_product(total, a, b):
    """total + a b, of tiles.

    In float32 the product is summed up by itself first. The sum over all of a long text's queries is then rounded once for
    each tile, not for each query: it errs by what a blocked matrix product errs. `fma`, because the compiler would join an
    addition and a product into the one accumulation.
    """
    if a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision="ieee"), tl.full(total.shape, 1.0, tl.float32), total)
    return tl.dot(a, b, total, input_precision="ieee")


# A width that is worked on as two tiles side by side: columns [0, PART), all of which exist, and the REST after them, some
# of which may be past the width. Where there is no REST, the first tile stands in the place of the second, too.


@triton.jit
def load_parts(base, offsets, WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr):
    """Rows at `offsets` elements from `base`, all of which exist, as two tiles."""
    first = load_rows(base, offsets, tl.arange(0, PART), WIDTH, PART)
    rest = first
    if REST > 0:
        rest = load_rows(base, offsets, PART + tl.arange(0, REST), WIDTH, PART + REST)
    return first, rest


@triton.jit
def load_parts_masked(base, offsets, inside, WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr):
    """As `load_parts`; rows that are not `inside` are not read, and come out zero."""
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
    """As `load_consecutive`, as two tiles."""
    first = load_consecutive(base, stride, start, N, tl.arange(0, PART), WIDTH, PART, ROWS, CLAMP)
    rest = first
    if REST > 0:
        rest = load_consecutive(base, stride, start, N, PART + tl.arange(0, REST), WIDTH, PART + REST, ROWS, CLAMP)
    return first, rest


@triton.jit
def _store_columns(
    base, offsets, tile, inside, WIDTH: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, EVICTED: tl.constexpr
):  # fmt: skip
    columns = FIRST + tl.arange(0, COLUMNS)
    mask = None
    if FIRST + COLUMNS > WIDTH:
        mask = (columns < WIDTH)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    pointers = (base + offsets)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask, eviction_policy=EVICTED)


@triton.jit
def store_parts(
    base, offsets, first, rest, inside, WIDTH: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr,
    EVICTED: tl.constexpr = DEFAULT_EVICTION,
):  # fmt: skip
    """Rows at `offsets` elements from `base`, of those that are `inside`; None: all."""
    _store_columns(base, offsets, first, inside, WIDTH, 0, PART, EVICTED)
    if REST > 0:
        _store_columns(base, offsets, rest, inside, WIDTH, PART, REST, EVICTED)


@triton.jit
def zero_parts(ROWS: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr):
    first = tl.zeros([ROWS, PART], tl.float32)
    rest = first
    if REST > 0:
        rest = tl.zeros([ROWS, REST], tl.float32)
    return first, rest


@triton.jit
def dot_transposed(a, a_rest, b, b_rest, REST: tl.constexpr):
    """a b^T of tiles given in two parts."""
    product = tl.dot(a, tl.trans(b), input_precision="ieee")
    if REST > 0:
        product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision="ieee")
    return product


@triton.jit
def rescale_and_add(total, total_rest, shrink, a, b, b_rest, REST: tl.constexpr):
    """total * shrink + a b, where b and the total are in two parts."""
    total = tl.dot(a, b, total * shrink[:, None], input_precision="ieee")
    if REST > 0:
        total_rest = tl.dot(a, b_rest, total_rest * shrink[:, None], input_precision="ieee")
    return total, total_rest


@triton.jit
def add_product_parts(total, total_rest, a, b, b_rest, REST: tl.constexpr):
    """total + a b, where b and the total are in two parts."""
    total = add_product(total, a, b)
    if REST > 0:
        total_rest = add_product(total_rest, a, b_rest)
    return total, total_rest


@triton.jit
def add_product_compensated(total, lost, a, b):
    """(total + a b, what rounding that sum lost) of tiles in float32; `lost` is what the sums before have lost.

    A sum over thousands of tiles is rounded as one of a few would be (W. Kahan, 1965). In half precision, whose numbers
    err by far more, `lost` stays as it is.
    """
    if a.dtype == tl.float32:
        more = add_product(-lost, a, b)
        exact = total + more
        lost = (exact - total) - more
        total = exact
    else:
        total = add_product(total, a, b)
    return total, lost
