"""Conversion of the documents of a batch into the `Span` that a model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa_lab.attention import Span
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.config import TrainConfig, compute_context_size
from nsa_lab.data import Batch, StagedBatches, compute_document_capacity, split_documents

CPU = torch.device("cpu")
# Limits of the scan for document counts before a run starts. It takes seconds; a row takes about 20 us.
MAX_SCANNED_TOKENS, MAX_SCANNED_ROWS = 1 << 27, 1 << 17


def make_span(documents: Tensor | None, seq_len: int, capacity: int | None = None) -> Span | None:
    """Return the span of all rows of `seq_len` tokens, packed into one row; None without documents.

    Spans have the same shapes for nearly all batches with the same number of rows, whatever documents they contain.
    `documents`: as in `Batch`. `capacity`: number of documents to allocate for; None: `compute_document_capacity`.
    """
    if documents is None:
        return None
    capacity = capacity or compute_document_capacity(documents, seq_len)
    return Span.packed(documents, capacity=capacity, longest=seq_len)


def make_spans(micro_batches: Sequence[Batch]) -> list[Span | None]:
    """Return the spans of the micro-batches of a step, all with the capacity of the micro-batch with the most documents.

    Steps then have few distinct shapes, however their documents are distributed over micro-batches.
    """
    seq_len = micro_batches[0].inputs.shape[1]
    capacity = get_capacity([micro_batch.documents for micro_batch in micro_batches], seq_len)
    return [make_span(micro_batch.documents, seq_len, capacity) for micro_batch in micro_batches]


def get_capacity(micro_batches: Sequence[Tensor | None], seq_len: int) -> int | None:
    """Return the largest document capacity of these micro-batches; None without document masking."""
    found = (compute_document_capacity(documents, seq_len) for documents in micro_batches if documents is not None)
    return max(found, default=None)


def find_steps_with_new_capacity(
    batches: StagedBatches, train: TrainConfig, n_ranks: int, first_step: int, context_parallel: int = 1
) -> list[int]:
    """Return the steps, from `first_step` on, whose capacity is new within their stage on any rank.

    Scans the next `MAX_SCANNED_TOKENS` tokens, at most `MAX_SCANNED_ROWS` rows. Empty without document masking.
    """
    known_keys, steps, n_tokens, n_rows = set[tuple[int, int, int | None]](), list[int](), 0, 0
    for step in range(first_step, train.steps + 1):
        (index, _), documents = train.locate_step(step), batches.find_documents(step - 1)
        stage = train.plan[index]
        if documents is None or n_tokens >= MAX_SCANNED_TOKENS or n_rows >= MAX_SCANNED_ROWS:
            break
        n_groups = n_ranks // compute_context_size(stage.sequences_per_step, n_ranks, context_parallel)
        shares = split_documents(documents, stage.sequences_per_step // n_groups * stage.seq_len)
        tokens_per_forward = stage.sequences_per_forward * stage.seq_len
        capacities = (get_capacity(split_documents(share, tokens_per_forward), stage.seq_len) for share in shares)
        keys = {(index, rank, capacity) for rank, capacity in enumerate(capacities)}
        if not keys <= known_keys:
            steps.append(step)
        known_keys |= keys
        n_tokens, n_rows = n_tokens + stage.tokens_per_step, n_rows + stage.sequences_per_step
    return steps


def make_different_span(span: Span) -> Span:
    """Return a span with the graph key of `span` whose documents differ at as many tokens as possible.

    There are three candidates: the largest number of documents, of equal length; the smallest number; and the documents
    of `span` in reverse order. If no others are possible, the result has the documents of `span`. `span` needs a
    capacity.
    """
    total, capacity = span.n_queries, span.capacity
    assert capacity is not None, "make_span sets a capacity"
    many = [total * number // capacity for number in range(capacity + 1)]
    few = [*range(0, total, span.longest_allocated), total]
    reverse = [total - bound for bound in reversed(span.bounds)]
    candidates = (
        Span.packed(torch.tensor(bounds, dtype=torch.int32), capacity, span.max_document_length)
        for bounds in (many, few, reverse)
    )
    positions = span.positions(CPU)
    return max(candidates, key=lambda candidate: int((candidate.positions(CPU) != positions).sum()))


def compute_logits(forward: Callable[..., Tensor], tokens: Tensor, span: Span | None) -> Tensor:
    """Return logits [B, T, V] of tokens int64 [B, T]. With a `span`, each document is computed as if alone."""
    if span is None:
        return forward(tokens)
    return forward(tokens.flatten()[None], span).unflatten(1, tokens.shape)[0]


def take_share(x: Tensor, shard: ContextShard | None) -> Tensor:
    """Return this rank's values of x [rows, T] of a micro-batch: [1, n] if documents are packed, else [rows, n].

    Without a shard, return x.
    """
    if shard is None:
        return x
    return shard.take(x.flatten()[None] if shard.text.kind == "packed" else x)


def place_share(x: Tensor, shard: ContextShard | None, seq_len: int) -> Tensor:
    """Return the result of `take_share` in its place, [rows, `seq_len`], with zeros for the tokens of other ranks."""
    return x if shard is None else shard.place(x).view(-1, seq_len)
