"""How a text becomes rows: windows of `seq_len` + 1 tokens, the inputs and the last target.

`StreamRows` takes the text as it comes and cuts documents where a row ends. `BestFitRows` keeps documents whole where they
fit into a row and fills rows as well as they can be (best fit, decreasing; arXiv 2404.10830), the rest of a row with
separators that weigh nothing. Both read every document of an epoch once, in an order that is computed and not stored.
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
    """The rows of an epoch."""

    rows_per_epoch: int

    def get_row(self, index: int, key: str) -> int:
        """The row that is number `index` of the epoch named `key`; an argument of the functions below."""
        ...

    def get_position(self, row: int) -> int:
        """Where its first token stands in the text."""
        ...

    def read_window(self, row: int) -> np.ndarray:
        """int64 [seq_len + 1]."""
        ...

    def get_weights(self, row: int) -> np.ndarray | None:
        """float32 [seq_len + 1], 1 for text and 0 for padding; None: all text."""
        ...

    def count_max_documents(self) -> int:
        """The most that a row can hold."""
        ...

    def count_document_lengths(self, key: str) -> Mapping[int, int]:
        """How many documents, or parts of one, of each length the rows of the epoch `key` hold; padding is none."""
        ...

    def summarize(self, key: str) -> dict[str, Any]:
        """Rows and documents of that epoch, documents that lie in several rows, and tokens of padding."""
        ...


class StreamPacking:
    """Disjoint windows of the text as it is; the last token of one is the first input of its neighbour."""

    def __init__(self, tokens: TokenStore, seq_len: int, separator: int | None = None) -> None:
        check_length(tokens, seq_len)
        self._tokens, self._seq_len, self._separator = tokens, seq_len, separator
        # One window fewer than fit, so that every offset has the same number of windows.
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
        edges, begins = self._find_row_and_document_starts(key)
        return _count_values(np.diff(np.union1d(edges, begins)))

    def summarize(self, key: str) -> dict[str, Any]:
        edges, begins = self._find_row_and_document_starts(key)
        documents = np.searchsorted(begins, edges[1:-1], side="right")
        inner = ~np.isin(edges[1:-1], begins)
        cut = len(np.unique(documents[inner]))
        first = int(edges[0] not in begins)
        return _make_summary(self.rows_per_epoch, len(begins) + first, cut, 0, self.rows_per_epoch * self._seq_len)

    def _find_row_and_document_starts(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Where rows of the epoch begin and, last, end; and where documents begin between the first and the last."""
        edges = self._get_epoch_offset(key) + np.arange(self.rows_per_epoch + 1) * self._seq_len
        ends = self._find_document_ends()
        return edges, ends[(ends >= edges[0]) & (ends < edges[-1])]

    def _find_document_ends(self) -> np.ndarray:
        assert self._separator is not None, "asked of texts whose documents are told apart"
        return self._tokens.find(self._separator)

    def _get_epoch_offset(self, key: str) -> int:
        return hash_to_uint64(key, "offset") % self._n_offsets


class BestFitPacking:
    """Rows of whole documents. What is longer than a row takes rows of its own, and what is left of it begins another."""

    def __init__(self, tokens: TokenStore, seq_len: int, separator: int) -> None:
        ends = tokens.find(separator)
        if not len(ends):
            raise DataError("data.packing = best_fit: no document ends in these tokens; set data.packing: stream")
        self._tokens, self._seq_len, self._separator = tokens, seq_len, separator
        # The inputs of a document begin with the separator before it, which the first one has to be given.
        lengths = np.diff(ends, prepend=-1)
        self._n_documents, self._n_cut_documents = len(ends), int((lengths > seq_len).sum())
        firsts, sizes, packed = _split_and_pack(ends - lengths, lengths, seq_len)
        order = [piece for row in packed for piece in row]
        self._piece_starts, self._piece_lengths = firsts[order], sizes[order]
        self._row_bounds = np.cumsum([0, *map(len, packed)])
        self.rows_per_epoch = len(packed)

    def get_row(self, index: int, key: str) -> int:
        return permute(index, self.rows_per_epoch, key)

    def get_position(self, row: int) -> int:
        return max(int(self._piece_starts[self._row_bounds[row]]), 0)

    def read_window(self, row: int) -> np.ndarray:
        pieces = range(self._row_bounds[row], self._row_bounds[row + 1])
        texts = [self._read_piece(int(self._piece_starts[piece]), int(self._piece_lengths[piece])) for piece in pieces]
        last = int(self._piece_starts[pieces[-1]] + self._piece_lengths[pieces[-1]])
        window = np.full(self._seq_len + 1, self._separator, np.int64)
        text = np.concatenate([*texts, self._tokens.read(last, 1)])
        window[: len(text)] = text
        return window

    def get_weights(self, row: int) -> np.ndarray:
        return (np.arange(self._seq_len + 1) <= self._text_tokens_per_row[row]).astype(np.float32)

    def count_max_documents(self) -> int:
        return int((np.diff(self._row_bounds) + (self._text_tokens_per_row < self._seq_len)).max())

    def count_document_lengths(self, key: str) -> Mapping[int, int]:
        return _count_values(self._piece_lengths)

    def summarize(self, key: str) -> dict[str, Any]:
        padded = self.rows_per_epoch * self._seq_len - int(self._piece_lengths.sum())
        return _make_summary(
            self.rows_per_epoch, self._n_documents, self._n_cut_documents, padded, self.rows_per_epoch * self._seq_len
        )

    @functools.cached_property
    def _text_tokens_per_row(self) -> np.ndarray:
        """Inputs of every row that are text."""
        return np.add.reduceat(self._piece_lengths, self._row_bounds[:-1])

    def _read_piece(self, first: int, size: int) -> np.ndarray:
        if first >= 0:
            return self._tokens.read(first, size)
        return np.concatenate([[self._separator], self._tokens.read(0, size - 1)])


def _split_and_pack(
    begins: np.ndarray, lengths: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Where the pieces of documents begin, how long they are, and which of them each row of `room` tokens holds."""
    long, whole = np.flatnonzero(lengths > capacity), np.flatnonzero(lengths <= capacity)
    parts = -(-lengths[long] // capacity)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    # The rest of a document does not begin with a separator, and must be the first in its row to be told apart.
    rest = np.repeat(begins[long], parts) + number * capacity
    rests = np.minimum(np.repeat(lengths[long], parts) - number * capacity, capacity)
    whole = whole[np.argsort(-lengths[whole], kind="stable")]
    firsts, sizes = np.concatenate([rest, begins[whole]]), np.concatenate([rests, lengths[whole]])
    return firsts, sizes, pack_best_fit(sizes.tolist(), len(rest), capacity)


def pack_best_fit(sizes: list[int], n_openers: int, capacity: int) -> list[list[int]]:
    """Which items each row holds, by their numbers. The first `openers` items begin a row each; every other one goes to the
    row with the least room that is enough for it, or begins one where there is none. No size is above `room`."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms = 0  # bit r: a row has room for r
    for item, size in enumerate(sizes):
        fitting = 0 if item < n_openers else rooms >> size << size
        least = (fitting & -fitting).bit_length() - 1 if fitting else capacity
        row = by_room[least].pop() if fitting else len(rows)
        if not fitting:
            rows.append([])
        elif not by_room[least]:
            rooms ^= 1 << least
        rows[row].append(item)
        if size < least:
            by_room[least - size].append(row)
            rooms |= 1 << (least - size)
    return rows


def permute(index: int, size: int, key: str) -> int:
    """Where a random permutation of `range(size)`, named by `key`, sends `index`; in constant time and memory.

    A Feistel network permutes the least 4^k >= size numbers whatever its round function is; walking on from a result that
    is not below `size` until one is (fewer than four walks on average) leaves a permutation of `range(size)`.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (hash_to_uint64(key, f"{turn}:{right}") & mask)
        index = left << half | right
        if index < size:
            return index


def hash_to_uint64(key: str, label: str) -> int:
    """64 bits that look random and depend on the arguments alone."""
    return int.from_bytes(hashlib.blake2b(f"{key}:{label}".encode(), digest_size=8).digest(), "little")


def check_length(tokens: TokenStore, seq_len: int) -> None:
    """Raises `DataError` unless the tokens hold a sequence and its last target."""
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"{len(tokens)} tokens do not hold one sequence of {seq_len} and its last target; "
            "give more text, or lower train.seq_len"
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
