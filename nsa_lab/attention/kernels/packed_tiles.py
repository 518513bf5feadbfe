"""Documents one after another in a row: how a program finds the one it works on, and the tiles of them all are counted.

A document is a sequence whose pointers are moved to its first row: past that, a kernel works on it as on one of a batch.
So no tile spans two documents, and none sees another's rows. The tables of first rows say all: tile n of a document that
begins at row r is number r // TILE + document + n, which leaves room for every tile of every document, whatever their
lengths, without a count of the tiles before. Grids follow from the total and the number of documents alone; the few
programs whose tile holds nothing return at once.

A program finds its document by search among these first rows, 32 at a time: a warp loads them at once. With those of the
last 64 it loads all that the program asks of its document, so that up to 64 documents take one wait for memory and two
thousand take two, where bisection takes seven and twelve. A table of tiles would take one, too, and would have to be made
and copied for every tile size of every batch. Where there are no documents, nothing of this is in the machine code.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels.launch_utils import ceil_div

SEARCH_WIDTH = tl.constexpr(32)
"""One for each thread of a warp: more would be spread over warps, which exchange what they find through shared memory."""
FINAL_ROUNDS = tl.constexpr(2)


@triton.jit
def get_first_tile(bounds_ptr, document, EACH: tl.constexpr, TILE: tl.constexpr):
    """The number of a document's first tile, where a token has EACH rows and a tile TILE of them."""
    return tl.load(bounds_ptr + document).to(tl.int64) * EACH // TILE + document


@triton.jit
def _narrow_search(begun, document, stop, step):
    """The last probed document that has begun is where the search goes on: it, and the one to stop at.

    `begun`: of the documents `step` apart from `document` on, which begin at or before what is looked for. The first does.
    """
    document += (tl.sum(begun.to(tl.int32), axis=0) - 1) * step
    return document, tl.minimum(document + step, stop)


@triton.jit
def find_document_of_tile(bounds_ptr, others_ptr, documents, tile, EACH: tl.constexpr, TILE: tl.constexpr):
    """The document that tile number `tile` of one table's rows belongs to, and where it lies in both tables.

    (document, which of the document's tiles it is from 0, the document's first row, int64, how many rows it has; its first
    row, int64, and its rows in the other table).
    """
    document = tl.cast(tile, tl.int32) * 0
    stop = document + documents
    while stop - document > FINAL_ROUNDS * SEARCH_WIDTH:
        step = tl.cdiv(stop - document, SEARCH_WIDTH)
        probes = document + tl.arange(0, SEARCH_WIDTH) * step
        there = probes < stop
        begun = there & (get_first_tile(bounds_ptr, tl.where(there, probes, document), EACH, TILE) <= tile)
        document, stop = _narrow_search(begun, document, stop, step)
    # Of the documents that are left, all that there is to know is loaded at once. First rows and ends never fall: those of
    # the last document that has begun are the largest of all that have.
    found = tl.zeros([SEARCH_WIDTH], tl.int32)
    first, end, other_first, other_end = found, found, found, found
    for i in tl.static_range(FINAL_ROUNDS):
        probes = tl.minimum(document + i * SEARCH_WIDTH + tl.arange(0, SEARCH_WIDTH), stop - 1)
        row = tl.load(bounds_ptr + probes)
        begun = row.to(tl.int64) * EACH // TILE + probes <= tile
        found = tl.maximum(found, tl.where(begun, probes, 0))
        first = tl.maximum(first, tl.where(begun, row, 0))
        end = tl.maximum(end, tl.where(begun, tl.load(bounds_ptr + probes + 1), 0))
        other_first = tl.maximum(other_first, tl.where(begun, tl.load(others_ptr + probes), 0))
        other_end = tl.maximum(other_end, tl.where(begun, tl.load(others_ptr + probes + 1), 0))
    document, first, end = tl.max(found, axis=0), tl.max(first, axis=0), tl.max(end, axis=0)
    other_first, other_end = tl.max(other_first, axis=0), tl.max(other_end, axis=0)
    tile = (tile - (first.to(tl.int64) * EACH // TILE + document)).to(tl.int32)
    return document, tile, first.to(tl.int64), end - first, other_first.to(tl.int64), other_end - other_first


@triton.jit
def find_document_of_row(bounds_ptr, documents, row):
    """The document that holds row `row` of the table's rows."""
    document = tl.cast(row, tl.int32) * 0
    stop = document + documents
    while stop - document > 1:
        step = tl.cdiv(stop - document, SEARCH_WIDTH)
        probes = document + tl.arange(0, SEARCH_WIDTH) * step
        there = probes < stop
        begun = there & (tl.load(bounds_ptr + tl.where(there, probes, document)) <= row)
        document, stop = _narrow_search(begun, document, stop, step)
    return document


class PackedBounds(NamedTuple):
    """First rows of all documents, and the end of the last: int32 [documents + 1] on the device; None where there are none.

    `longest`: tokens that no document exceeds.
    """

    q: Tensor | None
    k: Tensor | None
    n_documents: int | None
    longest: int

    def count_tiles(self, rows: int, tile: int) -> int:
        """Programs for all tiles of `tile` of so many rows."""
        return ceil_div(rows, tile) if self.n_documents is None else rows // tile + self.n_documents


NOT_PACKED = PackedBounds(None, None, None, 0)


def make_token_bounds(table: Tensor | None, longest: int, T: int) -> PackedBounds:
    """Of queries, and of keys of which each token has one; `table` as `Span.row_bounds` gives it, None: no documents."""
    return (
        PackedBounds(None, None, None, T)
        if table is None
        else PackedBounds(table[0], table[0], table.shape[1] - 1, longest)
    )


def make_compressed_bounds(table: Tensor | None, longest: int, T: int) -> PackedBounds:
    """Of queries, and of compressed keys."""
    return (
        PackedBounds(None, None, None, T)
        if table is None
        else PackedBounds(table[0], table[1], table.shape[1] - 1, longest)
    )
