"""Where documents begin in rows of tokens.

A separator stands after every document. It is the last target of the one before it and the first input of the next: a
document's first token is predicted from the separator alone, and its end is predicted from all of it. So a document begins
at its separator; several separators in a row (padding) are one document that counts for nothing. The losses of documents
add up to those of their texts.

Documents are found in the row and not looked up, planted facts and padding included, so that a batch stays a function of
the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of rows: no row shares one with another."""

    row_bounds: tuple[Tensor, ...]
    """Of each row, where documents begin and, last, where the row ends: int32 [documents + 1], on the CPU."""

    @property
    def capacity(self) -> int:
        """Documents to make room for: a power of four, so that few sizes serve all batches: each is compiled for.

        Two for each row at least: a batch of long documents, some of which end, has the size of one of which none does. Not
        the most that the rows of the text can hold, which would be one size for all: that was twenty times as many as
        there were, and every launch passes over those that are not there.
        """
        twos = (max(sum(len(row) - 1 for row in self.row_bounds), 2 * len(self.row_bounds)) - 1).bit_length()
        return 1 << twos + twos % 2

    @property
    def longest(self) -> int:
        """Tokens of a row, which no document exceeds."""
        return max(int(row[-1]) for row in self.row_bounds)

    @property
    def cu_seqlens(self) -> Tensor:
        """Of all rows, one after another: int32 [documents + 1]."""
        ends = [0]
        for row in self.row_bounds:
            ends.extend((row[1:] + ends[-1]).tolist())
        return torch.tensor(ends, dtype=torch.int32)

    def split(self, size: int) -> list[Documents]:
        """`size` rows in each, in order."""
        return [Documents(self.row_bounds[first : first + size]) for first in range(0, len(self.row_bounds), size)]


def locate_documents(inputs: Iterable[np.ndarray], separator: int) -> Documents:
    """The documents of rows of inputs, int64 [T] each."""
    rows = (np.append(find_document_starts(row, separator), len(row)) for row in inputs)
    return Documents(tuple(torch.from_numpy(bounds.astype(np.int32)) for bounds in rows))


def find_document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """int64 [documents]: where documents, or the rest of one, begin in `tokens` [T]. The first is 0."""
    separators = tokens == separator
    begins = separators.copy()
    begins[1:] &= ~separators[:-1]
    begins[0] = True
    return np.flatnonzero(begins)


def count_max_documents(ends: np.ndarray, length: int) -> int:
    """The most documents that `length` tokens in a row can hold, of a text with separators at `ends`, ascending."""
    # Of separators in a row the first alone begins a document, and the first token begins one whatever it is.
    begins = ends[(np.diff(ends, prepend=-2) > 1) & (ends > 0)]
    inside = np.searchsorted(begins, begins + length - 1) - np.arange(len(begins))
    return 1 + int(inside.max(initial=0))
