"""The documents of a batch, as a model takes them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa_lab.attention import Span
from nsa_lab.data import Documents


def span_of(documents: Documents) -> Span:
    """All rows as one packed row. Nearly all batches of as many rows have its shapes, whatever documents they hold."""
    return Span.packed(documents.cu_seqlens, capacity=documents.capacity, longest=documents.longest)


def logits_of(forward: Callable[..., Tensor], tokens: Tensor, documents: Documents | None) -> Tensor:
    """Logits [B, T, V] of tokens int64 [B, T]; with `documents`, each as if it were alone."""
    if documents is None:
        return forward(tokens)
    return forward(tokens.flatten()[None], span_of(documents)).unflatten(1, tokens.shape)[0]
