"""The public functions of NSA attention, and which implementation each of them runs on.

A backend is a choice per part: `resolve_backend` makes it once and says why. Asked for by name, a backend runs or raises;
`auto` takes the best one usable. Nothing falls back silently, and no environment variable is read. Inputs are checked
here, once (`checks`); what runs below may rely on it.

`span` says where queries stand (`Span`; None: they are all the keys of one document). With `Span.chunk`, q, gates, outputs,
LSE and blocks have its `length` rows, and keys, values and compressed keys cover positions 0 .. start+length-1. With
`Span.packed`, B is 1, T the total, compressed rows of all documents lie one after another (padded to total // d if the span
has a capacity), and block numbers are each document's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_lab.attention import flash, input_checks, kernels, reference, torch_backend
from nsa_lab.attention.layout import Span
from nsa_lab.config import ModelConfig, NSAConfig, UsageError

PARTS = ("compressed", "selection", "selected", "window", "combine")
BACKENDS = ("auto", "reference", "torch", "triton", "flash")


class BackendError(UsageError, RuntimeError):
    """A backend asked for by name cannot run here. The message says why and what to do."""


@dataclass(frozen=True)
class ResolvedBackend:
    """The implementation of one part, and why it was taken."""

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
) -> dict[str, ResolvedBackend]:
    """Which backend each part runs on: compressed, selection, selected, window, combine (dense for a dense model).

    `model` gives the head widths, which bound what the kernels take; `span` what the choice is to serve beside full spans.
    Raises ValueError for an unknown name, BackendError for a backend that cannot run on `device` at `dtype`,
    NotImplementedError for a shape that it does not take.
    """
    device = torch.device(device)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "flash" and model is not None:
        flash.check_widths(model.d_k, model.d_v)
    if model is not None and model.attention == "dense":
        return {"dense": _resolve_dense(device, dtype, backend)}
    if backend == "auto" and span is not None and span.kind == "chunk" and not span.is_full:
        return dict.fromkeys(PARTS, ResolvedBackend("torch", f"the one fast backend that has gradients of {span}"))
    if backend in ("reference", "torch"):
        return dict.fromkeys(PARTS, ResolvedBackend(backend, "asked for by name"))
    unusable = kernels.find_device_problem(device, dtype)
    # Without a model the widths are not known yet; the kernels judge them when they are called.
    widths = () if model is None else (model.d_k, model.d_v, model.index_width if model.has_indexer else None)
    unsupported = kernels.find_shape_problem(nsa, *widths)
    if backend == "triton":
        if unusable:
            raise BackendError(f"backend = 'triton' cannot run: {unusable}")
        if unsupported:
            raise NotImplementedError(f"backend = 'triton' does not take this shape: {unsupported}")
        return dict.fromkeys(PARTS, ResolvedBackend("triton", "asked for by name"))
    if backend == "flash":
        reason = flash.get_flash_problem(device, dtype)
        if reason:
            raise BackendError(f"backend = 'flash' cannot run: {reason}")
        rest = resolve_backend(device, dtype, nsa, model, "auto", span=span)
        return {**rest, "window": ResolvedBackend("flash", "asked for by name; flash-attn has the window branch only")}
    # The interpreter proves kernel logic; it is never the best way to compute.
    why_not_triton = unusable or unsupported
    if why_not_triton is None and device.type == "cuda":
        return dict.fromkeys(PARTS, ResolvedBackend("triton", f"CUDA device {torch.cuda.get_device_name(device)}"))
    return dict.fromkeys(PARTS, ResolvedBackend("torch", why_not_triton or f"the device is {device.type}, not cuda"))


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed blocks (eq. 7, 8): q [B, T, H, D], k_cmp [B, N, G, D], v_cmp [B, N, G, Dv]

    -> out [B, T, H, Dv], lse float32 [B, T, H] (float64 for float64 inputs). A query that sees no block gets 0 and -inf.
    Raises ValueError for inputs that do not belong together, NotImplementedError for a span that the backend does not take.
    """
    input_checks.check_compressed(q, k_cmp, v_cmp, nsa, span)
    run = _get_implementation("compressed", q, nsa, backend, span)
    return run.compressed_attention(q, k_cmp, v_cmp, nsa, **_get_span_kwargs(span))


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> Tensor:
    """The blocks each query and group reads (eq. 9 to 11): q [B, T, H, D], k_cmp [B, N, G, D], lse [B, T, H]

    -> int32 [B, T, G, n_sel], distinct, ascending, padded with -1. No gradient. Raises as `compressed_attention`.
    """
    input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    input_checks.check_lse(q, lse)
    run = _get_implementation("selection", q, nsa, backend, span)
    return run.select_blocks(q, k_cmp, lse, nsa, **_get_span_kwargs(span))


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens <= t of the chosen blocks (eq. 12): q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv],

    blocks int32 [B, T, G, n_sel] as `select_blocks` gives them, or in any order, each once in a row -> out [B, T, H, Dv],
    lse float32 [B, T, H]. Raises as `compressed_attention`.
    """
    input_checks.check_raw(q, k, v, span)
    input_checks.check_blocks(q, k, blocks, nsa, span)
    run = _get_implementation("selected", q, nsa, backend, span)
    return run.selected_attention(q, k, v, blocks, nsa, **_get_span_kwargs(span))


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, backend: str = "auto", span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the w latest tokens, t included: q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv]

    -> out [B, T, H, Dv], lse float32 [B, T, H]. Raises as `compressed_attention`.
    """
    input_checks.check_raw(q, k, v, span)
    run = _get_implementation("window", q, nsa, backend, span)
    return run.window_attention(q, k, v, nsa, **_get_span_kwargs(span))


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    nsa: NSAConfig,
    *,
    blocks: Tensor | None = None,
    backend: str | Mapping[str, ResolvedBackend] = "auto",
    span: Span | None = None,
) -> Tensor:
    """The whole of NSA after projection, compression and gating (eq. 5) -> [B, T, H, Dv].

    q [B, T, H, D]; k_cmp, v_cmp [B, N, G, .]; k_sel, v_sel, k_win, v_win [B, T, G, .]; gates [B, T, H, 3] in the order
    cmp, sel, win. All branches have one G and one Dv, and all tensors one dtype. `blocks`, int32 [B, T, G, n_sel] as
    `select_blocks` gives them, are read by the selected branch; None: those of eq. 9 to 11, by the compressed branch's own
    scores. `backend` is a name, or what `resolve_backend` gave. Raises as the four functions above, and TypeError for a
    geometry that is none. `torch.func` (vmap, grad, jvp) goes through `reference` alone; torch refuses it of the others.
    """
    input_checks.check_compressed(q, k_cmp, v_cmp, nsa, span)
    input_checks.check_raw(q, k_sel, v_sel, span, "_sel")
    input_checks.check_raw(q, k_win, v_win, span, "_win")
    input_checks.check_branches((k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win))
    input_checks.check_gates(q, gates)
    if blocks is not None:
        input_checks.check_blocks(q, k_sel, blocks, nsa, span)
    run, where = _get_modules(backend, q, nsa, span), _get_span_kwargs(span)
    if all(module is kernels for module in run.values()):
        return kernels.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, blocks=blocks, **where)
    out_cmp, lse = run["compressed"].compressed_attention(q, k_cmp, v_cmp, nsa, **where)
    if blocks is None:
        blocks = run["selection"].select_blocks(q, k_cmp, lse, nsa, **where)
    out_sel, _ = run["selected"].selected_attention(q, k_sel, v_sel, blocks, nsa, **where)
    out_win, _ = run["window"].window_attention(q, k_win, v_win, nsa, **where)
    return run["combine"].combine(out_cmp, out_sel, out_win, gates)


@torch.no_grad()
def score_and_select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    nsa: NSAConfig,
    *,
    backend: str | Mapping[str, ResolvedBackend] = "auto",
    span: Span | None = None,
) -> Tensor:
    """`select_blocks` for scores whose LSE is not known yet: q [B, T, H, D], k_cmp [B, N, G, D] -> int32 [B, T, G, n_sel].

    For queries and compressed keys that serve the choice alone (an indexer, arXiv 2512.02556); D is any width, H any
    multiple of G. No gradient. Raises as `compressed_attention`.
    """
    input_checks.check_compressed(q, k_cmp, k_cmp, nsa, span)
    judged = nsa
    # A choice of backends is not judged again; a copy of the configuration would break what is traced in two.
    if isinstance(backend, str) and q.shape[2] == k_cmp.shape[2] and nsa.l == nsa.d:
        # The kernels' limit on strides per selection block is not one for a single head with blocks side by side.
        judged = nsa.model_copy(update={"l": nsa.l_sel, "d": nsa.l_sel})
    run = _get_modules(backend, q, judged, span)["selection"]
    return run.select_blocks(q, k_cmp, None, nsa, **_get_span_kwargs(span))


def _get_modules(
    backend: str | Mapping[str, ResolvedBackend], q: Tensor, nsa: NSAConfig, span: Span | None
) -> dict[str, Any]:
    """What computes each part."""
    named = isinstance(backend, str)
    choices = resolve_backend(q.device, q.dtype, nsa, backend=backend, span=span) if named else backend
    return {part: _MODULES[choices[part].backend] for part in PARTS}


class _FlashBackend:
    """flash-attn as a backend of one part."""

    window_attention = staticmethod(flash.flash_window_attention)


# A module, or a class, with a function per part that it has.
_MODULES: Mapping[str, Any] = {
    "reference": reference,
    "torch": torch_backend,
    "triton": kernels,
    "flash": _FlashBackend,
}


def _get_implementation(part: str, q: Tensor, nsa: NSAConfig, backend: str, span: Span | None) -> Any:
    if backend == "flash" and part != "window":
        raise NotImplementedError(
            f"backend = 'flash' has the window branch and dense attention only, not {part}; use auto, triton or torch"
        )
    return _MODULES[resolve_backend(q.device, q.dtype, nsa, backend=backend, span=span)[part].backend]


def _get_span_kwargs(span: Span | None) -> dict[str, Span]:
    """A full span, however it was written, is what every backend computes without one."""
    return {} if span is None or span.is_full else {"span": span}


def _resolve_dense(device: torch.device, dtype: torch.dtype, backend: str) -> ResolvedBackend:
    if backend == "triton":
        raise NotImplementedError("backend = 'triton' has no dense attention; use auto, torch or flash")
    if backend == "flash":
        reason = flash.get_flash_problem(device, dtype)
        if reason:
            raise BackendError(f"backend = 'flash' cannot run: {reason}")
        return ResolvedBackend("flash", "asked for by name")
    return ResolvedBackend("torch", "scaled_dot_product_attention picks the best kernel of the device")
