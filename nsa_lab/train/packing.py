"""The documents of a batch, as a model takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa_lab.attention import Span
from nsa_lab.config import TrainConfig, divide_among_ranks
from nsa_lab.data import Batch, Documents, StagedBatches

CPU = torch.device("cpu")
# So much is looked through for documents before a run begins: some seconds, of which a row takes some 20 us.
MAX_SCANNED_TOKENS, MAX_SCANNED_ROWS = 1 << 27, 1 << 17


def make_span(documents: Documents | None, capacity: int | None = None) -> Span | None:
    """All rows as one packed row, None without documents. Nearly all batches of as many rows have its shapes, whatever
    documents they hold. `capacity`: documents to make room for; None: `Documents.capacity`."""
    if documents is None:
        return None
    return Span.packed(documents.cu_seqlens, capacity=capacity or documents.capacity, longest=documents.longest)


def make_spans(micro_batches: Sequence[Batch]) -> list[Span | None]:
    """Of the micro-batches of a step, each with room for as many documents as the fullest holds.

    Every step has so one of a few sizes, however its documents fall into micro-batches.
    """
    capacity = get_capacity([part.documents for part in micro_batches])
    return [make_span(part.documents, capacity) for part in micro_batches]


def get_capacity(micro_batches: Sequence[Documents | None]) -> int | None:
    """As many documents as the fullest of these micro-batches has room for; None where they are not told apart."""
    return max((documents.capacity for documents in micro_batches if documents), default=None)


def find_steps_with_new_capacity(batches: StagedBatches, train: TrainConfig, n_ranks: int, first_step: int) -> list[int]:
    """Of the steps from `first` on, those that make room for another number of documents than all before them in their
    stage, on any of the ranks; of the next `LOOKED_THROUGH` tokens, in at most `ROWS_LOOKED_THROUGH` rows. Empty where
    documents are not told apart.
    """
    seen, steps, tokens, rows = set[tuple[int, int, int | None]](), list[int](), 0, 0
    for step in range(first_step, train.steps + 1):
        (index, _), documents = train.locate_step(step), batches.find_documents(step - 1)
        stage = train.plan[index]
        if documents is None or tokens >= MAX_SCANNED_TOKENS or rows >= MAX_SCANNED_ROWS:
            break
        shares = documents.split(divide_among_ranks(stage.sequences_per_step, n_ranks))
        rooms = (get_capacity(share.split(stage.sequences_per_forward)) for share in shares)
        made = {(index, rank, room) for rank, room in enumerate(rooms)}
        if not made <= seen:
            steps.append(step)
        seen |= made
        tokens, rows = tokens + stage.tokens_per_step, rows + stage.sequences_per_step
    return steps


def make_different_span(span: Span) -> Span:
    """Documents for the same `Span.laid_out`, of which as many tokens as can be stand elsewhere than in those of `span`.

    Of three choices: as many as there is room for, all alike; as few as there may be; and those of `span` in reverse. They
    are those of `span` where no others are possible. It needs a capacity.
    """
    total, room = span.n_queries, span.capacity
    assert room is not None, "span_of gives one"
    many = [total * number // room for number in range(room + 1)]
    few = [*range(0, total, span.longest_allocated), total]
    reverse = [total - bound for bound in reversed(span.bounds)]
    choices = (
        Span.packed(torch.tensor(b, dtype=torch.int32), room, span.max_document_length) for b in (many, few, reverse)
    )
    here = span.positions(CPU)
    return max(choices, key=lambda other: int((other.positions(CPU) != here).sum()))


def compute_logits(forward: Callable[..., Tensor], tokens: Tensor, span: Span | None) -> Tensor:
    """Logits [B, T, V] of tokens int64 [B, T]; with the `span` of their documents, each as if it were alone."""
    if span is None:
        return forward(tokens)
    return forward(tokens.flatten()[None], span).unflatten(1, tokens.shape)[0]
