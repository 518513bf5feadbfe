"""Documents one after another in a row: how a program finds the one it works on, and the tiles of them all are counted.

A document is a sequence whose pointers are moved to its first row: past that, a kernel works on it as on one of a batch.
So no tile spans two documents, and none sees another's rows. The tables of first rows say all: tile n of a document that
begins at row r is number r // TILE + document + n, which leaves room for every tile of every document, whatever their
lengths, without a count of the tiles before. Grids follow from the total and the number of documents alone; the few
programs whose tile holds nothing return at once.

A program finds its document by search among these first rows, 32 at a time: a warp loads them at once, and with those of
the last 32 all that the program asks of its document, so that up to 32 documents take one wait for memory and a thousand
take two, where bisection takes six and eleven. A table of tiles would take one, too, and would have to be made and copied
for every tile size of every batch. Where there are no documents, nothing of this
is in the machine code.
"""

# Functions under triton.jit are Triton's language: their parameters have no types that Python could name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels.host import ceil_div

WAYS = tl.constexpr(32)


@triton.jit
def first_tile(bounds_ptr, document, EACH: tl.constexpr, TILE: tl.constexpr):
    """The number of a document's first tile, where a token has EACH rows and a tile TILE of them."""
    return tl.load(bounds_ptr + document).to(tl.int64) * EACH // TILE + document


@triton.jit
def _narrowed(begun, document, stop, step):
    """The last probed document that has begun is where the search goes on: it, and the one to stop at.

    `begun`: of the documents `step` apart from `document` on, which begin at or before what is looked for. The first does.
    """
    document += (tl.sum(begun.to(tl.int32), axis=0) - 1) * step
    return document, tl.minimum(document + step, stop)


@triton.jit
def document_of_tile(bounds_ptr, others_ptr, documents, tile, EACH: tl.constexpr, TILE: tl.constexpr):
    """The document that tile number `tile` of one table's rows belongs to, and where it lies in both tables.

    (document, which of the document's tiles it is from 0, the document's first row, int64, how many rows it has; its first
    row, int64, and its rows in the other table).
    """
    document = tl.cast(tile, tl.int32) * 0
    stop = document + documents
    while stop - document > WAYS:
        step = tl.cdiv(stop - document, WAYS)
        probes = document + tl.arange(0, WAYS) * step
        there = probes < stop
        begun = there & (first_tile(bounds_ptr, tl.where(there, probes, document), EACH, TILE) <= tile)
        document, stop = _narrowed(begun, document, stop, step)
    # Of the documents that are left, all that there is to know is loaded at once. First rows and ends never fall: those of
    # the last document that has begun are the largest of all that have.
    probes = tl.minimum(document + tl.arange(0, WAYS), stop - 1)
    first = tl.load(bounds_ptr + probes)
    end = tl.load(bounds_ptr + probes + 1)
    other_first = tl.load(others_ptr + probes)
    other_end = tl.load(others_ptr + probes + 1)
    begun = first.to(tl.int64) * EACH // TILE + probes <= tile
    document = tl.max(tl.where(begun, probes, 0), axis=0)
    first = tl.max(tl.where(begun, first, 0), axis=0)
    end = tl.max(tl.where(begun, end, 0), axis=0)
    other_first = tl.max(tl.where(begun, other_first, 0), axis=0)
    other_end = tl.max(tl.where(begun, other_end, 0), axis=0)
    tile = (tile - (first.to(tl.int64) * EACH // TILE + document)).to(tl.int32)
    return document, tile, first.to(tl.int64), end - first, other_first.to(tl.int64), other_end - other_first


@triton.jit
def document_of_row(bounds_ptr, documents, row):
    """The document that holds row `row` of the table's rows."""
    document = tl.cast(row, tl.int32) * 0
    stop = document + documents
    while stop - document > 1:
        step = tl.cdiv(stop - document, WAYS)
        probes = document + tl.arange(0, WAYS) * step
        there = probes < stop
        begun = there & (tl.load(bounds_ptr + tl.where(there, probes, document)) <= row)
        document, stop = _narrowed(begun, document, stop, step)
    return document


class Bounds(NamedTuple):
    """First rows of all documents, and the end of the last: int32 [documents + 1] on the device; None where there are none.

    `longest`: tokens that no document exceeds.
    """

    q: Tensor | None
    k: Tensor | None
    documents: int | None
    longest: int

    def tiles(self, rows: int, tile: int) -> int:
        """Programs for all tiles of `tile` of so many rows."""
        return ceil_div(rows, tile) if self.documents is None else rows // tile + self.documents


ONE_DOCUMENT = Bounds(None, None, None, 0)


def raw_bounds(table: Tensor | None, longest: int, T: int) -> Bounds:
    """Of queries, and of keys of which each token has one; `table` as `Span.row_bounds` gives it, None: no documents."""
    return Bounds(None, None, None, T) if table is None else Bounds(table[0], table[0], table.shape[1] - 1, longest)


def compressed_bounds(table: Tensor | None, longest: int, T: int) -> Bounds:
    """Of queries, and of compressed keys."""
    return Bounds(None, None, None, T) if table is None else Bounds(table[0], table[1], table.shape[1] - 1, longest)
