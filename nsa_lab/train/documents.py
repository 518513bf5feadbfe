"""The documents of a batch, as a model takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa_lab.attention import Span
from nsa_lab.data import Batch, Documents

CPU = torch.device("cpu")


def span_of(documents: Documents | None, capacity: int | None = None) -> Span | None:
    """All rows as one packed row, None without documents. Nearly all batches of as many rows have its shapes, whatever
    documents they hold. `capacity`: documents to make room for; None: `Documents.capacity`."""
    if documents is None:
        return None
    return Span.packed(documents.cu_seqlens, capacity=capacity or documents.capacity, longest=documents.longest)


def spans_of(parts: Sequence[Batch]) -> list[Span | None]:
    """Of the micro-batches of a step, each with room for as many documents as the fullest holds.

    Every step has so one of a few sizes, however its documents fall into micro-batches.
    """
    capacity = max((part.documents.capacity for part in parts if part.documents), default=None)
    return [span_of(part.documents, capacity) for part in parts]


def other_documents(span: Span) -> Span:
    """Documents for the same `Span.laid_out`, of which as many tokens as can be stand elsewhere than in those of `span`.

    Of three choices: as many as there is room for, all alike; as few as there may be; and those of `span` in reverse. They
    are those of `span` where no others are possible. It needs a capacity.
    """
    total, room = span.queries, span.capacity
    assert room is not None, "span_of gives one"
    many = [total * number // room for number in range(room + 1)]
    few = [*range(0, total, span.longest_laid_out), total]
    reverse = [total - bound for bound in reversed(span.bounds)]
    choices = (Span.packed(torch.tensor(b, dtype=torch.int32), room, span.at_most) for b in (many, few, reverse))
    here = span.positions(CPU)
    return max(choices, key=lambda other: int((other.positions(CPU) != here).sum()))


def logits_of(forward: Callable[..., Tensor], tokens: Tensor, span: Span | None) -> Tensor:
    """Logits [B, T, V] of tokens int64 [B, T]; with the `span` of their documents, each as if it were alone."""
    if span is None:
        return forward(tokens)
    return forward(tokens.flatten()[None], span).unflatten(1, tokens.shape)[0]
