"""Who sees whom in a band: the key tiles of a tile of queries, and the steps over queries of a tile of keys.

Query t sees key i iff  i*STRIDE + L - 1 <= t;  where there is a window (W > 0, and then L = STRIDE = 1), iff
t - W < i <= t.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import triton
import triton.language as tl


class Specialization(Protocol):
    """What Triton tells of a kernel that it is about to compile."""

    constants: dict[str, int]


def name_by_branch(step: str) -> Callable[[Specialization], str]:
    """How a profile shows a kernel of this folder: by the branch that it is compiled for, which W says."""

    def name(specialization: Specialization) -> str:
        return f"nsa_{'window' if specialization.constants['W'] else 'compressed'}_{step}"

    return name


@triton.jit
def count_visible_keys(t, L: tl.constexpr, STRIDE: tl.constexpr):
    """Keys that have ended by t: a prefix of that many."""
    return tl.maximum((t - L + 1 + STRIDE) // STRIDE, 0)


@triton.jit
def is_in_band(i, t, N, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Whether query t sees key i; broadcasts."""
    if W > 0:
        return (t - i).to(tl.uint32) < W  # 0 <= t - i < W, and i <= t < N
    return (i < N) & (i < count_visible_keys(t, L, STRIDE))


@triton.jit
def get_row_tile(tile, T, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Query and head of each of a tile's rows, and the tile's first and last query.

    Rows past the end repeat the last one, so that loads need no mask.
    """
    row = tl.minimum(tile * ROWS + tl.arange(0, ROWS), T * HEADS - 1)
    return row // HEADS, row % HEADS, (tile * ROWS) // HEADS, tl.minimum((tile * ROWS + ROWS - 1) // HEADS, T - 1)


@triton.jit
def get_key_range(t_first, t_last, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr):
    """The key tiles that queries t_first .. t_last see: (start, left, full, stop), all in keys.

    Those from `start` need a mask at the band's left edge, those from `left` need none, those from `full` up to `stop` need
    one at the right edge.
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
    """The first key of step `step` of a loop over key tiles: those in [left, full), or, MASKED, those before and after.

    One loop takes both edges: with a loop for each, ptxas made every tensor-core product of the window's forward pass, with
    heads of 64, wait for the one before.
    """
    return step + tl.where(step < left, 0, full - left) if MASKED else step


@triton.jit
def get_query_range(i_first, i_last, T, L: tl.constexpr, STRIDE: tl.constexpr, W: tl.constexpr):
    """Of keys i_first .. i_last: (start, full, full_stop, stop).

    Queries [start, stop) see some of these keys, and [full, full_stop) all of them.
    """
    start = (i_first * STRIDE + L - 1) // 16 * 16  # aligned, for wide loads; queries before the true start are masked
    full = i_last * STRIDE + L - 1
    if W > 0:
        return start, full, tl.minimum(i_first + W, T), tl.minimum(i_last + W, T)
    return start, full, T, T


@triton.jit
def get_step_range(t_start, t_stop, W: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(t_origin, start, stop): the query that steps are counted from, and the steps over queries [t_start, t_stop).

    HEADS steps take the same ROWS queries, one head each. Without a window all key tiles count from query 0, so that a
    chunk of steps is the same queries for all of them.
    """
    t_origin = t_start if W > 0 else 0
    return t_origin, (t_start - t_origin) // ROWS * HEADS, tl.cdiv(t_stop - t_origin, ROWS) * HEADS
