"""What one launch of the selected branch works on: the cut of a large input into pieces that fit the workspace.

Partial results cost 2 KB a (query, head) row at the usual sizes. All is decided from shapes alone, forward as backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_lab.attention.kernels.common import ceil_div, padded_width

WORKSPACE_BYTES = 2 * 2**30  # partial results of one launch, all of them; larger inputs are worked through in pieces
# (query, head) rows a work item: short ones spread a small problem over the chip, those in the order of their queries
# are short enough for all that run at once to be near each other.
SHORT_ITEM, LONG_ITEM, ORDERED_ITEM = 1536, 6144, 2048
LONG_ROWS = 2**22
ORDERED_BYTES = 64 * 2**20  # of a group's q: what the L2 cache does not hold beside the partial results


class Geometry(NamedTuple):
    """The sizes every launch needs; `size` is the kernels' block, `n_sel` how many of those a query has."""

    B: int
    T: int
    H: int
    G: int
    n_sel: int
    size: int
    dk: int
    dv: int

    @property
    def heads(self) -> int:
        return self.H // self.G

    @property
    def n_blocks(self) -> int:
        return ceil_div(self.T, self.size)

    @property
    def scale(self) -> float:
        return self.dk**-0.5

    def constants(self) -> dict[str, int]:
        """The compile-time sizes that the gathering kernels share."""
        return {
            "HEADS": self.heads,
            "N_SEL": self.n_sel,
            "SIZE": self.size,
            "SIZE_PAD": padded_width(self.size),
            "DK": self.dk,
            "DV": self.dv,
            "DK_PAD": padded_width(self.dk),
            "DV_PAD": padded_width(self.dv),
        }


class Piece(NamedTuple):
    """Sequences [b0, b1), groups [g0, g1) and queries [t0, t1) that one launch works on."""

    b0: int
    b1: int
    g0: int
    g1: int
    t0: int
    t1: int

    def of(self, x: Tensor, each: int = 1) -> Tensor:
        """The queries of `x` [B, T, n, ...], which has `each` rows a group."""
        return self._cut(x, each, slice(self.t0, self.t1))

    def keys(self, x: Tensor) -> Tensor:
        """All keys or values of `x` [B, T, G, D]."""
        return self._cut(x, 1, slice(0, x.shape[1]))

    def _cut(self, x: Tensor, each: int, rows: slice) -> Tensor:
        sequences, groups = slice(self.b0, self.b1), slice(self.g0 * each, self.g1 * each)
        whole = all(s.stop - s.start == n for s, n in zip((sequences, rows, groups), x.shape, strict=False))
        return x if whole else x[sequences, rows, groups]  # views cost the host microseconds


class Need(NamedTuple):
    """Bytes of partial results: of one query and head, and of one group of one sequence besides."""

    row: int
    group: int


def forward_need(geo: Geometry, width: int) -> Need:
    """Partial outputs, of elements of `width` bytes, and their LSEs."""
    return Need(geo.n_sel * (geo.dv * width + 4), 0)


def item_bytes(geo: Geometry) -> int:
    return geo.size * (geo.dk + geo.dv) * 4


def backward_need(geo: Geometry, width: int) -> Need:
    """Partial dQ, and the float32 dK and dV of the work items: full ones, one a block, up to 4 that make up the number."""
    full_items = ceil_div(geo.n_sel * item_bytes(geo), chunk_entries(geo, width) * geo.heads)
    return Need(geo.n_sel * geo.dk * width + full_items, (geo.n_blocks + 4) * item_bytes(geo))


def cut(geo: Geometry, width: int) -> list[Piece]:
    """What to work through one after the other, forward and backward, for inputs of `width` bytes an element.

    Whole sequences while one fits in the workspace, else groups, which share nothing. A group that does not fit is cut by
    queries, and its parts hand on float32 sums of dK and dV. Where what is left over fits for several groups at once, it
    makes one piece of them, after the others; else a group's parts are about equal. The sums grow with T: where they alone
    would fill the workspace, from millions of tokens on, the rest still gets half of it.
    """
    need = Need(*map(max, forward_need(geo, width), backward_need(geo, width)))
    each = geo.heads * need.row  # bytes a query
    fit = WORKSPACE_BYTES // (geo.T * each + need.group)
    if fit >= geo.B * geo.G:  # without a loop, which would tie a compiled model to its shapes
        return [Piece(0, geo.B, 0, geo.G, 0, geo.T)]
    if fit:
        batch, groups = max(fit // geo.G, 1), min(fit, geo.G)
        sequences = [(b, min(b + batch, geo.B)) for b in range(0, geo.B, batch)]
        return [Piece(b0, b1, g, min(g + groups, geo.G), 0, geo.T) for b0, b1 in sequences for g in range(0, geo.G, groups)]
    sums = geo.n_blocks * item_bytes(geo)
    first = (WORKSPACE_BYTES - need.group - geo.G * sums) // each // 64 * 64
    if first > 0:
        groups = (WORKSPACE_BYTES - geo.G * sums) // ((geo.T - first) * each + need.group)
        if groups > 1:
            parts = [(g, g + 1, 0, first) for g in range(geo.G)]
            parts += [(g, min(g + groups, geo.G), first, geo.T) for g in range(0, geo.G, groups)]
            return [Piece(b, b + 1, *part) for b in range(geo.B) for part in parts]
    room = max(max(WORKSPACE_BYTES - need.group - sums, WORKSPACE_BYTES // 2) // each, 1)
    queries = ceil_div(geo.T, ceil_div(geo.T, room))
    # In steps of 64, where there are as many: numbers that are multiples of 16 compile once.
    queries = min(ceil_div(queries, 64), room // 64) * 64 if room >= 64 else queries
    return [
        Piece(b, b + 1, g, g + 1, t, min(t + queries, geo.T))
        for b in range(geo.B) for g in range(geo.G) for t in range(0, geo.T, queries)
    ]  # fmt: skip


def is_ordered(geo: Geometry, queries: int, width: int) -> bool:
    """Whether the q of so many queries of a group is too much for the L2 cache, where that is what work items wait for.

    With 64 heads of 128 and 32 768 tokens, items in the order of their blocks read 6.9 GB of q from memory, of the 8.6 GB
    they read in all; in the order of their queries 2.5 GB. Heads of 64 hide the wait: more of their programs fit on a
    multiprocessor.
    """
    return geo.dk > 64 and queries * geo.heads * geo.dk * width > ORDERED_BYTES


def chunk_entries(geo: Geometry, width: int) -> int:
    """Entries a work item, the same in all pieces."""
    if geo.B * geo.T * geo.H * geo.n_sel <= LONG_ROWS:
        rows = SHORT_ITEM
    else:
        rows = ORDERED_ITEM if is_ordered(geo, geo.T, width) else LONG_ITEM
    return max(1, rows // geo.heads)
