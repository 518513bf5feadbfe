"""Dense causal attention: the baseline for NSA, and the attention of `model.attention: dense`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa_lab.attention import input_checks
from nsa_lab.attention.compile_utils import check_no_transform, disable_compile, is_forward_mode
from nsa_lab.attention.flash import MAX_HEAD_WIDTH, flash_dense_attention
from nsa_lab.attention.layout import Layout, Span

# Documents of at least this many tokens get their own SDPA call if `_prefers_sdpa`.
LONG_DOCUMENT = 8192
# Long documents are padded to a multiple of this: cuDNN builds a plan for each new length.
LONG_DOCUMENT_MULTIPLE = 1024


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "torch",
    span: Span | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Return causal attention of q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv]: [B, T, H, Dv].

    `backend`: "torch" or "flash" (flash-attn). "torch" uses scaled_dot_product_attention. Packed documents use PyTorch's
    variable-length kernel if it is available (half precision on CUDA), and otherwise one SDPA call per document. On Hopper,
    documents of at least `LONG_DOCUMENT` tokens also get their own SDPA call.

    With `Span.chunk`, q and the output have its `length` rows, and k and v cover positions 0 .. start+length-1. With
    `Span.packed`, B is 1 and each document is attended separately. `layout`: the layout of a packed span; with it, traced
    code does not read the span, and inputs are not checked.

    All finite inputs are causal. A NaN or an infinity can affect earlier queries of its document, because the kernels
    multiply tiles of values with the probabilities of several queries (zero times NaN is NaN).

    Transforms of `torch.func` and forward-mode differentiation are supported by "torch". Memory is then quadratic in T in
    forward mode.

    Raise ValueError for inconsistent inputs, NotImplementedError for head widths that flash-attn does not support and for
    these transforms of it.
    """
    if layout is not None:
        if backend == "torch" and layout.varlen_attn is not None and supports_varlen(q, v) and not is_forward_mode(q, k, v):
            return _call_varlen(q, k, v, layout.bounds[0], layout.max_seqlen, layout.varlen_attn)
        return _dense_attention_uncompiled(q, k, v, backend=backend, span=span)
    input_checks.check_raw(q, k, v, span)
    span = None if span is None or span.is_full else span
    if backend == "flash":
        check_no_transform([backend], q, k, v, supported="torch")
        return flash_dense_attention(q, k, v, span=span)
    if span is None:
        return _attend_sdpa(q, k, v)
    if span.kind == "chunk":
        return _attend_end(q, k, v)
    varlen_attn = None if is_forward_mode(q, k, v) else _get_varlen_attn(q, v)
    if varlen_attn is None:
        lengths = [document.end for document in span.documents if document.end]
        split = zip(*(torch.split(x, lengths, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([_attend_sdpa(*part) for part in split], dim=1)
    if span.longest_document < LONG_DOCUMENT or not _prefers_sdpa(q.device):
        return _attend_varlen(q, k, v, span, varlen_attn)
    parts: list[Tensor] = []
    for rows, short_span in _split_at_long_documents(span):
        part = q[:, rows], k[:, rows], v[:, rows]
        parts.append(_attend_padded(*part) if short_span is None else _attend_varlen(*part, short_span, varlen_attn))
    return torch.cat(parts, dim=1)


# Each batch has different documents. Traced, their bounds would be constants, and every batch would be compiled again.
_dense_attention_uncompiled = disable_compile(dense_attention)


@contextmanager
def force_single_call() -> Generator[None]:
    """Attend to packed documents in one call, whatever their lengths, as a CUDA graph for any documents must.

    The setting holds for the entire process, because autograd threads recompute checkpointed activations.
    """
    _single_call_contexts.append(None)
    try:
        yield
    finally:
        _single_call_contexts.pop()


_single_call_contexts: list[None] = []


def _prefers_sdpa(device: torch.device) -> bool:
    """Return whether long documents should get their own SDPA call instead of a shared varlen call."""
    return not _single_call_contexts and not torch.cuda.is_current_stream_capturing() and _uses_cudnn_sdpa(device)


def _uses_cudnn_sdpa(device: torch.device) -> bool:
    """Return whether SDPA uses cuDNN for a single causal sequence, as it does from Hopper on."""
    is_enabled = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()
    return is_enabled and torch.cuda.get_device_capability(device) >= (9, 0)


def _split_at_long_documents(span: Span) -> Iterator[tuple[slice, Span | None]]:
    """Yield (rows, None) for each long document, and (rows, layout) for each run of shorter documents between them."""
    documents = [document for document in span.documents if document.end]
    for is_long, run in groupby(documents, key=lambda document: document.end >= LONG_DOCUMENT):
        run_documents = list(run)
        if is_long:
            yield from ((document.query_rows, None) for document in run_documents)
        else:
            bounds = torch.tensor([0, *(document.end for document in run_documents)], dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            )
            yield slice(run_documents[0].query_rows.start, run_documents[-1].query_rows.stop), Span.packed(bounds)


def find_single_call(span: Span, device: torch.device) -> Callable[..., Tensor] | None:
    """Return the varlen attention that computes all packed documents of `span` in one call: `Layout.varlen_attn`.

    Return None if `dense_attention` would use several calls, if PyTorch has no varlen attention, or if `span` has no
    capacity: torch.compile would then trace a graph for every number of documents.
    """
    varlen_attn = _load_varlen_attn() if device.type == "cuda" and span.capacity is not None else None
    if span.longest_document >= LONG_DOCUMENT and varlen_attn is not None and _prefers_sdpa(device):
        return None
    return varlen_attn


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, span: Span, varlen_attn: Callable[..., Tensor]) -> Tensor:
    return _call_varlen(q, k, v, span.cu_seqlens(q.device), span.longest_allocated, varlen_attn)


def _call_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, varlen_attn: Callable[..., Tensor]
) -> Tensor:
    """Return `dense_attention` of packed documents in half precision, in one call; q, k, v as there, with B = 1."""
    # window_size: no keys to the right of the query, all keys to its left.
    return varlen_attn(q[0], k[0], v[0], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0))[None]


def supports_varlen(q: Tensor, v: Tensor) -> bool:
    """Return whether PyTorch's variable-length attention supports the dtype, device and head widths of q and v."""
    is_half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    return is_half and q.shape[3] == v.shape[3] <= MAX_HEAD_WIDTH


def _attend_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of one document, padded at the end to a multiple of `LONG_DOCUMENT_MULTIPLE`."""
    n_padding = -q.shape[1] % LONG_DOCUMENT_MULTIPLE
    return _attend_sdpa(*(pad(x, (0, 0, 0, 0, 0, n_padding)) for x in (q, k, v)))[:, : q.shape[1]]


def _get_varlen_attn(q: Tensor, v: Tensor) -> Callable[..., Tensor] | None:
    """Return PyTorch's variable-length attention if it exists and supports q and v; otherwise None."""
    return _load_varlen_attn() if supports_varlen(q, v) else None


@functools.cache
def _load_varlen_attn() -> Callable[..., Tensor] | None:
    """Return `torch.nn.attention.varlen.varlen_attn` with grouped heads, if this PyTorch has it with windows; else None."""
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        return None
    return (
        functools.partial(varlen_attn, enable_gqa=True)
        if "enable_gqa" in parameters
        else functools.partial(_call_with_repeated_heads, varlen_attn)
    )


def _call_with_repeated_heads(
    varlen_attn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor | int, **kwargs: Any
) -> Tensor:
    """Call a `varlen_attn` without grouped-query support (torch 2.11) with repeated keys and values."""
    repeats = q.shape[1] // k.shape[1]
    return varlen_attn(q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), *bounds, **kwargs)


def _attend_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of queries [B, T, H, D] that are the last T of the S positions of k and v.

    On CUDA, memory is linear in S: PyTorch's kernels can align a causal mask with the ends of queries and keys. On a CPU,
    PyTorch allocates the mask [T, S].
    """
    if is_forward_mode(q, k, v):
        n_queries, n_keys = q.shape[1], k.shape[1]
        return _attend_sdpa(
            q, k, v, torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - n_queries)
        )
    # Takes a second to import.
    from torch.nn.attention import bias

    mask = cast(Tensor, bias.causal_lower_right(q.shape[1], k.shape[1]))  # pyright: ignore[reportUnknownMemberType]
    return _attend_sdpa(q, k, v, mask)


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention over the keys where `mask` [T, S] is True; None: causal.

    On CUDA, memory is linear in S. The flash kernel (half precision) has grouped heads. The memory-efficient kernel has
    not, and with grouped heads PyTorch would store the scores [B, H, T, S].
    """
    if q.is_cuda and not supports_varlen(q, v):
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    with _use_differentiable_kernel() if is_forward_mode(q, k, v) else nullcontext():
        out = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)


def _use_differentiable_kernel() -> AbstractContextManager[object]:
    """Select the kernel of SDPA that has derivatives in forward mode; its memory is quadratic in T."""
    # Takes a second to import.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return cast("AbstractContextManager[object]", sdpa_kernel(SDPBackend.MATH))
