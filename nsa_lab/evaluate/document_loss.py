"""Loss per document, with each document scored alone and packed after others.

It compares runs with `data.documents: mask` and `cross` on the same tokens, in both layouts that they were trained with.
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
from nsa_lab.data.document_starts import compute_document_capacity, locate_documents
from nsa_lab.evaluate.loss_by_position import split_into_ranges
from nsa_lab.model import NSATransformer


@dataclass(frozen=True)
class DocumentLengthRange:
    """Loss of documents (or parts of documents) of `first` + 1 .. `last` tokens; `alone`, `across`: nats per token."""

    first: int
    last: int
    documents: int
    tokens: int
    alone: float
    across: float


@dataclass(frozen=True)
class DocumentLoss:
    """Mean losses in nats per token, including separators.

    `alone`: each document separately. `across`: the same rows, each as one text. `first_alone`, `first_across`: first token
    of each document. `difference`: mean over rows of across - alone; `error`: its standard error (0 for a single row).
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
    """Measure the loss on at most `rows` rows of `length` tokens, packed with whole documents of `text` by best fit.

    A document longer than a row is cut into parts, each scored separately: `cut_documents` counts such documents in `text`,
    `documents` the documents and parts that were scored. Rows are evenly spaced in packing order, which covers all document
    lengths. Raises `DataError` if no document ends in `text`.
    """
    packed = BestFitPacking(text, length, separator)
    n_rows = min(rows, packed.rows_per_epoch)
    row_losses = [_score_row(model, packed, row * packed.rows_per_epoch // n_rows, separator) for row in range(n_rows)]
    documents = torch.cat([row.lengths[row.lengths > 0] for row in row_losses])
    alone, across = (torch.cat(losses) for losses in zip(*((row.alone, row.across) for row in row_losses), strict=True))
    starts = (documents.cumsum(0) - documents).long()
    difference_by_row = torch.stack([(row.across - row.alone).mean() for row in row_losses])
    return DocumentLoss(
        length,
        n_rows,
        len(documents),
        packed.summarize("")["cut_documents"],
        len(alone),
        alone.mean().item(),
        across.mean().item(),
        alone[starts].mean().item(),
        across[starts].mean().item(),
        difference_by_row.mean().item(),
        difference_by_row.std().item() / math.sqrt(n_rows) if n_rows > 1 else 0.0,
        list(_group_by_length(documents, alone, across, length)),
    )


@dataclass(frozen=True)
class _RowLosses:
    """Document lengths of a row, int64 [documents], and token losses, float64 [tokens], without padding."""

    lengths: Tensor
    alone: Tensor
    across: Tensor


def _score_row(model: NSATransformer, packed: BestFitPacking, row: int, separator: int) -> _RowLosses:
    window, n_targets, span = get_packed_row(packed, row, separator)
    alone, across = (compute_token_losses(model, window, layout)[:n_targets] for layout in (span, None))
    return _RowLosses(span.cu_seqlens(torch.device("cpu")).clamp(max=n_targets).diff().long(), alone, across)


def get_packed_row(packed: BestFitPacking, row: int, separator: int) -> tuple[Tensor, int, Span]:
    """Return the tokens of a row, int64 [T + 1], its number of targets that are not padding, and its document layout."""
    window, n_targets = packed.read_window(row), int(packed.get_weights(row)[1:].sum())
    documents = locate_documents([window[:-1]], separator)
    # Keep the padding, so that all rows have the same shape. It is at the end.
    n_tokens = len(window) - 1
    span = Span.packed(documents, capacity=compute_document_capacity(documents, n_tokens), longest=n_tokens)
    return torch.from_numpy(window), n_targets, span


def compute_token_losses(model: NSATransformer, window: Tensor, span: Span | None = None) -> Tensor:
    """Return the loss of all tokens but the first of a window int64 [T + 1], in nats: float64 [T] on the CPU."""
    window = window.to(model.head.weight.device)
    logits = model(window[None, :-1], span)[0].float()
    return functional.cross_entropy(logits, window[1:], reduction="none").double().cpu()


def _group_by_length(documents: Tensor, alone: Tensor, across: Tensor, max_length: int) -> Iterator[DocumentLengthRange]:
    document_length = documents.repeat_interleave(documents)
    for first, last in split_into_ranges(max_length):
        in_range = (document_length > first) & (document_length <= last)
        n_documents = int(((documents > first) & (documents <= last)).sum())
        if n_documents:
            yield DocumentLengthRange(
                first, last, n_documents, int(in_range.sum()), alone[in_range].mean().item(), across[in_range].mean().item()
            )
