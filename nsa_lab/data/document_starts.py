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

import numpy as np
import torch
from torch import Tensor


def locate_documents(inputs: Iterable[np.ndarray], separator: int) -> Tensor:
    """Return where documents start in rows of inputs, int64 [T] each, and the end: int32 [documents + 1], on the CPU.

    Positions count over all rows, one after another, like flash-attn's cu_seqlens. No document spans two rows.
    """
    starts, end = [np.zeros(0, np.int64)], 0
    for row in inputs:
        starts.append(find_document_starts(row, separator) + end)
        end += len(row)
    return torch.from_numpy(np.append(np.concatenate(starts), end).astype(np.int32))


def split_documents(documents: Tensor, length: int) -> list[Tensor]:
    """Split documents, as in `locate_documents`, into parts of `length` tokens each, a whole number of rows."""
    total = int(documents[-1])
    starts = torch.arange(0, total, length, dtype=documents.dtype)
    firsts = torch.searchsorted(documents, starts).tolist()
    lasts = torch.searchsorted(documents, (starts + length).clamp(max=total)).tolist()
    return [documents[first : last + 1] - documents[first] for first, last in zip(firsts, lasts, strict=True)]


def compute_document_capacity(documents: Tensor, seq_len: int) -> int:
    """Return the number of documents to allocate for, for rows of `seq_len` tokens: a power of four, at least two per row.

    Each capacity is compiled separately, so few sizes should serve all batches. With two per row, a batch of long documents
    has the same capacity whether or not some of them end in it. The maximum over the whole text would need only one size,
    but it was twenty times the actual number, and every kernel launch iterates over the unused entries.
    """
    twos = (max(len(documents) - 1, 2 * (int(documents[-1]) // seq_len)) - 1).bit_length()
    return 1 << twos + twos % 2


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
