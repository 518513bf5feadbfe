"""Dense causal attention: the baseline that NSA is compared with, and the mixing of `model.attention: dense`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa_lab.attention import geometry, input_checks
from nsa_lab.attention.flash import MAX_HEAD_WIDTH, flash_dense_attention
from nsa_lab.attention.layout import Span

# A document of so many tokens is attended by itself where `_one_text_is_faster`.
LONG_DOCUMENT = 8192
# Such a document is laid out to a multiple of so many: for every length that it has not seen, cuDNN makes a plan first.
LONG_DOCUMENT_MULTIPLE = 1024


class VarlenInputs(NamedTuple):
    """What attends packed documents in one call: traced, it is the same whatever documents they are."""

    cu_seqlens: Tensor
    """int32 [documents + 1], on the device: where each begins, and where the last ends."""
    max_seqlen: int
    """Tokens that no document exceeds."""
    varlen_attn: Callable[..., Tensor]
    """torch's attention over variable lengths."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str = "torch", span: Span | None = None) -> Tensor:
    """q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv] -> [B, T, H, Dv].

    `torch` is what torch itself has for the device: scaled_dot_product_attention, and for packed documents its kernel for
    variable lengths (half precision on CUDA, where this torch has one), or each document by itself, as on Hopper those of
    `LONG` tokens and more; `flash` is flash-attn.
    They share tiles of values between queries: causality holds for every finite value, and a NaN or an infinity can reach
    earlier queries of its document (zero times NaN is NaN).

    With `Span.chunk`, q and the result have its `length` rows, k and v positions 0 .. start+length-1; with `Span.packed`, B
    is 1 and every document is attended alone. Raises ValueError for inputs that do not belong together, NotImplementedError
    for head widths that flash-attn does not take.
    """
    input_checks.check_raw(q, k, v, span)
    span = None if span is None or span.is_full else span
    if backend == "flash":
        return flash_dense_attention(q, k, v, span=span)
    if span is None:
        return _attend_sdpa(q, k, v)
    if span.kind == "chunk":
        t, s = span.positions(q.device), geometry.positions(0, span.n_keys, q.device)
        return _attend_sdpa(q, k, v, mask=s <= t[:, None])
    varlen = _get_varlen_attn(q, v)
    if varlen is None:
        lengths = [document.end for document in span.documents if document.end]
        parts = zip(*(torch.split(x, lengths, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([_attend_sdpa(*part) for part in parts], dim=1)
    if span.longest_document < LONG_DOCUMENT or not _prefers_sdpa(q.device):
        return _attend_varlen(q, k, v, span, varlen)
    parts = [
        _attend_padded(q[:, rows], k[:, rows], v[:, rows])
        if between is None
        else _attend_varlen(q[:, rows], k[:, rows], v[:, rows], between, varlen)
        for rows, between in _split_at_long_documents(span)
    ]
    return torch.cat(parts, dim=1)


@contextmanager
def force_single_call() -> Generator[None]:
    """Within it documents are attended in one call, however long: what a CUDA graph computes for any documents.

    For the whole process, since autograd's own threads recompute what a checkpoint left out.
    """
    _single_call_contexts.append(None)
    try:
        yield
    finally:
        _single_call_contexts.pop()


_single_call_contexts: list[None] = []


def _prefers_sdpa(device: torch.device) -> bool:
    """Whether SDPA has a faster kernel for one text than `varlen_attn` for documents, whose lengths will stay."""
    return not _single_call_contexts and not torch.cuda.is_current_stream_capturing() and _uses_cudnn_sdpa(device)


def _uses_cudnn_sdpa(device: torch.device) -> bool:
    """Whether SDPA's kernel for one text is cuDNN's: on Hopper and later."""
    has = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()
    return has and torch.cuda.get_device_capability(device) >= (9, 0)


def _split_at_long_documents(span: Span) -> Iterator[tuple[slice, Span | None]]:
    """The rows of every long document, with None, and of the documents between two of these, with their span."""
    documents = [document for document in span.documents if document.end]
    for long, run in groupby(documents, key=lambda document: document.end >= LONG_DOCUMENT):
        own = list(run)
        if long:
            yield from ((document.query_rows, None) for document in own)
        else:
            bounds = torch.tensor([0, *(document.end for document in own)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            yield slice(own[0].query_rows.start, own[-1].query_rows.stop), Span.packed(bounds)


def get_varlen_inputs(span: Span, device: torch.device) -> VarlenInputs | None:
    """Of packed documents; None where `dense_attention` takes more than one call for them, or torch has none to call, and
    without a capacity: traced, every number of documents would be another graph."""
    varlen = _load_varlen_attn() if device.type == "cuda" and span.capacity is not None else None
    if varlen is None or (span.longest_document >= LONG_DOCUMENT and _prefers_sdpa(device)):
        return None
    # A power of two, so that few lengths are compiled for.
    longest = min(1 << (span.longest_allocated - 1).bit_length(), span.n_queries)
    return VarlenInputs(span.cu_seqlens(device), longest, varlen)


def packed_dense_attention(q: Tensor, k: Tensor, v: Tensor, varlen_inputs: VarlenInputs) -> Tensor:
    """As `dense_attention` of those packed documents, in half precision; q, k, v as there, B being 1."""
    bounds, most, varlen = varlen_inputs
    # Nothing to the right of a query, everything to its left.
    return varlen(q[0], k[0], v[0], bounds, bounds, most, most, window_size=(-1, 0))[None]


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, span: Span, varlen_attn: Callable[..., Tensor]) -> Tensor:
    return packed_dense_attention(q, k, v, VarlenInputs(span.cu_seqlens(q.device), span.longest_allocated, varlen_attn))


def supports_varlen(q: Tensor, v: Tensor) -> bool:
    """Whether torch's attention over variable lengths takes tensors of this kind."""
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    return half and q.shape[3] == v.shape[3] <= MAX_HEAD_WIDTH


def _attend_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`_attend` of one document, with rows behind it that none of its queries sees."""
    room = -q.shape[1] % LONG_DOCUMENT_MULTIPLE
    return _attend_sdpa(*(pad(x, (0, 0, 0, 0, 0, room)) for x in (q, k, v)))[:, : q.shape[1]]


def _get_varlen_attn(q: Tensor, v: Tensor) -> Callable[..., Tensor] | None:
    """torch's attention over documents of any lengths, if there is one that takes these; None: one document at a time."""
    return _load_varlen_attn() if supports_varlen(q, v) else None


@functools.cache
def _load_varlen_attn() -> Callable[..., Tensor] | None:
    """`torch.nn.attention.varlen.varlen_attn`, if this torch has one with a window; it takes groups of heads."""
    try:
        found = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = inspect.signature(found).parameters
    if "window_size" not in known:
        return None
    return (
        functools.partial(found, enable_gqa=True)
        if "enable_gqa" in known
        else functools.partial(_call_with_repeated_heads, found)
    )


def _call_with_repeated_heads(
    varlen_attn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor | int, **how: Any
) -> Tensor:
    """`varlen` of a torch in which it has no groups of heads (2.11), over keys and values repeated for their heads."""
    repeats = q.shape[1] // k.shape[1]
    return varlen_attn(q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), *bounds, **how)


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Over the keys `seen` (bool [T, S]); None: those up to the query's own."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
