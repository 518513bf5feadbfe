"""Sequence layouts: the position of each query, the keys that it can attend to, and the document of each row.

There are three kinds. Full: queries are all tokens of one document. Chunk: queries are the last positions of one document,
as in decoding. Packed: documents one after another in one row, each computed separately.

Invariants
* A layout is immutable, hashable and equal by value. Malformed arguments raise ValueError when it is built, never later.
* All counts are computed on the CPU. A device holds only a `Layout`, built once per device and block geometry, cached in
  the span and shared by all layers and kernels. `replace_documents` overwrites its tensors in place with those of another
  span, for a CUDA graph that reads them; the values on the CPU never change.
* With a `capacity`, all tensor shapes depend only on the total number of tokens, as CUDA graphs and torch.compile need.
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
from nsa_lab.attention.segment_ops import find_documents, map_rows
from nsa_lab.config import NSAConfig

Cached = TypeVar("Cached")


class QueryRange(NamedTuple):
    """Queries at positions start .. end-1 of one document, their rows of q, and the rows of the document's keys.

    A whole document has keys at positions 0 .. end-1.
    """

    start: int
    end: int
    query_rows: slice
    """Rows of q, gates, outputs and blocks."""
    key_rows: slice
    """Rows of keys and values of the document, from position 0 on."""

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return the positions of the queries, int64 [end - start]."""
        return geometry.positions(self.start, self.end, device)


class Layout(NamedTuple):
    """A span as tensors on one device, for compression blocks of l and d tokens and selection blocks of l_sel tokens.

    Built by `Span.layout`, once per batch, for all layers and kernels. Types and shapes do not depend on the documents if
    the span has a capacity. A graph that torch.compile traced with one layout is then valid for all.
    """

    bounds: Tensor
    """int32 [3, documents + 1]: first token (cu_seqlens), first compressed block and first selection block of each
    document, then the ends of the last. Empty documents are appended up to the capacity, and to make each row a multiple of
    4 integers (16 bytes) long."""
    is_document_start: Tensor | None
    """Bool [T], True at the first token of each document. This and the next four are None for a single document."""
    token_indices: Tensor | None
    """int64 [S * d]. Documents are compressed as one text of S strides of d tokens, in which each document starts at a
    stride and is cut to whole strides, and l/d strides of zeros follow. This is the row of x for each row of the text."""
    token_inverse: Tensor | None
    """int64 [T], the inverse of `token_indices`; see `segment_ops.gather_rows`."""
    block_indices: Tensor | None
    """int64 [N], the blocks of the text that are within one document."""
    block_inverse: Tensor | None
    """int64 [S - l/d + 1], the inverse of `block_indices`."""
    block_aligned_keys: Tensor
    """int64 [selection blocks * l_sel], the key at each position of a text where each document starts at a selection block;
    `ABSENT` if there is none."""
    block_aligned_starts: Tensor
    """int64 [N], the position in that text of the first token of each compressed block; `ABSENT` for padding."""
    start: int
    """Position of the first query; non-zero only for a chunk."""
    n_keys: int
    """Number of rows of keys and values."""
    n_compressed: int
    """Number of rows of compressed keys and values, including padding."""
    longest: int
    """Upper bound of the tokens of a document."""
    max_seqlen: int
    """`longest`, rounded up to a power of two, so that kernels are compiled for few lengths; at most `n_keys`."""
    capacity: int | None
    """Number of documents that tensors are allocated for; None: shapes depend on the documents."""
    varlen_attn: Callable[..., Tensor] | None = None
    """PyTorch's variable-length attention, if dense attention computes all documents in one call. Traced code cannot import
    it."""


class Span:
    """Sequence layout, the argument `span` of all attention functions. See `Span.full`, `Span.chunk` and `Span.packed`."""

    # Not a dataclass: for a frozen one, torch.compile (2.11) guards every field including the document bounds and the
    # cache, and would compile again for each batch of documents.
    __slots__ = ("_cache", "bounds", "capacity", "kind", "max_document_length", "start")

    kind: Literal["full", "chunk", "packed"]
    bounds: tuple[int, ...]
    """First row of q of each document, then the end of the last."""
    start: int
    """Position of the first query in its document; non-zero only for a chunk."""
    capacity: int | None
    """Number of documents that tensors are allocated for; None: shapes depend on the documents."""
    max_document_length: int | None
    """Upper bound of a document's length, for which kernels are launched; None: see `longest_allocated`."""
    _cache: dict[Hashable, tuple[Callable[[Span], Any], Any]]
    """key -> (function that builds a value from a layout, its value for this layout)."""

    def __init__(
        self,
        kind: Literal["full", "chunk", "packed"],
        bounds: tuple[int, ...],
        start: int = 0,
        capacity: int | None = None,
        max_document_length: int | None = None,
    ) -> None:
        fields: dict[str, object] = {
            "kind": kind,
            "bounds": bounds,
            "start": start,
            "capacity": capacity,
            "max_document_length": max_document_length,
            "_cache": {},
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"Span.{name}: a span is immutable; build another with Span.full, Span.chunk or Span.packed"
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
        """Return the layout of one document of `length` >= 1 tokens, all of them queries, from position 0."""
        return cls("full", (0, _check_integer("length", length, 1)))

    @classmethod
    def chunk(cls, start: int, length: int) -> Span:
        """Return the layout with queries at positions start .. start+length-1 and keys at 0 .. start+length-1.

        start >= 0, length >= 1.
        """
        return cls("chunk", (0, _check_integer("length", length, 1)), _check_integer("start", start, 0))

    @classmethod
    def packed(cls, cu_seqlens: Tensor, capacity: int | None = None, longest: int | None = None) -> Span:
        """Return the layout of documents in one row [1, total, ...]: document i has rows cu_seqlens[i] ..
        cu_seqlens[i+1]-1.

        `cu_seqlens`: int32 [documents + 1] on the CPU, non-decreasing from 0, as in flash-attn. Empty documents are
        allowed. The values are copied, so later changes of the tensor have no effect. `capacity`: a number of documents.
        With it, shapes depend only on the total, and compressed rows are padded to total // d. `longest`: upper bound of a
        document's length in any batch, like flash-attn's max_seqlen; kernels are launched for this length. Default: the
        longest of these documents or, with a capacity, the entire row, which is slower. Raise ValueError for malformed
        arguments.
        """
        bounds = _check_cu_seqlens(cu_seqlens)
        capacity = None if capacity is None else _check_integer("capacity", capacity, 1)
        longest = None if longest is None else _check_integer("longest", longest, 1)
        if capacity is not None and capacity < len(bounds) - 1:
            raise ValueError(
                f"Span.packed: {len(bounds) - 1} documents in cu_seqlens, and capacity = {capacity}; "
                "use a larger capacity, or pack fewer documents"
            )
        span = cls("packed", bounds, capacity=capacity, max_document_length=longest)
        if longest is not None and longest < span.longest_document:
            raise ValueError(
                f"Span.packed: a document has {span.longest_document} tokens, more than longest = {longest}; "
                "set longest to an upper bound of all document lengths"
            )
        return span

    @property
    def n_queries(self) -> int:
        """Number of rows of q, gates, outputs and blocks."""
        return self.bounds[-1]

    @property
    def n_keys(self) -> int:
        """Number of rows of keys and values."""
        return self.start + self.bounds[-1]

    @property
    def documents(self) -> tuple[QueryRange, ...]:
        """All documents in order, including empty ones."""
        return self.get_or_build("documents", Span._build_documents)

    def _build_documents(self) -> tuple[QueryRange, ...]:
        return tuple(
            QueryRange(self.start, self.start + end - begin, slice(begin, end), slice(begin, end + self.start))
            for begin, end in pairwise(self.bounds)
        )

    @property
    def longest_document(self) -> int:
        """Number of keys of the longest document."""
        return self.get_or_build("longest", lambda span: max(document.end for document in span.documents))

    @property
    def longest_allocated(self) -> int:
        """Document length that kernels are launched for. With a capacity and without `longest`, it is the entire row."""
        if self.max_document_length is not None:
            return min(self.max_document_length, self.n_queries)
        return self.longest_document if self.capacity is None else self.n_queries

    @property
    def is_full(self) -> bool:
        """True if the layout is equivalent to `Span.full`, with the same shapes."""
        return self.capacity is None and 0 < self.n_queries == self.longest_document

    def selection_bounds(self, nsa: NSAConfig) -> tuple[int, ...]:
        """Return the first selection block of each document, then the total; blocks of all documents concatenated."""
        return tuple(accumulate((geometry.num_selection(document.end, nsa) for document in self.documents), initial=0))

    def num_selection_allocated(self, nsa: NSAConfig) -> int:
        """Return the number of selection blocks of all documents; with a capacity, the maximum for any documents."""
        # Each document has at most one incomplete block.
        return self.selection_bounds(nsa)[-1] if self.capacity is None else self.n_queries // nsa.l_sel + self.capacity

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return the position of every query in its document, int64 [queries]."""
        if self.kind != "packed":
            return self.documents[0].positions(device)
        return _compute_document_positions(self, device or torch.get_default_device())

    def query_document_ids(self, device: torch.device | None = None) -> Tensor:
        """Return the document of every query, int64 [queries]."""
        return geometry.positions(0, len(self.documents)).repeat_interleave(self._compute_lengths()).to(device)

    def compressed_bounds(self, nsa: NSAConfig) -> tuple[int, ...]:
        """Return the first compressed row of each document, then the end of the last; later rows are padding (eq. 7)."""

        def build_bounds(span: Span) -> tuple[int, ...]:
            counts = (geometry.num_compressed(document.end, nsa) for document in span.documents)
            return tuple(accumulate(counts, initial=0))

        return self.get_or_build(("compressed_bounds", nsa.l, nsa.d), build_bounds)

    def compressed_rows(self, nsa: NSAConfig) -> tuple[slice, ...]:
        """Return the rows of compressed keys and values of every document."""
        return tuple(slice(begin, end) for begin, end in pairwise(self.compressed_bounds(nsa)))

    def num_compressed(self, nsa: NSAConfig) -> int:
        """Return the number of rows of compressed keys and values, including the padding of a `capacity`."""
        # d divides l, so a document of L tokens has at most L // d blocks, and all documents have at most total // d.
        return self.n_queries // nsa.d if self.capacity is not None else self.compressed_bounds(nsa)[-1]

    def num_padding(self, nsa: NSAConfig) -> int:
        """Return the number of padding rows at the end of compressed keys and values."""
        return self.num_compressed(nsa) - self.compressed_bounds(nsa)[-1]

    def num_selection(self, nsa: NSAConfig) -> int:
        """Return the number of selection blocks of the longest document; block indices are local to each document."""
        return geometry.num_selection(self.longest_document, nsa)

    def layout(self, nsa: NSAConfig, device: torch.device) -> Layout:
        """Return the layout as tensors. For packed documents it is built once per device, l, d and l_sel."""
        if self.kind != "packed":
            # Everything follows from the shapes. It is built on the device, without a copy, as CUDA graphs need.
            return _build_layout(self, nsa, device)
        key = ("layout", device, nsa.l, nsa.d, nsa.l_sel)
        return self.get_or_build(key, lambda span: _build_layout(span, nsa, device))

    def get_or_build(self, key: Hashable, build: Callable[[Span], Cached]) -> Cached:
        """Return `build(self)`, called once for each `key`. The key includes the device if the value is on one.

        `build` must take all information on documents from its argument: `replace_documents` calls it with another layout.
        """
        if key not in self._cache:
            # Inference tensors cannot take part in a backward pass, and the layout may be used for training later.
            with torch.inference_mode(False):
                self._cache[key] = build, build(self)
        return self._cache[key][1]

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """Everything that shapes and launches depend on. Layouts with equal keys and a capacity can share a CUDA graph."""
        return self.kind, self.n_queries, self.capacity, self.max_document_length

    def replace_documents(self, other: Span) -> None:
        """Overwrite every cached tensor in place with its value for `other`.

        A captured CUDA graph reads the new values at its next replay. The tensors are built for `other` and copied on the
        current stream; the host does not wait. Values on the CPU (`bounds`, `documents`, `longest_document` and values
        derived from them) still describe the original documents, and so do tensors that are cached after this call.

        Raise ValueError before anything is copied unless both are packed layouts with the same number of tokens, capacity
        and `longest`, and if a cached tensor has another shape for `other`.
        """
        if self.capacity is None or self.graph_key != other.graph_key:
            raise ValueError(
                f"Span.replace_documents: {self} cannot hold the documents of {other}: both need the same number of "
                "tokens, capacity and longest; give Span.packed the same capacity= and longest= for both"
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, (build, cached) in self._cache.items():
            own_tensors, other_tensors = (
                list(_iterate_tensors(cached)),
                list(_iterate_tensors(other.get_or_build(key, build))),
            )
            own_shapes, other_shapes = ([tuple(t.shape) for t in tensors] for tensors in (own_tensors, other_tensors))
            if own_shapes != other_shapes:
                raise ValueError(
                    f"Span.replace_documents: the value cached as {key!r} has shapes {own_shapes} for {self}, but "
                    f"{other_shapes} for {other}; its shapes must follow from the capacity, not from the documents"
                )
            pairs += zip(own_tensors, other_tensors, strict=True)
        for tensor, value in pairs:
            tensor.copy_(value, non_blocking=True)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Return `bounds` as int32 [documents + 1] on `device`, copied once.

        With a capacity, [capacity + 1]: empty documents are appended.
        """
        return self.get_or_build(("cu_seqlens", device), lambda span: _copy_bounds(span, [span.bounds], 1, device)[0])

    def _compute_lengths(self) -> Tensor:
        return torch.tensor(self.bounds).diff()

    def __repr__(self) -> str:
        if self.kind == "full":
            return f"Span.full({self.n_queries})"
        if self.kind == "chunk":
            return f"Span.chunk({self.start}, {self.n_queries})"
        options = {"capacity": self.capacity, "longest": self.max_document_length}
        suffix = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
        return f"Span.packed({len(self.bounds) - 1} documents, {self.n_queries} tokens{suffix})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cache, which may hold tensors of a device that another process does not have.
        return Span, self._get_fields()


@disable_compile
def _compute_document_positions(span: Span, device: torch.device) -> Tensor:
    bounds = span.cu_seqlens(device)
    return geometry.positions(0, span.n_queries, device) - bounds[find_documents(span.n_queries, bounds)]


def _build_layout(span: Span, nsa: NSAConfig, device: torch.device) -> Layout:
    is_packed = span.kind == "packed"
    key_bounds = tuple(accumulate((document.end for document in span.documents), initial=0))
    bounds = _copy_bounds(span, [key_bounds, span.compressed_bounds(nsa), span.selection_bounds(nsa)], 4, device)
    keys, compressed, selection = bounds
    return Layout(
        bounds,
        _build_document_starts(span, device) if is_packed else None,
        *(_build_gather_indices(span, nsa, keys, compressed, device) if is_packed else (None, None, None, None)),
        block_aligned_keys=map_rows(span.num_selection_allocated(nsa) * nsa.l_sel, selection * nsa.l_sel, keys),
        block_aligned_starts=map_rows(span.num_compressed(nsa) * nsa.d, compressed * nsa.d, selection * nsa.l_sel)[
            :: nsa.d
        ],
        start=span.start,
        n_keys=span.n_keys,
        n_compressed=span.num_compressed(nsa),
        longest=span.longest_allocated,
        max_seqlen=min(1 << (span.longest_allocated - 1).bit_length(), span.n_keys),
        capacity=span.capacity,
    )


def _build_document_starts(span: Span, device: torch.device) -> Tensor:
    """Return whether each query is the first token of its document, bool [queries]; one tensor for all layouts."""
    return span.get_or_build(("document_starts", device), lambda span: span.positions(device) == 0)


def _build_gather_indices(
    span: Span, nsa: NSAConfig, tokens: Tensor, blocks: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `token_indices`, `token_inverse`, `block_indices` and `block_inverse` of a `Layout`."""
    # A document of L >= l tokens has L // d whole strides, and all of them lie in its blocks, since d divides l.
    strides = tuple(accumulate((document.end // nsa.d for document in span.documents), initial=0))
    n_strides = strides[-1] if span.capacity is None else span.n_queries // nsa.d
    (text,) = _copy_bounds(span, [strides], 4, device)
    return (
        map_rows((n_strides + nsa.l // nsa.d) * nsa.d, text * nsa.d, tokens),
        map_rows(span.n_queries, tokens, text * nsa.d),
        map_rows(span.num_compressed(nsa), blocks, text),
        map_rows(n_strides + 1, text, blocks),
    )


def _copy_bounds(span: Span, bounds: list[tuple[int, ...]], multiple: int, device: torch.device) -> Tensor:
    """Return the bounds of several layouts of the span's documents as int32 [len(bounds), documents + 1] on `device`.

    Bounds of packed documents are copied without waiting for the device. Empty documents are appended up to the capacity,
    and to make the length of each row a multiple of `multiple`. A CUDA graph must not capture this copy: a replay would
    read host memory that has been freed. For one document the bounds are computed on the device.
    """
    if span.kind != "packed":
        return torch.stack([geometry.positions(0, 2, device) * end for _, end in bounds]).int()
    n_documents = len(span.bounds) - 1 if span.capacity is None else span.capacity
    length = -(-(n_documents + 1) // multiple) * multiple
    rows = [row + row[-1:] * (length - len(row)) for row in bounds]
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)


def _iterate_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a cached value: a tensor, or nested tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in cast("tuple[object, ...]", value):
            yield from _iterate_tensors(part)


def _check_integer(name: str, value: int, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"Span: {name} = {value!r}: expected an integer of at least {minimum}") from None
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"Span: {name} = {value}: expected an integer of at least {minimum}")
    return number


def _check_cu_seqlens(cu_seqlens: Tensor) -> tuple[int, ...]:
    expected = "Span.packed: cu_seqlens: expected a non-decreasing int32 tensor [documents + 1] on the CPU that starts at 0"
    if not torch.is_tensor(cu_seqlens):
        raise ValueError(f"{expected}, got a {type(cu_seqlens).__name__}; use torch.tensor(..., dtype=torch.int32)")
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"{expected}, got one on {cu_seqlens.device}; keep it on the CPU, the span copies it once per device"
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"{expected}, got {cu_seqlens.dtype}; use cu_seqlens.int()")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"{expected}, got shape {tuple(cu_seqlens.shape)}; one document of T tokens is [0, T]")
    bounds = tuple(cast("list[int]", cu_seqlens.tolist()))  # pyright: ignore[reportUnknownMemberType]
    if bounds[0] != 0:
        raise ValueError(f"{expected}, and it starts at {bounds[0]}; prepend a 0, or subtract the first value")
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"{expected}, and document {number} goes from {begin} to {end}; pass cumulative lengths")
    return bounds
