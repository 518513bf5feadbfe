"""Gather operations that move packed documents between layouts, so that all documents are computed as one text.

A layout is given by its bounds: an integer tensor [documents + 1] on the device, non-decreasing from 0, like
`Span.cu_seqlens`. Row n of a document in one layout corresponds to row n of that document in another. The number of
operations does not depend on the documents, and nothing synchronizes with the device.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nsa_lab.attention.compile_utils import is_transformed

ABSENT = -1


def find_documents(n_rows: int, bounds: Tensor) -> Tensor:
    """Return the document of each of `n_rows` rows, int64 [n_rows]; the last document for rows past the end."""
    return find_documents_of_rows(torch.arange(n_rows, dtype=bounds.dtype, device=bounds.device), bounds)


def find_documents_of_rows(rows: Tensor, bounds: Tensor) -> Tensor:
    """Return the document of each of `rows`, int64 of their shape; the last document for rows past the end."""
    if len(bounds) == 2:
        return torch.zeros_like(rows, dtype=torch.int64)
    # If several documents start at the same row, all but the last are empty.
    return (torch.searchsorted(bounds, rows.to(bounds.dtype), right=True) - 1).clamp_max(len(bounds) - 2)


def map_rows(n_rows: int, from_bounds: Tensor, to_bounds: Tensor) -> Tensor:
    """Return, for each of the first `n_rows` rows of layout `from_bounds`, its row in layout `to_bounds`, int64 [n_rows].

    `ABSENT` if the row is past the end of its document in either layout.
    """
    document = find_documents(n_rows, from_bounds)
    row_in_document = torch.arange(n_rows, device=from_bounds.device) - from_bounds[document]
    common_length = torch.minimum(from_bounds.diff(), to_bounds.diff())[document]
    return torch.where(row_in_document < common_length, to_bounds[document] + row_in_document, ABSENT)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, inverse)
        return _select_rows(x, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, inverse = ctx.saved_tensors
        return gather_rows(grads[0], inverse, rows), None, None


def gather_rows(x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    """Return x [B, S, ...] at `rows`, [B, len(rows), ...]; zeros where `rows` is `ABSENT`.

    No row may be gathered twice. `inverse` [S] is the new row of each row of x, or `ABSENT`, so the gradient is a
    `gather_rows` too. The gradient of index_select would sum in an order that differs between runs on a GPU; only
    transforms of torch.func and forward-mode differentiation use it.
    """
    if is_transformed(x):
        return _select_rows(x, rows)
    return cast(Tensor, _GatherRows.apply(x, rows, inverse))  # pyright: ignore[reportUnknownMemberType]


def _select_rows(x: Tensor, rows: Tensor) -> Tensor:
    if not x.shape[1]:
        return x.new_zeros(x.shape[0], len(rows), *x.shape[2:])
    return zero_absent_rows(x.index_select(1, rows.clamp_min(0)), rows)


def zero_absent_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x [B, len(rows), ...] with zeros where `rows` is `ABSENT`, also in place of NaN; their gradient is 0."""
    return x.masked_fill((rows == ABSENT).view(-1, *[1] * (x.ndim - 2)), 0)
