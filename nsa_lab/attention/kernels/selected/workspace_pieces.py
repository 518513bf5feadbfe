"""Split a large input of the selected branch into pieces whose partial results fit into the workspace.

Partial results take 2 KB per (query, head) row at the usual sizes. The split depends only on shapes and is the same in the
forward and the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width

WORKSPACE_BYTES = 2 * 2**30  # all partial results of one launch; larger inputs are processed in pieces
# (query, head) rows per work item. Short items distribute a small problem over the GPU. Items sorted by their queries are
# short enough that concurrent items read queries close to each other.
SHORT_ITEM_ROWS, LONG_ITEM_ROWS, SORTED_ITEM_ROWS = 1536, 6144, 2048
MAX_SHORT_ITEM_ROWS = 2**22
SORT_ABOVE_BYTES = 64 * 2**20  # of a group's q: more than fits in the L2 cache together with the partial results


class Sizes(NamedTuple):
    """Sizes that every launch needs. `block`: tokens of a block in the kernels; `n_sel`: blocks of this size per query."""

    B: int
    T: int
    H: int
    G: int
    n_sel: int
    block: int
    dk: int
    dv: int
    n_documents: int | None = None  # number of packed documents; no block spans two documents
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
        """Return the compile-time sizes that the kernels share."""
        return {
            "HEADS": self.heads,
            "N_SEL": self.n_sel,
            "BLOCK": self.block,
            "BLOCK_PAD": padded_width(self.block),
            "DK": self.dk,
            "DV": self.dv,
        }

    def get_width_parts(self, device: torch.device, max_width: int = launch_table.MAX_TILE_WIDTH) -> dict[str, int]:
        """Return the additional compile-time sizes of kernels that multiply tiles, of at most `max_width` columns."""
        return {
            **launch_table.split_width("DK", self.dk, device, max_width),
            **launch_table.split_width("DV", self.dv, device, max_width),
        }


class Piece(NamedTuple):
    """Sequences [b0, b1), groups [g0, g1) and queries [t0, t1) that one launch processes."""

    b0: int
    b1: int
    g0: int
    g1: int
    t0: int
    t1: int
    is_whole: bool = False
    """The piece is the entire input: tensors are not sliced, because views cost microseconds of host time."""

    def slice_queries(self, x: Tensor, rows_per_group: int = 1) -> Tensor:
        """Return the queries of the piece from `x` [B, T, n, ...], whose third axis has `rows_per_group` rows per group."""
        return self._slice(x, rows_per_group, slice(self.t0, self.t1))

    def slice_keys(self, x: Tensor) -> Tensor:
        """Return all keys or values of the piece from `x` [B, T, G, D]."""
        return self._slice(x, 1, slice(0, x.shape[1]))

    def _slice(self, x: Tensor, rows_per_group: int, rows: slice) -> Tensor:
        if self.is_whole:
            return x
        return x[self.b0 : self.b1, rows, self.g0 * rows_per_group : self.g1 * rows_per_group]


class WorkspaceBytes(NamedTuple):
    """Bytes of partial results: per query and head, and additionally per group of each sequence."""

    per_row: int
    per_group: int


def compute_forward_bytes(sizes: Sizes, element_size: int) -> WorkspaceBytes:
    """Return the bytes of the partial outputs, of elements of `element_size` bytes, and of their LSEs."""
    return WorkspaceBytes(sizes.n_sel * (sizes.dv * element_size + 4), 0)


def compute_item_bytes(sizes: Sizes) -> int:
    return sizes.block * (sizes.dk + sizes.dv) * 4


def compute_backward_bytes(sizes: Sizes, element_size: int) -> WorkspaceBytes:
    """Return the bytes of the partial dq, and of the float32 dk and dv of the work items.

    The number of items is at most the maximum number of full ones, plus one per block, plus 4 to round up to a multiple of
    4.
    """
    full_items = ceil_div(sizes.n_sel * compute_item_bytes(sizes), compute_item_entries(sizes, element_size) * sizes.heads)
    return WorkspaceBytes(
        sizes.n_sel * sizes.dk * element_size + full_items, (sizes.n_blocks + 4) * compute_item_bytes(sizes)
    )


def split_into_pieces(sizes: Sizes, element_size: int) -> list[Piece]:
    """Return the pieces to process one after another, forward and backward, for elements of `element_size` bytes.

    A piece is several sequences if they fit into the workspace, otherwise several groups, which are independent. A group
    that does not fit is split by queries, and each part passes float32 sums of dk and dv to the next. If the last parts of
    several groups fit together, they form one piece after the others; otherwise the parts of a group are about equal. The
    sums grow with T: if they alone would fill the workspace, from millions of tokens on, the other partial results still
    get half of it.
    """
    needed = WorkspaceBytes(
        *map(max, compute_forward_bytes(sizes, element_size), compute_backward_bytes(sizes, element_size))
    )
    bytes_per_query = sizes.heads * needed.per_row
    groups_that_fit = WORKSPACE_BYTES // (sizes.T * bytes_per_query + needed.per_group)
    if groups_that_fit >= sizes.B * sizes.G:  # without a loop, which would specialize a compiled model on its shapes
        return [Piece(0, sizes.B, 0, sizes.G, 0, sizes.T, is_whole=True)]
    if groups_that_fit:
        n_sequences, n_groups = max(groups_that_fit // sizes.G, 1), min(groups_that_fit, sizes.G)
        sequences = [(b, min(b + n_sequences, sizes.B)) for b in range(0, sizes.B, n_sequences)]
        group_ranges = [(g, min(g + n_groups, sizes.G)) for g in range(0, sizes.G, n_groups)]
        return [Piece(*sequence, *group_range, 0, sizes.T) for sequence in sequences for group_range in group_ranges]
    sums = sizes.n_blocks * compute_item_bytes(sizes)
    first_queries = (WORKSPACE_BYTES - needed.per_group - sizes.G * sums) // bytes_per_query // 64 * 64
    if first_queries > 0:
        n_groups = (WORKSPACE_BYTES - sizes.G * sums) // ((sizes.T - first_queries) * bytes_per_query + needed.per_group)
        if n_groups > 1:
            parts = [(g, g + 1, 0, first_queries) for g in range(sizes.G)]
            parts += [(g, min(g + n_groups, sizes.G), first_queries, sizes.T) for g in range(0, sizes.G, n_groups)]
            return [Piece(b, b + 1, *part) for b in range(sizes.B) for part in parts]
    max_queries = max(max(WORKSPACE_BYTES - needed.per_group - sums, WORKSPACE_BYTES // 2) // bytes_per_query, 1)
    queries = ceil_div(sizes.T, ceil_div(sizes.T, max_queries))
    # A multiple of 64 if it fits: Triton compiles once for all multiples of 16.
    queries = min(ceil_div(queries, 64), max_queries // 64) * 64 if max_queries >= 64 else queries
    return [
        Piece(b, b + 1, g, g + 1, t, min(t + queries, sizes.T))
        for b in range(sizes.B)
        for g in range(sizes.G)
        for t in range(0, sizes.T, queries)
    ]


def should_sort_items(sizes: Sizes, queries: int, element_size: int) -> bool:
    """Return True if the q of a group's `queries` exceeds the L2 cache and loading it limits the speed of the work items.

    With 64 heads of width 128 and 32,768 tokens, items in the order of their blocks read 6.9 GB of q from memory, of 8.6 GB
    in all; in the order of their queries they read 2.5 GB. With heads of width 64 the latency is hidden, because more
    programs fit on a multiprocessor.
    """
    return sizes.dk > 64 and queries * sizes.heads * sizes.dk * element_size > SORT_ABOVE_BYTES


def compute_item_entries(sizes: Sizes, element_size: int) -> int:
    """Return the maximum number of entries of a work item. It is the same in all pieces."""
    if sizes.B * sizes.T * sizes.H * sizes.n_sel <= MAX_SHORT_ITEM_ROWS:
        n_rows = SHORT_ITEM_ROWS
    else:
        n_rows = SORTED_ITEM_ROWS if should_sort_items(sizes, sizes.T, element_size) else LONG_ITEM_ROWS
    return max(1, n_rows // sizes.heads)
