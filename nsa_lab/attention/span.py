"""Where queries stand: which positions they have, which keys belong to them, and which document each row is part of.

Three kinds. Full: queries are all keys of one document. Chunk: queries are the last positions of one document, as in
decoding. Packed: documents one after another in one row, each computed as if it were alone.

Invariants
* Immutable, hashable and equal by value; what is malformed raises ValueError when it is built, never later.
* Everything is counted on the CPU. A device sees copies of the documents' bounds alone, made once per device; what is
  computed from them there is kept with the span, so that all layers share it. `take_over` fills that with another layout
  in place, for a CUDA graph that reads it; the host's side never changes.
* With a `capacity`, every tensor shape depends on the total number of tokens alone, whatever the documents are: CUDA graphs
  and torch.compile need that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import FrozenInstanceError
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.attention.packing import owners
from nsa_lab.attention.tracing import untraced
from nsa_lab.config import NSAConfig

Kept = TypeVar("Kept")


class DocumentRows(NamedTuple):
    """Rows that are computed as if no others were there: queries at positions first .. last-1, keys at 0 .. last-1."""

    queries: slice
    """Its rows of q, gates, outputs and block lists."""
    keys: slice
    """Its rows of keys and values."""
    first: int
    last: int

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Of its queries, int64 [last - first]."""
        return geometry.positions(self.first, self.last, device)


class Span:
    """Made by `Span.full`, `Span.chunk` or `Span.packed`; every function of the operator takes one as `span`."""

    # No dataclass: of a frozen one, torch.compile (2.11) guards every field and all that is in it, the documents' bounds
    # and what is kept of them, so that what it compiled for one batch of documents served no other.
    __slots__ = ("_kept", "at_most", "bounds", "capacity", "kind", "start")

    kind: Literal["full", "chunk", "packed"]
    bounds: tuple[int, ...]
    """Rows of q where documents begin and, last, end."""
    start: int
    """Position of the first query in its document; not 0 for a chunk alone."""
    capacity: int | None
    """Documents that shapes are laid out for; None: shapes follow the documents."""
    at_most: int | None
    """Tokens that no document exceeds, of all that launches are laid out for; None: see `longest_laid_out`."""
    _kept: dict[Hashable, tuple[Callable[[Span], Any], Any]]
    """How it is made of a span, and what that was for this one."""

    def __init__(
        self,
        kind: Literal["full", "chunk", "packed"],
        bounds: tuple[int, ...],
        start: int = 0,
        capacity: int | None = None,
        at_most: int | None = None,
    ) -> None:
        given: dict[str, object] = {
            "kind": kind,
            "bounds": bounds,
            "start": start,
            "capacity": capacity,
            "at_most": at_most,
            "_kept": {},
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"Span.{name}: a span does not change; make another with Span.full, Span.chunk or Span.packed"
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def _given(self) -> tuple[Any, ...]:
        return self.kind, self.bounds, self.start, self.capacity, self.at_most

    def __eq__(self, other: object) -> bool:
        return self._given() == other._given() if isinstance(other, Span) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._given())

    @classmethod
    def full(cls, length: int) -> Span:
        """Queries are all `length` >= 1 keys of one document, from position 0."""
        return cls("full", (0, _whole("length", length, 1)))

    @classmethod
    def chunk(cls, start: int, length: int) -> Span:
        """Queries are positions start .. start+length-1, keys positions 0 .. start+length-1; start >= 0, length >= 1."""
        return cls("chunk", (0, _whole("length", length, 1)), _whole("start", start, 0))

    @classmethod
    def packed(cls, cu_seqlens: Tensor, capacity: int | None = None, longest: int | None = None) -> Span:
        """Documents one after another in one row [1, total, ...]: document i holds rows cu_seqlens[i] .. cu_seqlens[i+1]-1.

        cu_seqlens int32 [documents + 1] on the CPU, from 0, never falling, as flash-attn has it; documents of length zero
        are allowed. With `capacity`, a number of documents, shapes depend on the total alone: compressed rows are padded to
        total // d. `longest`: tokens that no document of any batch exceeds, as flash-attn's max_seqlen; launches are laid
        out for documents of that length. Without it they are for the longest of these or, with a capacity, for one as long
        as the row, which is slower where there is none. The values are copied: changing the tensor later changes nothing
        here. Raises ValueError.
        """
        bounds = _bounds(cu_seqlens)
        capacity = None if capacity is None else _whole("capacity", capacity, 1)
        longest = None if longest is None else _whole("longest", longest, 1)
        if capacity is not None and capacity < len(bounds) - 1:
            raise ValueError(
                f"Span.packed: {len(bounds) - 1} documents in cu_seqlens, and capacity = {capacity}; "
                "make the capacity larger, or pack fewer documents"
            )
        span = cls("packed", bounds, capacity=capacity, at_most=longest)
        if longest is not None and longest < span.longest:
            raise ValueError(
                f"Span.packed: a document of {span.longest} tokens, and longest = {longest}; "
                "give the most tokens that a document may have"
            )
        return span

    @property
    def queries(self) -> int:
        """Rows of q, gates, outputs and block lists."""
        return self.bounds[-1]

    @property
    def keys(self) -> int:
        """Rows of keys and values."""
        return self.start + self.bounds[-1]

    @property
    def documents(self) -> tuple[DocumentRows, ...]:
        """All of them in order, empty ones included."""
        return self.kept("documents", Span._documents)

    def _documents(self) -> tuple[DocumentRows, ...]:
        return tuple(
            DocumentRows(slice(begin, end), slice(begin, end + self.start), self.start, self.start + end - begin)
            for begin, end in pairwise(self.bounds)
        )

    @property
    def longest(self) -> int:
        """Keys of the longest document."""
        return self.kept("longest", lambda span: max(document.last for document in span.documents))

    @property
    def longest_laid_out(self) -> int:
        """The longest document that its launches have room for: unless it was said, with a capacity, all of the row."""
        if self.at_most is not None:
            return min(self.at_most, self.queries)
        return self.longest if self.capacity is None else self.queries

    @property
    def is_full(self) -> bool:
        """Whether it computes what `Span.full` does, at the same shapes, however it was written."""
        return self.capacity is None and 0 < self.queries == self.longest

    def selection_bounds(self, nsa: NSAConfig) -> tuple[int, ...]:
        """As `compressed_bounds`, of selection blocks where all documents' blocks are numbered one after another."""
        return tuple(accumulate((geometry.num_selection(document.last, nsa) for document in self.documents), initial=0))

    def selection_laid_out(self, nsa: NSAConfig) -> int:
        """Selection blocks of all documents together; with a capacity, the most that there can be of any documents."""
        # A document has one block more than its whole ones at most.
        return self.selection_bounds(nsa)[-1] if self.capacity is None else self.queries // nsa.l_sel + self.capacity

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Of every query in its own document, int64 [queries]."""
        if self.kind != "packed":
            return self.documents[0].positions(device)
        return _positions_in_documents(self, device or torch.get_default_device())

    def query_documents(self, device: torch.device | None = None) -> Tensor:
        """The document that every query is in, int64 [queries]."""
        return geometry.positions(0, len(self.documents)).repeat_interleave(self._lengths()).to(device)

    def key_documents(self, device: torch.device | None = None) -> Tensor:
        """The document that every key is in, int64 [keys]."""
        keys = torch.tensor([document.last for document in self.documents])
        return geometry.positions(0, len(self.documents)).repeat_interleave(keys).to(device)

    def compressed_bounds(self, nsa: NSAConfig) -> tuple[int, ...]:
        """Rows of compressed keys where documents begin and, last, end; rows past the end are padding (eq. 7)."""

        def count(span: Span) -> tuple[int, ...]:
            counts = (geometry.num_compressed(document.last, nsa) for document in span.documents)
            return tuple(accumulate(counts, initial=0))

        return self.kept(("compressed_bounds", nsa.l, nsa.d), count)

    def compressed_rows(self, nsa: NSAConfig) -> tuple[slice, ...]:
        """Every document's rows of compressed keys and values."""
        return tuple(slice(begin, end) for begin, end in pairwise(self.compressed_bounds(nsa)))

    def num_compressed(self, nsa: NSAConfig) -> int:
        """Rows of compressed keys and values, the padding of a `capacity` included."""
        # d divides l, so that a document of L tokens has at most L // d blocks, and all of them at most total // d.
        return self.queries // nsa.d if self.capacity is not None else self.compressed_bounds(nsa)[-1]

    def padding(self, nsa: NSAConfig) -> int:
        """Rows of compressed keys and values, at the end, that belong to no document."""
        return self.num_compressed(nsa) - self.compressed_bounds(nsa)[-1]

    def num_selection(self, nsa: NSAConfig) -> int:
        """Selection blocks of the longest document; block numbers are its own document's."""
        return geometry.num_selection(self.longest, nsa)

    def begins(self, device: torch.device) -> Tensor:
        """Whether a query is the first of its document, bool [queries], made once per device."""
        return self.kept(("begins", device), lambda span: span.positions(device) == span.start)

    def kept(self, key: Hashable, make: Callable[[Span], Kept]) -> Kept:
        """What `make` gives of this span, called once for each `key`; the key names the device, if it lies on one.

        All that `make` knows of documents it has from the span that it is called with: `take_over` calls it with another.
        """
        if key not in self._kept:
            # A tensor of inference mode could not take part in a backward pass, and the span may come to serve one.
            with torch.inference_mode(False):
                self._kept[key] = make, make(self)
        return self._kept[key][1]

    @property
    def laid_out(self) -> tuple[Any, ...]:
        """Of packed documents with a capacity, all that shapes and launches follow from: equal for spans that can take over
        each other's documents, and that one CUDA graph serves."""
        return self.kind, self.queries, self.capacity, self.at_most

    def take_over(self, other: Span) -> None:
        """Fill every tensor that is kept here, in place, with what it is for `other`: a CUDA graph that was captured with
        this span computes the documents of `other` when it is replayed next.

        It is made for `other` and copied on the device's current stream; the host does not wait. What the host counts
        (`bounds`, `documents`, `longest` and all that follows from them) goes on describing the documents that this span
        was built with, and so does what is kept for the first time after this. Raises ValueError, before anything is
        copied, unless both are packed documents with as many tokens, one capacity and one `longest`, and where what is kept
        has another shape for `other`.
        """
        if self.capacity is None or self.laid_out != other.laid_out:
            raise ValueError(
                f"Span.take_over: {self} cannot hold the documents of {other}: both need as many tokens, one capacity and "
                "one longest; give Span.packed the same capacity= and longest= for both"
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, (make, held) in self._kept.items():
            here, there = list(_tensors(held)), list(_tensors(other.kept(key, make)))
            mine, its = ([tuple(tensor.shape) for tensor in tensors] for tensors in (here, there))
            if mine != its:
                raise ValueError(
                    f"Span.take_over: what is kept as {key!r} has shapes {mine} for {self}, and {its} for {other}; "
                    "lay it out for the capacity, not for the documents"
                )
            pairs += zip(here, there, strict=True)
        for tensor, value in pairs:
            tensor.copy_(value, non_blocking=True)

    def on_device(self, bounds: list[tuple[int, ...]], device: torch.device) -> Tensor:
        """Bounds of several layouts as int32 [len(bounds), documents + 1], padded as those of `cu_seqlens`.

        Those of packed documents are copied there; those of one text are worked out there, and a CUDA graph may hold that.
        """
        if self.kind != "packed":
            return torch.stack([geometry.positions(0, 2, device) * end for _, end in bounds]).int()
        return _copied([self._padded(rows, 1) for rows in bounds], device)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """`bounds` as int32 [documents + 1] on `device`, copied there once.

        With a capacity, [capacity + 1]: documents that are missing are empty and stand at the end.
        """
        return self.kept(device, lambda span: span.on_device([span.bounds], device)[0])

    def row_bounds(self, nsa: NSAConfig, device: torch.device) -> Tensor:
        """`bounds` above `compressed_bounds`: int32 [2, documents + 1] on `device`, copied there once per l and d.

        With a capacity, documents that are missing are empty and stand at the end; so do those that, with or without one,
        make rows a multiple of four, 16 bytes, long.
        """

        def copied(span: Span) -> Tensor:
            return _copied([span._padded(bounds, 4) for bounds in (span.bounds, span.compressed_bounds(nsa))], device)

        return self.kept(("row_bounds", device, nsa.l, nsa.d), copied)

    def _padded(self, bounds: tuple[int, ...], multiple: int) -> tuple[int, ...]:
        documents = len(self.bounds) - 1 if self.capacity is None else self.capacity
        return bounds + bounds[-1:] * (-(-(documents + 1) // multiple) * multiple - len(bounds))

    def _lengths(self) -> Tensor:
        return torch.tensor(self.bounds).diff()

    def __repr__(self) -> str:
        if self.kind == "full":
            return f"Span.full({self.queries})"
        if self.kind == "chunk":
            return f"Span.chunk({self.start}, {self.queries})"
        given = {"capacity": self.capacity, "longest": self.at_most}
        more = "".join(f", {name}={value}" for name, value in given.items() if value is not None)
        return f"Span.packed({len(self.bounds) - 1} documents, {self.queries} tokens{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the device copies: another process may not have the device.
        return Span, self._given()


@untraced
def _positions_in_documents(span: Span, device: torch.device) -> Tensor:
    bounds = span.cu_seqlens(device)
    return geometry.positions(0, span.queries, device) - bounds[owners(span.queries, bounds)]


def _tensors(kept: object) -> Iterator[Tensor]:
    """Those in what is kept: a tensor, or tuples of them, one in another."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, tuple):
        for part in cast("tuple[object, ...]", kept):
            yield from _tensors(part)


def _copied(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """int32 on `device`. The host does not wait for what the device has to do before; it may not be captured in a graph,
    which would copy again from memory that is gone."""
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)


def _whole(name: str, value: int, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"Span: {name} = {value!r}: expected a whole number of at least {least}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"Span: {name} = {value}: expected a whole number of at least {least}")
    return number


def _bounds(cu_seqlens: Tensor) -> tuple[int, ...]:
    wanted = "Span.packed: cu_seqlens: expected an int32 tensor [documents + 1] on the CPU that starts at 0 and never falls"
    if not torch.is_tensor(cu_seqlens):
        raise ValueError(f"{wanted}, got a {type(cu_seqlens).__name__}; use torch.tensor(..., dtype=torch.int32)")
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"{wanted}, got one on {cu_seqlens.device}; keep it on the CPU, the span copies it once per device"
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"{wanted}, got {cu_seqlens.dtype}; use cu_seqlens.int()")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"{wanted}, got shape {tuple(cu_seqlens.shape)}; one document of T tokens is [0, T]")
    bounds = tuple(cast("list[int]", cu_seqlens.tolist()))  # pyright: ignore[reportUnknownMemberType]
    if bounds[0] != 0:
        raise ValueError(f"{wanted}, and it starts at {bounds[0]}; put a 0 in front, or subtract its first value")
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"{wanted}, and document {number} goes from {begin} to {end}; give cumulated lengths")
    return bounds
