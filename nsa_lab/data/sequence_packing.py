"""Sequence packing: cut a text into rows of `seq_len` + 1 tokens, the inputs and the last target.

`StreamPacking` takes the text as a stream and cuts documents at row ends. `BestFitPacking` keeps each document that fits
into a row whole, packs rows by best-fit decreasing (arXiv 2404.10830), and pads them with separators of weight 0. Both read
every document once per epoch, in a pseudorandom order that is computed and not stored.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from nsa_lab.data.document_starts import count_max_documents
from nsa_lab.data.errors import DataError
from nsa_lab.data.shards import TokenStore

FEISTEL_ROUNDS = 4


class RowPacking(Protocol):
    """Rows of an epoch."""

    rows_per_epoch: int

    def get_row(self, index: int, key: str) -> int:
        """Return the row at `index` in the epoch named `key`, the argument of the methods below."""
        ...

    def get_position(self, row: int) -> int:
        """Return the position of the row's first token in the text."""
        ...

    def read_window(self, row: int) -> np.ndarray:
        """Return the row's tokens, int64 [seq_len + 1]."""
        ...

    def get_weights(self, row: int) -> np.ndarray | None:
        """Return float32 [seq_len + 1], 1 for text and 0 for padding; None: no padding."""
        ...

    def count_max_documents(self) -> int:
        """Return the maximum number of documents in a row."""
        ...

    def count_document_lengths(self, key: str) -> Mapping[int, int]:
        """Return {length: number of documents or document parts} over the rows of the epoch `key`, without padding."""
        ...

    def summarize(self, key: str) -> dict[str, Any]:
        """Return the number of rows, documents, documents cut across rows, and padding tokens of the epoch `key`."""
        ...


class StreamPacking:
    """Disjoint windows of the text. The last token of a window is the first input of the next."""

    def __init__(self, tokens: TokenStore, seq_len: int, separator: int | None = None) -> None:
        check_length(tokens, seq_len)
        self._tokens, self._seq_len, self._separator = tokens, seq_len, separator
        # One window fewer than the text holds, so that every offset has the same number of windows.
        self.rows_per_epoch = max(1, (len(tokens) - seq_len) // seq_len)
        self._n_offsets = min(seq_len, len(tokens) - self.rows_per_epoch * seq_len)

    def get_row(self, index: int, key: str) -> int:
        return self._get_epoch_offset(key) + permute(index, self.rows_per_epoch, key) * self._seq_len

    def get_position(self, row: int) -> int:
        return row

    def read_window(self, row: int) -> np.ndarray:
        return self._tokens.read(row, self._seq_len + 1)

    def get_weights(self, row: int) -> np.ndarray | None:
        return None

    def count_max_documents(self) -> int:
        return count_max_documents(self._find_document_ends(), self._seq_len)

    def count_document_lengths(self, key: str) -> Mapping[int, int]:
        edges, starts = self._find_row_and_document_starts(key)
        return _count_values(np.diff(np.union1d(edges, starts)))

    def summarize(self, key: str) -> dict[str, Any]:
        edges, starts = self._find_row_and_document_starts(key)
        documents = np.searchsorted(starts, edges[1:-1], side="right")
        is_cut = ~np.isin(edges[1:-1], starts)
        n_cut = len(np.unique(documents[is_cut]))
        has_partial_start = int(edges[0] not in starts)
        return _make_summary(
            self.rows_per_epoch, len(starts) + has_partial_start, n_cut, 0, self.rows_per_epoch * self._seq_len
        )

    def _find_row_and_document_starts(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the row starts of the epoch and the end of its last row, and the document starts in that range."""
        edges = self._get_epoch_offset(key) + np.arange(self.rows_per_epoch + 1) * self._seq_len
        ends = self._find_document_ends()
        return edges, ends[(ends >= edges[0]) & (ends < edges[-1])]

    def _find_document_ends(self) -> np.ndarray:
        assert self._separator is not None, "document counts need a separator"
        return self._tokens.find(self._separator)

    def _get_epoch_offset(self, key: str) -> int:
        return hash_to_uint64(key, "offset") % self._n_offsets


class BestFitPacking:
    """Rows of whole documents. A document longer than a row is split; its remainder opens a row that others may join."""

    def __init__(self, tokens: TokenStore, seq_len: int, separator: int) -> None:
        ends = tokens.find(separator)
        if not len(ends):
            raise DataError("data.packing = best_fit: no document ends in these tokens; set data.packing: stream")
        self._tokens, self._seq_len, self._separator = tokens, seq_len, separator
        # The inputs of a document start with the separator before it. The first document has none; one is added.
        lengths = np.diff(ends, prepend=-1)
        self._n_documents, self._n_cut_documents = len(ends), int((lengths > seq_len).sum())
        starts, piece_lengths, packed = _split_and_pack(ends - lengths, lengths, seq_len)
        order = [piece for row in packed for piece in row]
        self._piece_starts, self._piece_lengths = starts[order], piece_lengths[order]
        self._row_bounds = np.cumsum([0, *map(len, packed)])
        self.rows_per_epoch = len(packed)

    def get_row(self, index: int, key: str) -> int:
        return permute(index, self.rows_per_epoch, key)

    def get_position(self, row: int) -> int:
        return max(int(self._piece_starts[self._row_bounds[row]]), 0)

    def read_window(self, row: int) -> np.ndarray:
        pieces = range(self._row_bounds[row], self._row_bounds[row + 1])
        texts = [self._read_piece(int(self._piece_starts[piece]), int(self._piece_lengths[piece])) for piece in pieces]
        target_position = int(self._piece_starts[pieces[-1]] + self._piece_lengths[pieces[-1]])
        window = np.full(self._seq_len + 1, self._separator, np.int64)
        text = np.concatenate([*texts, self._tokens.read(target_position, 1)])
        window[: len(text)] = text
        return window

    def get_weights(self, row: int) -> np.ndarray:
        return (np.arange(self._seq_len + 1) <= self._text_tokens_per_row[row]).astype(np.float32)

    def count_max_documents(self) -> int:
        return int((np.diff(self._row_bounds) + (self._text_tokens_per_row < self._seq_len)).max())

    def count_document_lengths(self, key: str) -> Mapping[int, int]:
        return _count_values(self._piece_lengths)

    def summarize(self, key: str) -> dict[str, Any]:
        n_padding = self.rows_per_epoch * self._seq_len - int(self._piece_lengths.sum())
        return _make_summary(
            self.rows_per_epoch, self._n_documents, self._n_cut_documents, n_padding, self.rows_per_epoch * self._seq_len
        )

    @functools.cached_property
    def _text_tokens_per_row(self) -> np.ndarray:
        """Number of inputs in each row that are text."""
        return np.add.reduceat(self._piece_lengths, self._row_bounds[:-1])

    def _read_piece(self, first: int, size: int) -> np.ndarray:
        if first >= 0:
            return self._tokens.read(first, size)
        return np.concatenate([[self._separator], self._tokens.read(0, size - 1)])


def _split_and_pack(
    starts: np.ndarray, lengths: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Split documents into pieces of at most `capacity` tokens and pack them.

    Returns the start and length of each piece, and for each row the indices of its pieces.
    """
    long_documents, whole_documents = np.flatnonzero(lengths > capacity), np.flatnonzero(lengths <= capacity)
    n_parts = -(-lengths[long_documents] // capacity)
    part_index = np.arange(n_parts.sum()) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    # The later parts of a document do not start with a separator. They must come first in a row to count as a document.
    part_starts = np.repeat(starts[long_documents], n_parts) + part_index * capacity
    part_lengths = np.minimum(np.repeat(lengths[long_documents], n_parts) - part_index * capacity, capacity)
    whole_documents = whole_documents[np.argsort(-lengths[whole_documents], kind="stable")]
    piece_starts, piece_lengths = (
        np.concatenate([part_starts, starts[whole_documents]]),
        np.concatenate([part_lengths, lengths[whole_documents]]),
    )
    return piece_starts, piece_lengths, pack_best_fit(piece_lengths.tolist(), len(part_starts), capacity)


def pack_best_fit(sizes: list[int], n_openers: int, capacity: int) -> list[list[int]]:
    """Return the item indices of each row.

    Each of the first `n_openers` items opens a row. Every other item goes to the row with the least free space that
    suffices, or opens a row if none does. No size exceeds `capacity`.
    """
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = defaultdict(list)
    available = 0  # bit r is set if a row has exactly r tokens free
    for item, size in enumerate(sizes):
        sufficient = 0 if item < n_openers else available >> size << size
        space = (sufficient & -sufficient).bit_length() - 1 if sufficient else capacity
        row = rows_by_space[space].pop() if sufficient else len(rows)
        if not sufficient:
            rows.append([])
        elif not rows_by_space[space]:
            available ^= 1 << space
        rows[row].append(item)
        if size < space:
            rows_by_space[space - size].append(row)
            available |= 1 << (space - size)
    return rows


def permute(index: int, size: int, key: str) -> int:
    """Apply the pseudorandom permutation of `range(size)` keyed by `key` to `index`, in constant time and memory.

    A Feistel network permutes the smallest 4^k >= size numbers, for any round function. Cycle walking (apply it again until
    the result is below `size`, fewer than four times on average) restricts it to a permutation of `range(size)`.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_index in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (hash_to_uint64(key, f"{round_index}:{right}") & mask)
        index = left << half | right
        if index < size:
            return index


def hash_to_uint64(key: str, label: str) -> int:
    """Return 64 pseudorandom bits that depend only on the arguments."""
    return int.from_bytes(hashlib.blake2b(f"{key}:{label}".encode(), digest_size=8).digest(), "little")


def check_length(tokens: TokenStore, seq_len: int) -> None:
    """Raise `DataError` unless the tokens hold one sequence and its last target."""
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"{len(tokens)} tokens are fewer than one sequence of {seq_len} and its last target; "
            "give more text or lower train.seq_len"
        )


def _count_values(lengths: np.ndarray) -> Mapping[int, int]:
    return {int(length): int(count) for length, count in zip(*np.unique(lengths, return_counts=True), strict=True)}


def _make_summary(rows: int, documents: int, cut: int, padded: int, tokens: int) -> dict[str, Any]:
    return {
        "rows": rows,
        "documents": documents,
        "cut_documents": cut,
        "cut_share": cut / max(documents, 1),
        "padded_tokens": padded,
        "padded_share": padded / tokens,
    }
