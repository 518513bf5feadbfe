"""Document starts in rows of tokens.

A separator follows every document. It is the last target of its document and the first input of the next document: the
first token of a document is predicted from the separator alone, and its end is predicted from all of it. A document
therefore starts at the separator before it. Consecutive separators (padding) form one document without loss. The losses of
the documents in a row add up to the losses of their texts.

Documents are found in the tokens of the row, after facts are inserted and padding is added, so that a batch stays a pure
function of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Documents of a batch of rows. No document spans two rows."""

    row_bounds: tuple[Tensor, ...]
    """Document starts of each row, followed by the end of the row: int32 [documents + 1], on the CPU."""

    @property
    def capacity(self) -> int:
        """Number of documents to allocate for: a power of four, at least two per row.

        Each capacity is compiled separately, so few sizes should serve all batches. With two per row, a batch of long
        documents has the same capacity whether or not some of them end in it. The maximum over the whole text would need
        only one size, but it was twenty times the actual number, and every kernel launch iterates over the unused entries.
        """
        twos = (max(sum(len(row) - 1 for row in self.row_bounds), 2 * len(self.row_bounds)) - 1).bit_length()
        return 1 << twos + twos % 2

    @property
    def longest(self) -> int:
        """Length of a row in tokens, an upper bound on the length of a document."""
        return max(int(row[-1]) for row in self.row_bounds)

    @property
    def cu_seqlens(self) -> Tensor:
        """Cumulative document lengths over all rows, concatenated: int32 [documents + 1]."""
        ends = [0]
        for row in self.row_bounds:
            ends.extend((row[1:] + ends[-1]).tolist())
        return torch.tensor(ends, dtype=torch.int32)

    def split(self, size: int) -> list[Documents]:
        """Split into groups of `size` rows, in order."""
        return [Documents(self.row_bounds[first : first + size]) for first in range(0, len(self.row_bounds), size)]


def locate_documents(inputs: Iterable[np.ndarray], separator: int) -> Documents:
    """Return the documents of rows of inputs, int64 [T] each."""
    rows = (np.append(find_document_starts(row, separator), len(row)) for row in inputs)
    return Documents(tuple(torch.from_numpy(bounds.astype(np.int32)) for bounds in rows))


def find_document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Return the positions in `tokens` [T] where a document or its remainder starts, int64 [documents]. The first is 0."""
    is_separator = tokens == separator
    is_start = is_separator.copy()
    is_start[1:] &= ~is_separator[:-1]
    is_start[0] = True
    return np.flatnonzero(is_start)


def count_max_documents(ends: np.ndarray, length: int) -> int:
    """Return the maximum number of documents in `length` consecutive tokens, given the ascending separator positions."""
    # Only the first of consecutive separators starts a document. The first token of a row always starts one.
    starts = ends[(np.diff(ends, prepend=-2) > 1) & (ends > 0)]
    n_inside = np.searchsorted(starts, starts + length - 1) - np.arange(len(starts))
    return 1 + int(n_inside.max(initial=0))
