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
from nsa_lab.attention.compile_utils import disable_compile
from nsa_lab.attention.segment_ops import find_documents
from nsa_lab.config import NSAConfig

Cached = TypeVar("Cached")


class DocumentRows(NamedTuple):
    """Rows that are computed as if no others were there: queries at positions first .. last-1, keys at 0 .. last-1."""

    query_rows: slice
    """Its rows of q, gates, outputs and block lists."""
    key_rows: slice
    """Its rows of keys and values."""
    start: int
    end: int

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Of its queries, int64 [last - first]."""
        return geometry.positions(self.start, self.end, device)


class Span:
    """Made by `Span.full`, `Span.chunk` or `Span.packed`; every function of the operator takes one as `span`."""

    # No dataclass: of a frozen one, torch.compile (2.11) guards every field and all that is in it, the documents' bounds
    # and what is kept of them, so that what it compiled for one batch of documents served no other.
    __slots__ = ("_cache", "bounds", "capacity", "kind", "max_document_length", "start")

    kind: Literal["full", "chunk", "packed"]
    bounds: tuple[int, ...]
    """Rows of q where documents begin and, last, end."""
    start: int
    """Position of the first query in its document; not 0 for a chunk alone."""
    capacity: int | None
    """Documents that shapes are laid out for; None: shapes follow the documents."""
    max_document_length: int | None
    """Tokens that no document exceeds, of all that launches are laid out for; None: see `longest_laid_out`."""
    _cache: dict[Hashable, tuple[Callable[[Span], Any], Any]]
    """How it is made of a span, and what that was for this one."""

    def __init__(
        self,
        kind: Literal["full", "chunk", "packed"],
        bounds: tuple[int, ...],
        start: int = 0,
        capacity: int | None = None,
        max_document_length: int | None = None,
    ) -> None:
        given: dict[str, object] = {
            "kind": kind,
            "bounds": bounds,
            "start": start,
            "capacity": capacity,
            "max_document_length": max_document_length,
            "_cache": {},
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"Span.{name}: a span does not change; make another with Span.full, Span.chunk or Span.packed"
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def _get_fields(self) -> tuple[Any, ...]:
        return self.kind, self.bounds, self.start, self.capacity, self.max_document_length

    def __eq__(self, other: object) -> bool:
        return self._get_fields() == other._get_fields() if isinstance(other, Span) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._get_fields())

    @classmethod
    def full(cls, length: int) -> Span:
        """Queries are all `length` >= 1 keys of one document, from position 0."""
        return cls("full", (0, _check_integer("length", length, 1)))

    @classmethod
    def chunk(cls, start: int, length: int) -> Span:
        """Queries are positions start .. start+length-1, keys positions 0 .. start+length-1; start >= 0, length >= 1."""
        return cls("chunk", (0, _check_integer("length", length, 1)), _check_integer("start", start, 0))

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
        bounds = _check_cu_seqlens(cu_seqlens)
        capacity = None if capacity is None else _check_integer("capacity", capacity, 1)
        longest = None if longest is None else _check_integer("longest", longest, 1)
        if capacity is not None and capacity < len(bounds) - 1:
            raise ValueError(
                f"Span.packed: {len(bounds) - 1} documents in cu_seqlens, and capacity = {capacity}; "
                "make the capacity larger, or pack fewer documents"
            )
        span = cls("packed", bounds, capacity=capacity, max_document_length=longest)
        if longest is not None and longest < span.longest_document:
            raise ValueError(
                f"Span.packed: a document of {span.longest_document} tokens, and longest = {longest}; "
                "give the most tokens that a document may have"
            )
        return span

    @property
    def n_queries(self) -> int:
        """Rows of q, gates, outputs and block lists."""
        return self.bounds[-1]

    @property
    def n_keys(self) -> int:
        """Rows of keys and values."""
        return self.start + self.bounds[-1]

    @property
    def documents(self) -> tuple[DocumentRows, ...]:
        """All of them in order, empty ones included."""
        return self.get_or_build("documents", Span._build_documents)

    def _build_documents(self) -> tuple[DocumentRows, ...]:
        return tuple(
            DocumentRows(slice(begin, end), slice(begin, end + self.start), self.start, self.start + end - begin)
            for begin, end in pairwise(self.bounds)
        )

    @property
    def longest_document(self) -> int:
        """Keys of the longest document."""
        return self.get_or_build("longest", lambda span: max(document.end for document in span.documents))

    @property
    def longest_allocated(self) -> int:
        """The longest document that its launches have room for: unless it was said, with a capacity, all of the row."""
        if self.max_document_length is not None:
            return min(self.max_document_length, self.n_queries)
        return self.longest_document if self.capacity is None else self.n_queries

    @property
    def is_full(self) -> bool:
        """Whether it computes what `Span.full` does, at the same shapes, however it was written."""
        return self.capacity is None and 0 < self.n_queries == self.longest_document

    def selection_bounds(self, nsa: NSAConfig) -> tuple[int, ...]:
        """As `compressed_bounds`, of selection blocks where all documents' blocks are numbered one after another."""
        return tuple(accumulate((geometry.num_selection(document.end, nsa) for document in self.documents), initial=0))

    def num_selection_allocated(self, nsa: NSAConfig) -> int:
        """Selection blocks of all documents together; with a capacity, the most that there can be of any documents."""
        # A document has one block more than its whole ones at most.
        return self.selection_bounds(nsa)[-1] if self.capacity is None else self.n_queries // nsa.l_sel + self.capacity

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Of every query in its own document, int64 [queries]."""
        if self.kind != "packed":
            return self.documents[0].positions(device)
        return _compute_document_positions(self, device or torch.get_default_device())

    def query_document_ids(self, device: torch.device | None = None) -> Tensor:
        """The document that every query is in, int64 [queries]."""
        return geometry.positions(0, len(self.documents)).repeat_interleave(self._compute_lengths()).to(device)

    def key_document_ids(self, device: torch.device | None = None) -> Tensor:
        """The document that every key is in, int64 [keys]."""
        keys = torch.tensor([document.end for document in self.documents])
        return geometry.positions(0, len(self.documents)).repeat_interleave(keys).to(device)

    def compressed_bounds(self, nsa: NSAConfig) -> tuple[int, ...]:
        """Rows of compressed keys where documents begin and, last, end; rows past the end are padding (eq. 7)."""

        def count(span: Span) -> tuple[int, ...]:
            counts = (geometry.num_compressed(document.end, nsa) for document in span.documents)
            return tuple(accumulate(counts, initial=0))

        return self.get_or_build(("compressed_bounds", nsa.l, nsa.d), count)

    def compressed_rows(self, nsa: NSAConfig) -> tuple[slice, ...]:
        """Every document's rows of compressed keys and values."""
        return tuple(slice(begin, end) for begin, end in pairwise(self.compressed_bounds(nsa)))

    def num_compressed(self, nsa: NSAConfig) -> int:
        """Rows of compressed keys and values, the padding of a `capacity` included."""
        # d divides l, so that a document of L tokens has at most L // d blocks, and all of them at most total // d.
        return self.n_queries // nsa.d if self.capacity is not None else self.compressed_bounds(nsa)[-1]

    def num_padding(self, nsa: NSAConfig) -> int:
        """Rows of compressed keys and values, at the end, that belong to no document."""
        return self.num_compressed(nsa) - self.compressed_bounds(nsa)[-1]

    def num_selection(self, nsa: NSAConfig) -> int:
        """Selection blocks of the longest document; block numbers are its own document's."""
        return geometry.num_selection(self.longest_document, nsa)

    def is_document_start(self, device: torch.device) -> Tensor:
        """Whether a query is the first of its document, bool [queries], made once per device."""
        return self.get_or_build(("begins", device), lambda span: span.positions(device) == span.start)

    def get_or_build(self, key: Hashable, build: Callable[[Span], Cached]) -> Cached:
        """What `make` gives of this span, called once for each `key`; the key names the device, if it lies on one.

        All that `make` knows of documents it has from the span that it is called with: `take_over` calls it with another.
        """
        if key not in self._cache:
            # A tensor of inference mode could not take part in a backward pass, and the span may come to serve one.
            with torch.inference_mode(False):
                self._cache[key] = build, build(self)
        return self._cache[key][1]

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """Of packed documents with a capacity, all that shapes and launches follow from: equal for spans that can take over
        each other's documents, and that one CUDA graph serves."""
        return self.kind, self.n_queries, self.capacity, self.max_document_length

    def replace_documents(self, other: Span) -> None:
        """Fill every tensor that is kept here, in place, with what it is for `other`: a CUDA graph that was captured with
        this span computes the documents of `other` when it is replayed next.

        It is made for `other` and copied on the device's current stream; the host does not wait. What the host counts
        (`bounds`, `documents`, `longest` and all that follows from them) goes on describing the documents that this span
        was built with, and so does what is kept for the first time after this. Raises ValueError, before anything is
        copied, unless both are packed documents with as many tokens, one capacity and one `longest`, and where what is kept
        has another shape for `other`.
        """
        if self.capacity is None or self.graph_key != other.graph_key:
            raise ValueError(
                f"Span.take_over: {self} cannot hold the documents of {other}: both need as many tokens, one capacity and "
                "one longest; give Span.packed the same capacity= and longest= for both"
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, (make, held) in self._cache.items():
            here, there = list(_iterate_tensors(held)), list(_iterate_tensors(other.get_or_build(key, make)))
            mine, its = ([tuple(tensor.shape) for tensor in tensors] for tensors in (here, there))
            if mine != its:
                raise ValueError(
                    f"Span.take_over: what is kept as {key!r} has shapes {mine} for {self}, and {its} for {other}; "
                    "lay it out for the capacity, not for the documents"
                )
            pairs += zip(here, there, strict=True)
        for tensor, value in pairs:
            tensor.copy_(value, non_blocking=True)

    def copy_bounds(self, bounds: list[tuple[int, ...]], device: torch.device) -> Tensor:
        """Bounds of several layouts as int32 [len(bounds), documents + 1], padded as those of `cu_seqlens`.

        Those of packed documents are copied there; those of one text are worked out there, and a CUDA graph may hold that.
        """
        if self.kind != "packed":
            return torch.stack([geometry.positions(0, 2, device) * end for _, end in bounds]).int()
        return _copy_to_device([self._pad_bounds(rows, 1) for rows in bounds], device)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """`bounds` as int32 [documents + 1] on `device`, copied there once.

        With a capacity, [capacity + 1]: documents that are missing are empty and stand at the end.
        """
        return self.get_or_build(device, lambda span: span.copy_bounds([span.bounds], device)[0])

    def row_bounds(self, nsa: NSAConfig, device: torch.device) -> Tensor:
        """`bounds` above `compressed_bounds`: int32 [2, documents + 1] on `device`, copied there once per l and d.

        With a capacity, documents that are missing are empty and stand at the end; so do those that, with or without one,
        make rows a multiple of four, 16 bytes, long.
        """

        def copied(span: Span) -> Tensor:
            return _copy_to_device(
                [span._pad_bounds(bounds, 4) for bounds in (span.bounds, span.compressed_bounds(nsa))], device
            )

        return self.get_or_build(("row_bounds", device, nsa.l, nsa.d), copied)

    def _pad_bounds(self, bounds: tuple[int, ...], multiple: int) -> tuple[int, ...]:
        documents = len(self.bounds) - 1 if self.capacity is None else self.capacity
        return bounds + bounds[-1:] * (-(-(documents + 1) // multiple) * multiple - len(bounds))

    def _compute_lengths(self) -> Tensor:
        return torch.tensor(self.bounds).diff()

    def __repr__(self) -> str:
        if self.kind == "full":
            return f"Span.full({self.n_queries})"
        if self.kind == "chunk":
            return f"Span.chunk({self.start}, {self.n_queries})"
        given = {"capacity": self.capacity, "longest": self.max_document_length}
        more = "".join(f", {name}={value}" for name, value in given.items() if value is not None)
        return f"Span.packed({len(self.bounds) - 1} documents, {self.n_queries} tokens{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the device copies: another process may not have the device.
        return Span, self._get_fields()


@disable_compile
def _compute_document_positions(span: Span, device: torch.device) -> Tensor:
    bounds = span.cu_seqlens(device)
    return geometry.positions(0, span.n_queries, device) - bounds[find_documents(span.n_queries, bounds)]


def _iterate_tensors(kept: object) -> Iterator[Tensor]:
    """Those in what is kept: a tensor, or tuples of them, one in another."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, tuple):
        for part in cast("tuple[object, ...]", kept):
            yield from _iterate_tensors(part)


def _copy_to_device(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """int32 on `device`. The host does not wait for what the device has to do before; it may not be captured in a graph,
    which would copy again from memory that is gone."""
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)


def _check_integer(name: str, value: int, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"Span: {name} = {value!r}: expected a whole number of at least {minimum}") from None
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"Span: {name} = {value}: expected a whole number of at least {minimum}")
    return number


def _check_cu_seqlens(cu_seqlens: Tensor) -> tuple[int, ...]:
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
