"""Context parallelism: the ranks of a group share one text. Each holds two chunks of its tokens.

A text of T tokens is cut into 2 N chunks for N ranks. Rank r holds chunks r and 2 N - 1 - r (zigzag), so every rank has
about the same number of past keys to score. Queries stay on their rank. Keys and values of all tokens are gathered, because
the selected branch may read any of them; everything that is computed from keys alone (convolution, RoPE, compression) is
computed from the gathered keys on every rank, so nothing needs the activations of a neighbour.

A shard is computed in pieces, each with an ordinary `Span`: the end of a document that begins before the chunk is a
`Span.chunk`; the documents that begin within the chunk are a `Span.packed`, the last of them possibly cut. All backends
therefore run without changes, and the outputs equal the outputs of one process up to rounding.

Invariants
* The bounds of the chunks follow from the number of tokens and ranks. A text needs at least 2 N tokens.
* Every rank of a group takes part in the same collectives in the same order, whatever its documents.
* The gradient of gathered rows is the sum over all ranks of the group, rounded once, however many ranks there are.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from nsa_lab.attention.layout import Span
from nsa_lab.config import NSAConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


OptionalTensor = TypeVar("OptionalTensor", bound=Tensor | None)


class ShardPiece(NamedTuple):
    """Queries of a shard that are computed in one call, and the keys that they can attend to."""

    span: Span
    """Layout of the queries and keys of the piece: `Span.chunk`, or `Span.packed` without a capacity."""
    query_rows: slice
    """Rows of the shard's queries, gates, outputs and blocks."""
    key_rows: slice
    """Rows of the text's keys and values."""
    first_document: int
    """Number of the first document of the piece in the text."""

    def compressed_rows(self, text: Span, nsa: NSAConfig) -> slice:
        """Return the rows of the text's compressed keys and values."""
        start = text.compressed_bounds(nsa)[self.first_document]
        return slice(start, start + self.span.num_compressed(nsa))


@dataclass(frozen=True, eq=False)
class ContextShard:
    """This rank's share of a text: the argument `span` of a model that gets the tokens of this rank.

    `text`: layout of the whole text, full or packed, equal on all ranks. `rank`, `size`: of this process in `group`, the
    process group whose ranks share the text. With one rank, `group` may be None. Raise ValueError if the text has fewer
    than two tokens per rank, or is a chunk.
    """

    text: Span
    rank: int
    size: int
    group: ProcessGroup | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.text.kind == "chunk":
            raise ValueError(f"ContextShard: expected a full or packed layout, got {self.text}; pass the whole text")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"ContextShard: rank = {self.rank}: expected 0 .. {self.size - 1}")
        if self.text.n_queries < 2 * self.size:
            raise ValueError(
                f"ContextShard: {self.text.n_queries} tokens, and each of {self.size} ranks takes two chunks; expected at "
                f"least {2 * self.size} tokens; use fewer ranks"
            )

    @cached_property
    def ranges(self) -> tuple[slice, ...]:
        """Rows of the text that this rank holds, in order: two ranges, or one if its chunks are adjacent."""
        return self.list_ranges(self.rank)

    def list_ranges(self, rank: int) -> tuple[slice, ...]:
        """Return `ranges` of any rank."""
        n_chunks, n_tokens = 2 * self.size, self.text.n_queries
        first, second = (
            slice(chunk * n_tokens // n_chunks, (chunk + 1) * n_tokens // n_chunks) for chunk in (rank, n_chunks - 1 - rank)
        )
        return (slice(first.start, second.stop),) if first.stop == second.start else (first, second)

    @property
    def n_queries(self) -> int:
        """Number of tokens of this rank."""
        return _count_rows(self.ranges)

    @cached_property
    def pieces(self) -> tuple[ShardPiece, ...]:
        """Pieces of the shard in the order of its rows."""
        pieces: list[ShardPiece] = []
        row = 0
        for part in self.ranges:
            for span, key_rows, document in _split_range(self.text, part.start, part.stop):
                pieces.append(ShardPiece(span, slice(row, row + span.n_queries), key_rows, document))
                row += span.n_queries
        return tuple(pieces)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return the position of every token of this rank in its document, int64 [n_queries]."""
        return self.take(self.text.positions(device), dim=0)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of x [..., T, ...]; `dim`: the axis of the tokens of the text."""
        parts = [x.narrow(dim, part.start, part.stop - part.start) for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def place(self, x: Tensor) -> Tensor:
        """Return x [B, n_queries, ...] in the rows of the text, [B, T, ...], with zeros in the rows of other ranks."""
        placed = x.new_zeros(x.shape[0], self.text.n_queries, *x.shape[2:])
        for part, rows in zip(self.ranges, torch.split(x, [_count_rows([p]) for p in self.ranges], dim=1), strict=True):
            placed[:, part] = rows
        return placed

    def find_rows(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return those `rows` of the text that this rank holds, and their rows in the shard."""
        first_rows = accumulate((_count_rows([part]) for part in self.ranges), initial=0)
        held = [
            (row, first_row + row - part.start)
            for part, first_row in zip(self.ranges, first_rows, strict=False)
            for row in rows
            if part.start <= row < part.stop
        ]
        return [row for row, _ in held], [own_row for _, own_row in held]

    def start_gather(self, x: Tensor) -> PendingRows:
        """Start to gather x [B, n_queries, ...] of all ranks. Collective over the group.

        Computation between this and `PendingRows.wait` overlaps with the communication, and so does its backward pass with
        the communication of the gradients.
        """
        if self.size == 1:
            return PendingRows(self, x, _Transfer())
        transfer = _Transfer()
        return PendingRows(self, cast(Tensor, _StartGather.apply(x, self, transfer)), transfer)  # pyright: ignore[reportUnknownMemberType]

    def gather(self, x: Tensor) -> Tensor:
        """Return x [B, n_queries, ...] of all ranks in the order of the text, [B, T, ...]. Collective over the group."""
        return self.start_gather(x).wait()

    @cached_property
    def _most_rows(self) -> int:
        """Number of rows of the rank that has most, to which all are padded in a collective."""
        return max(_count_rows(self.list_ranges(rank)) for rank in range(self.size))

    def _get_group(self) -> ProcessGroup:
        assert self.group is not None, "a shard of several ranks has a group"
        return self.group

    def _order_rows(self, gathered: Tensor) -> Tensor:
        """Return gathered rows [N B, most rows, ...] in the order of the text, [B, T, ...]."""
        by_rank = torch.unflatten(gathered, 0, (self.size, -1))
        text = gathered.new_empty(by_rank.shape[1], self.text.n_queries, *by_rank.shape[3:])
        for rank, rows in enumerate(by_rank):
            row = 0
            for part in self.list_ranges(rank):
                text[:, part] = rows[:, row : row + part.stop - part.start]
                row += part.stop - part.start
        return text

    def _start_scatter(self, text: Tensor) -> Tensor:
        """Start to send the rows of `text` [B, T, ...] to the ranks that hold them. Collective over the group."""
        # A reduce-scatter in bfloat16 rounds every partial sum, and one in float32 sends twice the bytes. An all-to-all
        # sends the bytes of the first, and the sum is computed in float32. For random gradients of four ranks, the error of
        # the sum is 0.17%, that of rounding it once, and with a reduce-scatter in bfloat16 it is 0.27%. The sum is also in
        # the order of the ranks, so that it is the same in every run.
        by_rank = text.new_empty(self.size, text.shape[0], self._most_rows, *text.shape[2:])
        for rank, rows in enumerate(by_rank):
            row = 0
            for part in self.list_ranges(rank):
                rows[:, row : row + part.stop - part.start] = text[:, part]
                row += part.stop - part.start
            rows[:, row:] = 0
        return _load_collective("all_to_all")(by_rank.flatten(0, 1), None, None, self._get_group())

    def _sum_scattered(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum over the ranks, [B, n_queries, ...], of the result of `_start_scatter`."""
        parts = torch.unflatten(_load_collective("wait")(received), 0, (self.size, -1))[:, :, : self.n_queries]
        total, *others, last = parts.unbind(0)
        for part in others:
            total = total.to(torch.promote_types(dtype, torch.float32)) + part
        # One kernel that adds in float32 and rounds. For two ranks it is all: a sum over an axis is several times slower.
        return torch.add(total, last, out=last.new_empty(last.shape, dtype=dtype))


@dataclass(eq=False)
class _Transfer:
    """Result of a collective that may be in progress. Autograd would wait for it, so it is passed outside of the graph."""

    rows: Tensor | None = None

    def take(self) -> Tensor:
        rows, self.rows = self.rows, None
        assert rows is not None, "a collective was started, and its result is taken once"
        return rows


class PendingRows(NamedTuple):
    """Rows that are being gathered; the result of `ContextShard.start_gather`."""

    shard: ContextShard
    token: Tensor
    """Connects the start and the end of the gather in the graph of autograd; with one rank, the rows."""
    transfer: _Transfer

    def wait(self) -> Tensor:
        """Return the rows of all ranks in the order of the text, [B, T, ...]. Differentiable. Call it once."""
        if self.shard.size == 1:
            return self.token
        return cast(Tensor, _FinishGather.apply(self.token, self.shard, self.transfer))  # pyright: ignore[reportUnknownMemberType]


class _StartGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: ContextShard, transfer: _Transfer) -> Tensor:
        ctx.shard, ctx.transfer, ctx.dtype = shard, transfer, own.dtype
        padded = _pad_rows(own.detach(), shard._most_rows)
        transfer.rows = _load_collective("all_gather")(padded.contiguous(), 0, shard._get_group())
        return own.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shard._sum_scattered(ctx.transfer.take(), ctx.dtype), None, None


class _FinishGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, shard: ContextShard, transfer: _Transfer) -> Tensor:
        ctx.shard, ctx.transfer = shard, transfer
        return shard._order_rows(_load_collective("wait")(transfer.take()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.transfer.rows = ctx.shard._start_scatter(grads[0])
        return grads[0].new_empty(0), None, None


def split_queries(x: OptionalTensor, pieces: Sequence[ShardPiece]) -> Sequence[OptionalTensor]:
    """Return the rows of every piece in x [B, n_queries, ...], a tensor of this rank's tokens; None if x is None."""
    if x is None or len(pieces) == 1:
        return [x] * len(pieces)
    # The pieces have all rows in order. Autograd would pad the gradient of each slice with zeros; a split needs one copy.
    return cast("Any", torch.split(x, [piece.span.n_queries for piece in pieces], dim=1))


def slice_keys(x: OptionalTensor, parts: Sequence[slice]) -> Sequence[OptionalTensor]:
    """Return x[:, part] for every part of x [B, rows, ...], rows of the text; None if x is None. Differentiable."""
    if x is None:
        return [x] * len(parts)
    return cast("Any", _SliceRows.apply(x, *parts) if len(parts) > 1 else [x[:, parts[0]]])  # pyright: ignore[reportUnknownMemberType]


class _SliceRows(torch.autograd.Function):
    """Slices that may overlap, whose gradients are added where they are: autograd would pad each to the whole text."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: slice) -> tuple[Tensor, ...]:
        ctx.shape, ctx.parts = x.shape, parts
        return tuple(x[:, part] for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (longest, first), *others = sorted(zip(ctx.parts, grads, strict=True), key=lambda pair: -pair[1].shape[1])
        total = first.new_empty(ctx.shape)
        total[:, : longest.start] = 0
        total[:, longest] = first
        total[:, longest.stop :] = 0
        for part, grad in others:
            total[:, part] += grad
        return total, *(None for _ in grads)


def _load_collective(name: str) -> Callable[..., Tensor]:
    """Return the functional collective `name` of torch, by the name that this version of torch has for it."""
    # Takes a tenth of a second to import.
    from torch.distributed import _functional_collectives as collectives

    return getattr(collectives, f"{name}_single", None) or getattr(collectives, f"{name}_tensor")


def _split_range(text: Span, start: int, stop: int) -> list[tuple[Span, slice, int]]:
    """Return layout, key rows and first document of the pieces of rows start .. stop-1 of `text`."""
    if text.kind == "full":
        return [(Span.chunk(start, stop - start), slice(0, stop), 0)]
    pieces: list[tuple[Span, slice, int]] = []
    # If several documents start at the same row, all but the last are empty.
    document = bisect_right(text.bounds, start) - 1
    first_row = text.bounds[document]
    if first_row < start:
        end = min(text.bounds[document + 1], stop)
        pieces.append((Span.chunk(start - first_row, end - start), slice(first_row, end), document))
        start, document = end, bisect_right(text.bounds, end) - 1
    if start < stop:
        inner = [bound for bound in text.bounds[document:] if bound < stop]
        bounds = torch.tensor([bound - start for bound in (*inner, stop)], dtype=torch.int32)
        pieces.append((Span.packed(bounds), slice(start, stop), document))
    return pieces


def _count_rows(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)


def _pad_rows(x: Tensor, n_rows: int) -> Tensor:
    if x.shape[1] == n_rows:
        return x
    return torch.cat([x, x.new_zeros(x.shape[0], n_rows - x.shape[1], *x.shape[2:])], dim=1)
