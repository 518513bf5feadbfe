"""What one launch of the selected branch works on: the cut of a large input into pieces that fit the workspace.

Partial results cost 2 KB per (query, head) row at the usual sizes. The cut follows from shapes alone, and is the same in
the forward and the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width

WORKSPACE_BYTES = 2 * 2**30  # all partial results of one launch; larger inputs are worked through in pieces
# (query, head) rows per work item. Short items spread a small problem over the chip; items in the order of their queries
# are short enough that those which run at once read queries near each other.
SHORT_ITEM_ROWS, LONG_ITEM_ROWS, SORTED_ITEM_ROWS = 1536, 6144, 2048
MAX_SHORT_ITEM_ROWS = 2**22
SORT_ABOVE_BYTES = 64 * 2**20  # of a group's q: more than the L2 cache holds beside the partial results


class Sizes(NamedTuple):
    """What every launch needs; `block` is the tokens of a block as the kernels have it, `n_sel` how many a query has."""

    B: int
    T: int
    H: int
    G: int
    n_sel: int
    block: int
    dk: int
    dv: int
    n_documents: int | None = None  # in one row, if there are any; none of their blocks has tokens of two
    first_query: int = 0  # position of the first query

    @property
    def n_keys(self) -> int:
        return self.first_query + self.T

    @property
    def heads(self) -> int:
        return self.H // self.G

    @property
    def n_blocks(self) -> int:
        return ceil_div(self.n_keys, self.block) if self.n_documents is None else self.T // self.block + self.n_documents

    @property
    def scale(self) -> float:
        return self.dk**-0.5

    def get_constants(self) -> dict[str, int]:
        """The compile-time sizes that the kernels share."""
        return {
            "HEADS": self.heads,
            "N_SEL": self.n_sel,
            "BLOCK": self.block,
            "BLOCK_PAD": padded_width(self.block),
            "DK": self.dk,
            "DV": self.dv,
        }

    def get_width_parts(self, device: torch.device, max_width: int = launch_table.MAX_TILE_WIDTH) -> dict[str, int]:
        """And those of the kernels that multiply tiles, of at most `widest` columns."""
        return {
            **launch_table.split_width("DK", self.dk, device, max_width),
            **launch_table.split_width("DV", self.dv, device, max_width),
        }


class Piece(NamedTuple):
    """Sequences [b0, b1), groups [g0, g1) and queries [t0, t1) that one launch works on."""

    b0: int
    b1: int
    g0: int
    g1: int
    t0: int
    t1: int
    is_whole: bool = False
    """All that there is: nothing is cut, since views cost the host microseconds."""

    def slice_queries(self, x: Tensor, rows_per_group: int = 1) -> Tensor:
        """The queries of `x` [B, T, n, ...], whose third axis has `each` rows per group."""
        return self._slice(x, rows_per_group, slice(self.t0, self.t1))

    def slice_keys(self, x: Tensor) -> Tensor:
        """All keys or values of `x` [B, T, G, D]."""
        return self._slice(x, 1, slice(0, x.shape[1]))

    def _slice(self, x: Tensor, rows_per_group: int, rows: slice) -> Tensor:
        if self.is_whole:
            return x
        return x[self.b0 : self.b1, rows, self.g0 * rows_per_group : self.g1 * rows_per_group]


class WorkspaceBytes(NamedTuple):
    """Bytes of partial results: per query and head, and besides that per group of each sequence."""

    per_row: int
    per_group: int


def compute_forward_bytes(sizes: Sizes, width: int) -> WorkspaceBytes:
    """Partial outputs, of elements of `width` bytes, and their LSEs."""
    return WorkspaceBytes(sizes.n_sel * (sizes.dv * width + 4), 0)


def compute_item_bytes(sizes: Sizes) -> int:
    return sizes.block * (sizes.dk + sizes.dv) * 4


def compute_backward_bytes(sizes: Sizes, width: int) -> WorkspaceBytes:
    """Partial dq, and the float32 dk and dv of the work items.

    The items are as many full ones as there can be, one more per block, and up to 4 to make their number a multiple of 4.
    """
    full_items = ceil_div(sizes.n_sel * compute_item_bytes(sizes), compute_item_entries(sizes, width) * sizes.heads)
    return WorkspaceBytes(sizes.n_sel * sizes.dk * width + full_items, (sizes.n_blocks + 4) * compute_item_bytes(sizes))


def split_into_pieces(sizes: Sizes, width: int) -> list[Piece]:
    """What to work through one after the other, forward and backward, for inputs of `width` bytes per element.

    Whole sequences where one fits into the workspace, else whole groups, which share nothing. A group that does not fit is
    cut by queries, and each part hands float32 sums of dk and dv on to the next. Where the last parts of several groups fit
    together, they become one piece, after the others; else a group's parts are about equal. The sums grow with T: where
    they alone would fill the workspace, from millions of tokens on, the rest still gets half of it.
    """
    need = WorkspaceBytes(*map(max, compute_forward_bytes(sizes, width), compute_backward_bytes(sizes, width)))
    each = sizes.heads * need.per_row  # bytes per query
    fit = WORKSPACE_BYTES // (sizes.T * each + need.per_group)
    if fit >= sizes.B * sizes.G:  # without a loop, which would tie a compiled model to its shapes
        return [Piece(0, sizes.B, 0, sizes.G, 0, sizes.T, is_whole=True)]
    if fit:
        batch, groups = max(fit // sizes.G, 1), min(fit, sizes.G)
        sequences = [(b, min(b + batch, sizes.B)) for b in range(0, sizes.B, batch)]
        group_ranges = [(g, min(g + groups, sizes.G)) for g in range(0, sizes.G, groups)]
        return [Piece(*sequence, *group_range, 0, sizes.T) for sequence in sequences for group_range in group_ranges]
    sums = sizes.n_blocks * compute_item_bytes(sizes)
    first = (WORKSPACE_BYTES - need.per_group - sizes.G * sums) // each // 64 * 64
    if first > 0:
        groups = (WORKSPACE_BYTES - sizes.G * sums) // ((sizes.T - first) * each + need.per_group)
        if groups > 1:
            parts = [(g, g + 1, 0, first) for g in range(sizes.G)]
            parts += [(g, min(g + groups, sizes.G), first, sizes.T) for g in range(0, sizes.G, groups)]
            return [Piece(b, b + 1, *part) for b in range(sizes.B) for part in parts]
    room = max(max(WORKSPACE_BYTES - need.per_group - sums, WORKSPACE_BYTES // 2) // each, 1)
    queries = ceil_div(sizes.T, ceil_div(sizes.T, room))
    # A multiple of 64 where there is room for one: Triton compiles once for all multiples of 16.
    queries = min(ceil_div(queries, 64), room // 64) * 64 if room >= 64 else queries
    return [
        Piece(b, b + 1, g, g + 1, t, min(t + queries, sizes.T))
        for b in range(sizes.B)
        for g in range(sizes.G)
        for t in range(0, sizes.T, queries)
    ]


def should_sort_items(sizes: Sizes, queries: int, width: int) -> bool:
    """Whether the q of so many queries of a group is too much for the L2 cache, where that is what work items wait for.

    With 64 heads of 128 and 32,768 tokens, items in the order of their blocks read 6.9 GB of q from memory, of the 8.6 GB
    they read in all; in the order of their queries 2.5 GB. Heads of 64 hide the wait: more of their programs fit on a
    multiprocessor.
    """
    return sizes.dk > 64 and queries * sizes.heads * sizes.dk * width > SORT_ABOVE_BYTES


def compute_item_entries(sizes: Sizes, width: int) -> int:
    """The most entries of a work item, the same in all pieces."""
    if sizes.B * sizes.T * sizes.H * sizes.n_sel <= MAX_SHORT_ITEM_ROWS:
        rows = SHORT_ITEM_ROWS
    else:
        rows = SORTED_ITEM_ROWS if should_sort_items(sizes, sizes.T, width) else LONG_ITEM_ROWS
    return max(1, rows // sizes.heads)
