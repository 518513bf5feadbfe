"""Tiles of packed documents: find the document and rows of a program, and count the tiles of all documents.

Documents are packed one after another into one row. A kernel advances its pointers to the first row of a document and then
treats it like one sequence of a batch, so no tile spans two documents and no document reads rows of another. The tables of
first rows are sufficient: tile n of a document that starts at row r has the number r // TILE + document + n. This leaves
room for every tile of every document, for any lengths, without a scan over the preceding documents. The grid depends only
on the total length and the number of documents; the few programs whose tile is empty return immediately.

A program searches its document in the table of first rows, 32 entries at a time, which one warp loads together. For the
last 64 candidates it also loads everything that it needs to know about the document. So up to 64 documents take one memory
latency and two thousand take two; bisection would take seven and twelve. A table of tiles would also take one, but would
have to be built and copied for every tile size and every batch. Without packed documents, none of this is in the machine
code.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention.kernels.launch_utils import ceil_div

SEARCH_WIDTH = tl.constexpr(32)
"""Entries per search step, one per thread of a warp. More would need an exchange between warps through shared memory."""
FINAL_ROUNDS = tl.constexpr(2)


@triton.jit
def get_first_tile(bounds_ptr, document, ROWS_PER_TOKEN: tl.constexpr, TILE: tl.constexpr):
    """Return the number of a document's first tile, for ROWS_PER_TOKEN rows per token and TILE rows per tile."""
    return tl.load(bounds_ptr + document).to(tl.int64) * ROWS_PER_TOKEN // TILE + document


@triton.jit
def _narrow_search(has_started, document, stop, step):
    """Return the range (document, stop) in which the search continues: from the last probed document that has started.

    `has_started`: for the documents document, document + step, ...: True if the document starts at or before the target. It
    is True for the first of them.
    """
    document += (tl.sum(has_started.to(tl.int32), axis=0) - 1) * step
    return document, tl.minimum(document + step, stop)


@triton.jit
def find_document_of_tile(
    bounds_ptr, other_bounds_ptr, n_documents, tile, ROWS_PER_TOKEN: tl.constexpr, TILE: tl.constexpr
):
    """Find the document of tile number `tile`, and its rows in two tables (for example those of q and k).

    Returns (document, index of the tile within the document, first row of the document (int64), its number of rows, its
    first row in the other table (int64), its number of rows in the other table).
    """
    document = tl.cast(tile, tl.int32) * 0
    stop = document + n_documents
    while stop - document > FINAL_ROUNDS * SEARCH_WIDTH:
        step = tl.cdiv(stop - document, SEARCH_WIDTH)
        probes = document + tl.arange(0, SEARCH_WIDTH) * step
        exists = probes < stop
        has_started = exists & (
            get_first_tile(bounds_ptr, tl.where(exists, probes, document), ROWS_PER_TOKEN, TILE) <= tile
        )
        document, stop = _narrow_search(has_started, document, stop, step)
    # Load everything about the remaining documents at once. First rows and ends are non-decreasing, so the values of the
    # last document that has started are the maxima over all that have started.
    found_document = tl.zeros([SEARCH_WIDTH], tl.int32)
    first, end, other_first, other_end = found_document, found_document, found_document, found_document
    for i in tl.static_range(FINAL_ROUNDS):
        probes = tl.minimum(document + i * SEARCH_WIDTH + tl.arange(0, SEARCH_WIDTH), stop - 1)
        row = tl.load(bounds_ptr + probes)
        has_started = row.to(tl.int64) * ROWS_PER_TOKEN // TILE + probes <= tile
        found_document = tl.maximum(found_document, tl.where(has_started, probes, 0))
        first = tl.maximum(first, tl.where(has_started, row, 0))
        end = tl.maximum(end, tl.where(has_started, tl.load(bounds_ptr + probes + 1), 0))
        other_first = tl.maximum(other_first, tl.where(has_started, tl.load(other_bounds_ptr + probes), 0))
        other_end = tl.maximum(other_end, tl.where(has_started, tl.load(other_bounds_ptr + probes + 1), 0))
    document, first, end = tl.max(found_document, axis=0), tl.max(first, axis=0), tl.max(end, axis=0)
    other_first, other_end = tl.max(other_first, axis=0), tl.max(other_end, axis=0)
    tile = (tile - (first.to(tl.int64) * ROWS_PER_TOKEN // TILE + document)).to(tl.int32)
    return document, tile, first.to(tl.int64), end - first, other_first.to(tl.int64), other_end - other_first


@triton.jit
def find_document_of_row(bounds_ptr, n_documents, row):
    """Find the document that contains row `row` of the table."""
    document = tl.cast(row, tl.int32) * 0
    stop = document + n_documents
    while stop - document > 1:
        step = tl.cdiv(stop - document, SEARCH_WIDTH)
        probes = document + tl.arange(0, SEARCH_WIDTH) * step
        exists = probes < stop
        has_started = exists & (tl.load(bounds_ptr + tl.where(exists, probes, document)) <= row)
        document, stop = _narrow_search(has_started, document, stop, step)
    return document


TOKEN_ROW, COMPRESSED_ROW = 0, 1  # rows of `Layout.bounds`


def split_bounds(documents: Tensor | None, key_row: int) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Return the first rows of documents in q and in k, int32 [n_documents + 1], and n_documents; Nones if not packed.

    `documents`: `Layout.bounds`. `key_row`: `TOKEN_ROW`, or `COMPRESSED_ROW` if the keys are compressed blocks.
    """
    if documents is None:
        return None, None, None
    return documents[TOKEN_ROW], documents[key_row], documents.shape[1] - 1


def count_tiles(n_rows: int, tile_rows: int, n_documents: int | None) -> int:
    """Return the number of programs that cover `n_rows` rows in tiles of `tile_rows`; None: not packed."""
    return ceil_div(n_rows, tile_rows) if n_documents is None else n_rows // tile_rows + n_documents
