"""Loss of whole documents: every document from its first token on, read alone and read behind others.

What a run with `data.documents: mask` and one with `cross` are compared by: the same tokens, in the two ways in which they
were trained to read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nsa_lab.attention import Span
from nsa_lab.data import BestFitPacking, TokenStore
from nsa_lab.data.document_starts import locate_documents
from nsa_lab.evaluate.loss_by_position import split_into_ranges
from nsa_lab.model import NSATransformer


@dataclass(frozen=True)
class DocumentLengthRange:
    """Documents, or parts of one, of `first` + 1 .. `last` tokens. `alone` and `across` are nats per token."""

    first: int
    last: int
    documents: int
    tokens: int
    alone: float
    across: float


@dataclass(frozen=True)
class DocumentLoss:
    """Mean losses in nats per token, separators included.

    `alone`: every document as if nothing stood before it. `across`: the same rows read as one text each. `first_alone` and
    `first_across`: of the first token of each document. `difference` is across - alone, the mean over rows, and `error` its
    standard error (0 for a single row).
    """

    length: int
    rows: int
    documents: int
    cut_documents: int
    tokens: int
    alone: float
    across: float
    first_alone: float
    first_across: float
    difference: float
    error: float
    by_length: list[DocumentLengthRange]


@torch.no_grad()
def measure_document_loss(
    model: NSATransformer, text: TokenStore, separator: int, length: int, rows: int = 16
) -> DocumentLoss:
    """Losses on at most `rows` rows of `length` tokens, filled with whole documents of `text`, best fit.

    A document longer than a row is read in parts, each from its own beginning; `cut_documents` counts those in `text`, and
    `documents` are those that were read, parts included. Rows are spread over all lengths of documents. Raises `DataError`
    if no document ends in `text`.
    """
    packed = BestFitPacking(text, length, separator)
    count = min(rows, packed.rows_per_epoch)
    asked = [_score_row(model, packed, row * packed.rows_per_epoch // count, separator) for row in range(count)]
    documents = torch.cat([row.lengths[row.lengths > 0] for row in asked])
    alone, across = (torch.cat(part) for part in zip(*((row.alone, row.across) for row in asked), strict=True))
    begins = (documents.cumsum(0) - documents).long()
    by_row = torch.stack([(row.across - row.alone).mean() for row in asked])
    return DocumentLoss(
        length,
        count,
        len(documents),
        packed.summarize("")["cut_documents"],
        len(alone),
        alone.mean().item(),
        across.mean().item(),
        alone[begins].mean().item(),
        across[begins].mean().item(),
        by_row.mean().item(),
        by_row.std().item() / math.sqrt(count) if count > 1 else 0.0,
        list(_group_by_length(documents, alone, across, length)),
    )


@dataclass(frozen=True)
class _RowLosses:
    """Lengths of a row's documents, int64 [documents]; losses of their tokens, float64 [tokens]. Padding is left out."""

    lengths: Tensor
    alone: Tensor
    across: Tensor


def _score_row(model: NSATransformer, packed: BestFitPacking, row: int, separator: int) -> _RowLosses:
    window, filled, span = get_packed_row(packed, row, separator)
    alone, across = (compute_token_losses(model, window, reading)[:filled] for reading in (span, None))
    return _RowLosses(span.cu_seqlens(torch.device("cpu")).clamp(max=filled).diff().long(), alone, across)


def get_packed_row(packed: BestFitPacking, row: int, separator: int) -> tuple[Tensor, int, Span]:
    """A row of whole documents: its tokens int64 [T + 1], how many of its targets are text, and where documents begin."""
    window, filled = packed.read_window(row), int(packed.get_weights(row)[1:].sum())
    documents = locate_documents([window[:-1]], separator)
    # Padding stays, so that every row has the same shapes; nothing in it comes before text.
    span = Span.packed(documents.cu_seqlens, capacity=documents.capacity, longest=documents.longest)
    return torch.from_numpy(window), filled, span


def compute_token_losses(model: NSATransformer, window: Tensor, span: Span | None = None) -> Tensor:
    """Of every token of a window int64 [T + 1] but the first, nats: float64 [T], on the CPU."""
    window = window.to(model.head.weight.device)
    logits = model(window[None, :-1], span)[0].float()
    return functional.cross_entropy(logits, window[1:], reduction="none").double().cpu()


def _group_by_length(documents: Tensor, alone: Tensor, across: Tensor, max_length: int) -> Iterator[DocumentLengthRange]:
    of_token = documents.repeat_interleave(documents)
    for first, last in split_into_ranges(max_length):
        held = (of_token > first) & (of_token <= last)
        many = int(((documents > first) & (documents <= last)).sum())
        if many:
            yield DocumentLengthRange(
                first, last, many, int(held.sum()), alone[held].mean().item(), across[held].mean().item()
            )
