"""Packed documents in other layouts: rows that are moved so that all documents can be computed as one text.

A layout says where the rows of every document begin: bounds, an integer tensor [documents + 1] on the device, from 0,
never falling, as `Span.cu_seqlens`. Row n of a document in one layout is its row n in another. How many operations this
takes does not depend on the documents, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

ABSENT = -1


def find_documents(n_rows: int, bounds: Tensor) -> Tensor:
    """The document that holds each of `rows` rows, int64 [rows]; past the end, the last document."""
    if len(bounds) == 2:
        return bounds.new_zeros(n_rows, dtype=torch.int64)
    row = torch.arange(n_rows, dtype=bounds.dtype, device=bounds.device)
    # The last of those that begin there: the others are empty.
    return (torch.searchsorted(bounds, row, right=True) - 1).clamp_max(len(bounds) - 2)


def map_rows(n_rows: int, from_bounds: Tensor, to_bounds: Tensor) -> Tensor:
    """Where each of the first `rows` rows of the layout `here` stands in the layout `there`, int64 [rows].

    `ABSENT` for a row that is past its document's end in either of them.
    """
    document = find_documents(n_rows, from_bounds)
    number = torch.arange(n_rows, device=from_bounds.device) - from_bounds[document]
    shared = torch.minimum(from_bounds.diff(), to_bounds.diff())[document]
    return torch.where(number < shared, to_bounds[document] + number, ABSENT)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, back)
        if not x.shape[1]:
            return x.new_zeros(x.shape[0], len(rows), *x.shape[2:])
        return zero_absent_rows(x.index_select(1, rows.clamp_min(0)), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, back = ctx.saved_tensors
        return gather_rows(grads[0], back, rows), None, None


def gather_rows(x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    """x [B, S, ...] -> [B, len(rows), ...], its rows `rows` [new rows]; zeros where that is `ABSENT`.

    No row may be taken twice, and `back` [S] says where each of them came to stand, or `ABSENT`. So the gradient is a
    `take` too. That of index_select adds in whatever order a GPU comes to it, and differs from run to run.
    """
    return cast(Tensor, _GatherRows.apply(x, rows, inverse))  # pyright: ignore[reportUnknownMemberType]


def zero_absent_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, len(rows), ...], with zeros where `rows` is `ABSENT`, whatever stood there; no gradient reaches these."""
    return x.masked_fill((rows == ABSENT).view(-1, *[1] * (x.ndim - 2)), 0)
