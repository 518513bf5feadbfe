"""Public functions of NSA attention, and the selection of their backend.

`resolve_backend` selects a backend for each part once and gives the reason. A backend that is requested by name runs or
raises; `auto` takes the fastest one that can run. There is no silent fallback and no environment variable. Inputs are
checked here, once (`input_checks`), and the backends rely on it.

`span` is the sequence layout (`Span`); None: one document whose tokens are all queries. With `Span.chunk`, q, gates,
outputs, LSE and blocks have its `length` rows, and keys, values and compressed keys cover positions 0 .. start+length-1.
With `Span.packed`, B is 1 and T is the total number of tokens. The compressed rows of the documents are concatenated, and
padded to total // d if the layout has a capacity. Block indices are local to each document.

Functions that a model's layers call also take the span's `layout` as tensors. With it, nothing reads the span in code that
torch.compile traces, so a traced graph serves all documents; inputs are not checked, and backends that loop over documents
on the host are excluded from the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nsa_lab.attention import flash, geometry, input_checks, kernels, reference, torch_backend
from nsa_lab.attention.compile_utils import check_no_transform, disable_compile
from nsa_lab.attention.compression import compress
from nsa_lab.attention.layout import Layout, Span
from nsa_lab.config import ModelConfig, NSAConfig, UsageError

PARTS = ("compressed", "selection", "selected", "window", "combine")
BACKENDS = ("auto", "reference", "torch", "triton", "flash")


class BackendError(UsageError, RuntimeError):
    """A backend that was requested by name cannot run here. The message gives the reason and the remedy."""


@dataclass(frozen=True)
class ResolvedBackend:
    """Backend of one part, and the reason for it."""

    backend: str
    reason: str


def resolve_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    nsa: NSAConfig,
    model: ModelConfig | None = None,
    backend: str = "auto",
    *,
    span: Span | None = None,
    scores: bool = True,
) -> dict[str, ResolvedBackend]:
    """Return the backend of each part: compressed, selection, selected, window, combine (only "dense" for a dense model).

    `model`: its head widths are checked against the limits of the kernels. `span`: a layout that the backend must support
    in addition to full sequences. `scores`: whether keys are scored to select blocks; kernels limit their geometry. Raise
    ValueError for an unknown name, BackendError if a backend cannot run on `device` in `dtype`, and NotImplementedError for
    shapes that it does not support.
    """
    device = torch.device(device)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "flash" and model is not None:
        flash.check_widths(model.d_k, model.d_v)
    if model is not None and model.attention == "dense":
        return {"dense": _resolve_dense(device, dtype, backend)}
    if backend in ("reference", "torch"):
        return dict.fromkeys(PARTS, ResolvedBackend(backend, "requested by name"))
    device_problem = kernels.find_device_problem(device, dtype)
    # Without `model`, head widths are unknown here; the kernels check them when they are called.
    widths = () if model is None else (model.d_k, model.d_v, model.index_width if model.has_indexer else None)
    shape_problem = kernels.find_shape_problem(nsa, *widths)
    if scores and (model is None or model.scores):  # without a selected branch, no keys are scored
        scoring_nsa = geometry.get_scoring_geometry(nsa) if model is None else model.selection_nsa
        shape_problem = shape_problem or kernels.find_scoring_problem(scoring_nsa)
    if backend == "triton":
        check_triton_runs(device, dtype)
        if shape_problem:
            raise NotImplementedError(f"backend = 'triton' does not support this shape: {shape_problem}")
        return dict.fromkeys(PARTS, ResolvedBackend("triton", "requested by name"))
    if backend == "flash":
        reason = flash.find_flash_problem(device, dtype)
        if reason:
            raise BackendError(f"backend = 'flash' cannot run: {reason}")
        rest = resolve_backend(device, dtype, nsa, model, "auto", span=span)
        return {**rest, "window": ResolvedBackend("flash", "requested by name; flash-attn has only the window branch")}
    # Under the interpreter the kernels run for tests only, so `auto` takes them only on a CUDA device.
    triton_problem = device_problem or shape_problem
    if triton_problem is None and device.type == "cuda":
        return dict.fromkeys(PARTS, ResolvedBackend("triton", f"CUDA device {torch.cuda.get_device_name(device)}"))
    return dict.fromkeys(PARTS, ResolvedBackend("torch", triton_problem or f"the device is {device.type}, not cuda"))


def check_triton_runs(device: torch.device, dtype: torch.dtype) -> None:
    """Raise BackendError if the kernels cannot run on `device` in `dtype`."""
    if problem := kernels.find_device_problem(device, dtype):
        raise BackendError(f"backend = 'triton' cannot run: {problem}")


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the visible compressed blocks (eq. 7, 8): out [B, T, H, Dv], lse [B, T, H].

    q [B, T, H, D], k_cmp [B, N, G, D], v_cmp [B, N, G, Dv]. The LSE is float32, or float64 for float64 inputs. A query
    that sees no block gets output 0 and LSE -inf. Raise ValueError for inconsistent inputs, NotImplementedError for a
    layout that the backend does not support.
    """
    input_checks.check_compressed(q, k_cmp, v_cmp, nsa, span)
    implementation = _get_implementation("compressed", (q, k_cmp, v_cmp), nsa, backend, span)
    return implementation.compressed_attention(q, k_cmp, v_cmp, nsa, **_get_span_kwargs(span))


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> Tensor:
    """Return the selected blocks of each query and group (eq. 9 to 11): int32 [B, T, G, n_sel].

    q [B, T, H, D], k_cmp [B, N, G, D], lse [B, T, H]. Indices are distinct and ascending, padded with -1 at the end. There
    is no gradient. Raise the errors of `compressed_attention`.
    """
    input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    input_checks.check_lse(q, lse)
    implementation = _get_implementation("selection", (q, k_cmp, lse), nsa, backend, span)
    return implementation.select_blocks(q, k_cmp, lse, nsa, **_get_span_kwargs(span))


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the tokens <= t of the selected blocks (eq. 12): out [B, T, H, Dv], lse [B, T, H].

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv]; blocks int32 [B, T, G, n_sel] from `select_blocks`, or in any order,
    with no block twice for one query. Raise the errors of `compressed_attention`.
    """
    input_checks.check_raw(q, k, v, span)
    input_checks.check_blocks(q, k, blocks, nsa, span)
    implementation = _get_implementation("selected", (q, k, v), nsa, backend, span)
    return implementation.selected_attention(q, k, v, blocks, nsa, **_get_span_kwargs(span))


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the w latest tokens, t included: out [B, T, H, Dv], lse [B, T, H].

    q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv]. Raise the errors of `compressed_attention`.
    """
    input_checks.check_raw(q, k, v, span)
    implementation = _get_implementation("window", (q, k, v), nsa, backend, span)
    return implementation.window_attention(q, k, v, nsa, **_get_span_kwargs(span))


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_sel: Tensor | None,
    v_sel: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor | None,
    nsa: NSAConfig,
    *,
    blocks: Tensor | None = None,
    backend: str | Mapping[str, ResolvedBackend] = "auto",
    span: Span | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Return the gated sum of the branches (eq. 5), [B, T, H, Dv].

    q [B, T, H, D]; k_cmp, v_cmp [B, N, G, .]; k_sel, v_sel, k_win, v_win [B, T, G, .]; None for keys and values of a branch
    that does not exist. gates [B, T, H, branches], one column per branch that exists, in the order cmp, sel, win; None for
    a single branch, whose output is returned. All branches have the same G and Dv, and all tensors the same dtype.

    `blocks`: int32 [B, T, G, n_sel] as returned by `select_blocks`; None: select by the scores of the compressed branch
    (eq. 9 to 11), or of the mean key of each block if `nsa.scores` is mean_key. `backend`: a name, or the result of
    `resolve_backend`. `layout`: the layout of a packed span for `nsa`.

    Raise the errors of the four functions above, ValueError if `nsa.scores` needs tensors that are not given, and TypeError
    if `nsa` is not an NSAConfig. Only `reference` supports `torch.func` (vmap, grad,
    jvp) and forward-mode differentiation.
    """
    tensors = q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates
    if layout is None:
        input_checks.check_branch_inputs(*tensors, nsa, span)
        if blocks is not None:
            input_checks.check_blocks(q, k_sel, blocks, nsa, span)
    modules, span_kwargs = (
        _get_modules(backend, tensors, nsa, span if layout is None else None),
        _get_span_kwargs(span, layout),
    )
    if layout is not None and any(module is not kernels for module in modules.values()):
        return _nsa_attention_uncompiled(*tensors, nsa, blocks=blocks, backend=backend, span=span)
    if k_sel is not None and blocks is None:
        input_checks.check_scores(k_cmp, nsa)
        scoring_nsa = geometry.get_scoring_geometry(nsa)
        if scoring_nsa is not nsa:
            keys = compress(k_sel.detach(), scoring_nsa, span=span)
            blocks = score_and_select_blocks(q, keys, scoring_nsa, backend=backend, span=span)
    if all(module is kernels for module in modules.values()):
        return kernels.nsa_attention(*tensors, nsa, blocks=blocks, **span_kwargs)
    outs: list[Tensor] = []
    # With `outs.append(f(...))`, a bound method would be on the stack where torch.compile leaves the graph in f. It is
    # another object in every call, so every call would compile again.
    if k_cmp is not None and v_cmp is not None:
        out, lse = modules["compressed"].compressed_attention(q, k_cmp, v_cmp, nsa, **span_kwargs)
        outs.append(out)
        if k_sel is not None and blocks is None:
            blocks = modules["selection"].select_blocks(q, k_cmp, lse, nsa, **span_kwargs)
    if k_sel is not None and v_sel is not None:
        out, _ = modules["selected"].selected_attention(q, k_sel, v_sel, blocks, nsa, **span_kwargs)
        outs.append(out)
    if k_win is not None and v_win is not None:
        out, _ = modules["window"].window_attention(q, k_win, v_win, nsa, **span_kwargs)
        outs.append(out)
    return outs[0] if gates is None else modules["combine"].combine(*outs, gates)


@torch.no_grad()
def score_and_select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    nsa: NSAConfig,
    *,
    backend: str | Mapping[str, ResolvedBackend] = "auto",
    span: Span | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Select blocks without a given LSE: q [B, T, H, D], k_cmp [B, N, G, D] -> int32 [B, T, G, n_sel].

    For queries and compressed keys that are used only for selection (an indexer, arXiv 2512.02556). D can be any width, H
    any multiple of G. `layout`: the layout of a packed span for `nsa`. There is no gradient. Raise the errors of
    `compressed_attention`.
    """
    if layout is None:
        input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    module = _get_modules(backend, (q, k_cmp), nsa, span if layout is None else None)["selection"]
    if layout is not None and module is not kernels:
        return _score_and_select_blocks_uncompiled(q, k_cmp, nsa, backend=backend, span=span)
    return module.select_blocks(q, k_cmp, None, nsa, **_get_span_kwargs(span, layout))


# Each batch has different documents. Traced, their bounds would be constants, and every batch would be compiled again.
_nsa_attention_uncompiled = disable_compile(nsa_attention)
_score_and_select_blocks_uncompiled = disable_compile(score_and_select_blocks)


def _get_modules(
    backend: str | Mapping[str, ResolvedBackend], tensors: tuple[Tensor | None, ...], nsa: NSAConfig, span: Span | None
) -> dict[str, Any]:
    """Return the module that computes each part. `tensors`: the inputs, q first."""
    q = cast(Tensor, tensors[0])
    is_name = isinstance(backend, str)
    resolved = resolve_backend(q.device, q.dtype, nsa, backend=backend, span=span) if is_name else backend
    check_no_transform((resolved[part].backend for part in PARTS), *tensors)
    return {part: _MODULES[resolved[part].backend] for part in PARTS}


class _FlashBackend:
    """flash-attn as a backend of the window branch only."""

    window_attention = staticmethod(flash.flash_window_attention)


# Each value is a module or class with one function per supported part.
_MODULES: Mapping[str, Any] = {
    "reference": reference,
    "torch": torch_backend,
    "triton": kernels,
    "flash": _FlashBackend,
}


def _get_implementation(part: str, tensors: tuple[Tensor, ...], nsa: NSAConfig, backend: str, span: Span | None) -> Any:
    """Return the module that computes `part`. `tensors`: the inputs, q first."""
    q = tensors[0]
    if backend == "flash" and part != "window":
        raise NotImplementedError(
            f"backend = 'flash' supports only the window branch and dense attention, not {part}; use auto, triton or torch"
        )
    backends = resolve_backend(q.device, q.dtype, nsa, backend=backend, span=span, scores=part == "selection")
    name = backends[part].backend
    check_no_transform([name], *tensors)
    return _MODULES[name]


def _get_span_kwargs(span: Span | None, layout: Layout | None = None) -> dict[str, Any]:
    """Return {"layout": layout} or {"span": span}; {} for a full span, which backends compute without one."""
    if layout is not None:
        return {"layout": layout}
    return {} if span is None or span.is_full else {"span": span}


def _resolve_dense(device: torch.device, dtype: torch.dtype, backend: str) -> ResolvedBackend:
    if backend == "triton":
        raise NotImplementedError("backend = 'triton' has no dense attention; use auto, torch or flash")
    if backend == "flash":
        reason = flash.find_flash_problem(device, dtype)
        if reason:
            raise BackendError(f"backend = 'flash' cannot run: {reason}")
        return ResolvedBackend("flash", "requested by name")
    return ResolvedBackend("torch", "scaled_dot_product_attention selects the kernel for the device")
