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


def owners(rows: int, bounds: Tensor) -> Tensor:
    """The document that holds each of `rows` rows, int64 [rows]; past the end, the last document."""
    if len(bounds) == 2:
        return bounds.new_zeros(rows, dtype=torch.int64)
    row = torch.arange(rows, dtype=bounds.dtype, device=bounds.device)
    # The last of those that begin there: the others are empty.
    return (torch.searchsorted(bounds, row, right=True) - 1).clamp_max(len(bounds) - 2)


def rows_elsewhere(rows: int, here: Tensor, there: Tensor) -> Tensor:
    """Where each of the first `rows` rows of the layout `here` stands in the layout `there`, int64 [rows].

    `ABSENT` for a row that is past its document's end in either of them.
    """
    document = owners(rows, here)
    number = torch.arange(rows, device=here.device) - here[document]
    shared = torch.minimum(here.diff(), there.diff())[document]
    return torch.where(number < shared, there[document] + number, ABSENT)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, back)
        if not x.shape[1]:
            return x.new_zeros(x.shape[0], len(rows), *x.shape[2:])
        return zero_absent(x.index_select(1, rows.clamp_min(0)), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, back = ctx.saved_tensors
        return take(grads[0], back, rows), None, None


def take(x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
    """x [B, S, ...] -> [B, len(rows), ...], its rows `rows` [new rows]; zeros where that is `ABSENT`.

    No row may be taken twice, and `back` [S] says where each of them came to stand, or `ABSENT`. So the gradient is a
    `take` too. That of index_select adds in whatever order a GPU comes to it, and differs from run to run.
    """
    return cast(Tensor, _Take.apply(x, rows, back))  # pyright: ignore[reportUnknownMemberType]


def zero_absent(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, len(rows), ...], with zeros where `rows` is `ABSENT`, whatever stood there; no gradient reaches these."""
    return x.masked_fill((rows == ABSENT).view(-1, *[1] * (x.ndim - 2)), 0)
