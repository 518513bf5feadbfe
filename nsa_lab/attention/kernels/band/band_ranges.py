"""Index ranges of a band: the key tiles of a tile of queries, and the steps over queries of a tile of keys.

Query t attends to key i iff  i*STRIDE + L - 1 <= t;  with a window (W > 0, which requires L = STRIDE = 1), iff
t - W < i <= t.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import triton
import triton.language as tl


class Specialization(Protocol):
    """Information that Triton passes to `repr` about a kernel that it is about to compile."""

    constants: dict[str, int]


def name_by_branch(step: str) -> Callable[[Specialization], str]:
    """Return the `repr` function of a kernel: it names the kernel in a profile by its branch, which W determines."""

    def make_name(specialization: Specialization) -> str:
        return f"nsa_{'window' if specialization.constants['W'] else 'compressed'}_{step}"

    return make_name


@triton.jit
def count_visible_keys(t, L: tl.constexpr, STRIDE: tl.constexpr):
    """Return the number of keys that end at or before t. The visible keys are a prefix of this length."""
    return tl.maximum((t - L + 1 + STRIDE) // STRIDE, 0)


@triton.jit
def is_in_band(i, t, N, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Return True where query t may attend to key i; broadcasts."""
    if W > 0:
        return (t - i).to(tl.uint32) < W  # 0 <= t - i < W, and i <= t < N
    return (i < N) & (i < count_visible_keys(t, L, STRIDE))


@triton.jit
def get_row_tile(tile, T, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return (query of each row, head of each row, first query, last query) of a tile.

    Rows past the end repeat the last row, so that loads need no mask.
    """
    row = tl.minimum(tile * ROWS + tl.arange(0, ROWS), T * HEADS - 1)
    return row // HEADS, row % HEADS, (tile * ROWS) // HEADS, tl.minimum((tile * ROWS + ROWS - 1) // HEADS, T - 1)


@triton.jit
def get_key_range(t_first, t_last, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr):
    """Return the key tiles that queries t_first .. t_last attend to: (start, left, full, stop), all in keys.

    Tiles in [start, left) need the mask at the left edge of the band, tiles in [left, full) need no mask, and tiles in
    [full, stop) need the mask at the right edge.
    """
    start = 0
    left = 0
    if W > 0:
        start = tl.maximum(t_first - W + 1, 0)
        left = tl.cdiv(tl.maximum(t_last - W + 1, 0) - start, KEYS) * KEYS
    stop = start + tl.cdiv(tl.maximum(count_visible_keys(t_last, L, STRIDE) - start, 0), KEYS) * KEYS
    full = start + tl.maximum(count_visible_keys(t_first, L, STRIDE) - start, 0) // KEYS * KEYS
    left = tl.minimum(start + left, stop)
    return start, left, tl.maximum(full, left), stop


@triton.jit
def get_key_tile(step, left, full, MASKED: tl.constexpr):
    """Return the first key of step `step` in a loop over the key tiles in [left, full), or, if MASKED, all other tiles.

    A single loop handles both edges. With a loop for each edge, ptxas made every tensor-core product in the forward pass of
    the window (heads of width 64) wait for the previous one.
    """
    return step + tl.where(step < left, 0, full - left) if MASKED else step


@triton.jit
def get_query_range(i_first, i_last, T, first_query, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Return (start, full, full_stop, stop) for keys i_first .. i_last, in rows of the T queries.

    Queries [start, stop) attend to some of these keys, queries [full, full_stop) to all of them. `first_query`: position of
    query 0; None: 0.
    """
    start = i_first * STRIDE + L - 1
    full = i_last * STRIDE + L - 1
    full_stop = i_first + W
    stop = i_last + W
    if first_query is not None:
        start = tl.maximum(start - first_query, 0)
        full = tl.maximum(full - first_query, 0)
        full_stop = tl.maximum(full_stop - first_query, 0)
        stop = tl.maximum(stop - first_query, 0)
    start = start // 16 * 16  # aligned for wide loads; queries before the exact start are masked
    if W > 0:
        return start, full, tl.minimum(full_stop, T), tl.minimum(stop, T)
    return start, full, T, T


@triton.jit
def get_step_range(t_start, t_stop, W: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return (t_origin, start, stop): the query at which step 0 starts, and the steps over queries [t_start, t_stop).

    HEADS consecutive steps process the same ROWS queries, one head each. Without a window all key tiles count from query 0,
    so that a chunk of steps covers the same queries for all of them.
    """
    t_origin = t_start if W > 0 else 0
    return t_origin, (t_start - t_origin) // ROWS * HEADS, tl.cdiv(t_stop - t_origin, ROWS) * HEADS
