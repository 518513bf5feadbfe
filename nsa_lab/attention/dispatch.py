"""The public functions of NSA attention, and which implementation each of them runs on.

A backend is a choice per part: `resolve_backend` makes it once and says why. Asked for by name, a backend runs or raises;
`auto` takes the best one usable. Nothing falls back silently, and no environment variable is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from nsa_lab.attention import flash, geometry, kernels, reference, torch_backend
from nsa_lab.config import ModelConfig, NSAConfig

PARTS = ("compressed", "selection", "selected", "window", "combine")
BACKENDS = ("auto", "reference", "torch", "triton", "flash")


class BackendError(RuntimeError):
    """A backend asked for by name cannot run here. The message says why and what to do."""


@dataclass(frozen=True)
class Choice:
    """The implementation of one part, and why it was taken."""

    backend: str
    reason: str


def resolve_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    nsa: NSAConfig,
    model: ModelConfig | None = None,
    backend: str = "auto",
) -> dict[str, Choice]:
    """Which backend each part runs on: compressed, selection, selected, window, combine (dense for a dense model).

    `model` gives the head widths, which bound what the kernels take. Raises ValueError for an unknown name, BackendError
    for a backend that cannot run on `device` at `dtype`, NotImplementedError for a shape that it does not take.
    """
    device = torch.device(device)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: expected one of {', '.join(BACKENDS)}")
    if model is not None and model.attention == "dense":
        return {"dense": _resolve_dense(device, dtype, backend)}
    if backend in ("reference", "torch"):
        return dict.fromkeys(PARTS, Choice(backend, "asked for by name"))
    unusable = kernels.unusable(device, dtype)
    # Without a model the widths are not known yet; the kernels judge them when they are called.
    unsupported = kernels.unsupported(nsa, *(() if model is None else (model.d_k, model.d_v)))
    if backend == "triton":
        if unusable:
            raise BackendError(f"backend = 'triton' cannot run: {unusable}")
        if unsupported:
            raise NotImplementedError(f"backend = 'triton' does not take this shape: {unsupported}")
        return dict.fromkeys(PARTS, Choice("triton", "asked for by name"))
    if backend == "flash":
        reason = flash.flash_unusable(device, dtype)
        if reason:
            raise BackendError(f"backend = 'flash' cannot run: {reason}")
        rest = resolve_backend(device, dtype, nsa, model, "auto")
        return {**rest, "window": Choice("flash", "asked for by name; flash-attn has the window branch only")}
    # The interpreter proves kernel logic; it is never the best way to compute.
    why_not_triton = unusable or unsupported
    if why_not_triton is None and device.type == "cuda":
        return dict.fromkeys(PARTS, Choice("triton", f"CUDA device {torch.cuda.get_device_name(device)}"))
    return dict.fromkeys(PARTS, Choice("torch", why_not_triton or f"the device is {device.type}, not cuda"))


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over visible compressed blocks (eq. 7, 8): q [B, T, H, D], k_cmp [B, N, G, D], v_cmp [B, N, G, Dv]

    -> out [B, T, H, Dv], lse float32 [B, T, H]. A query that sees no block gets 0 and -inf. Raises ValueError for
    shapes that do not belong together.
    """
    _check_heads(q, k_cmp, v_cmp, keys=geometry.num_compressed(q.shape[1], nsa), named=("k_cmp", "v_cmp"))
    return _implementation("compressed", q, nsa, backend).compressed_attention(q, k_cmp, v_cmp, nsa)


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig, *, backend: str = "auto") -> Tensor:
    """The blocks each query and group reads (eq. 9 to 11): q [B, T, H, D], k_cmp [B, N, G, D], lse [B, T, H]

    -> int32 [B, T, G, n_sel], distinct, ascending, padded with -1. No gradient. Raises ValueError for shapes that do not
    belong together.
    """
    _check_heads(q, k_cmp, k_cmp, keys=geometry.num_compressed(q.shape[1], nsa), named=("k_cmp", "k_cmp"))
    _expect("lse", lse, q.shape[:3])
    return _implementation("selection", q, nsa, backend).select_blocks(q, k_cmp, lse, nsa)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens <= t of the chosen blocks (eq. 11): q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv],

    blocks int32 [B, T, G, n_sel] as `select_blocks` gives them -> out [B, T, H, Dv], lse float32 [B, T, H]. Raises
    ValueError for shapes that do not belong together.
    """
    _check_heads(q, k, v, keys=q.shape[1], named=("k", "v"))
    _expect("blocks", blocks, (q.shape[0], q.shape[1], k.shape[2], nsa.n_sel))
    if blocks.dtype != torch.int32:
        raise ValueError(f"blocks: expected int32, got {blocks.dtype}; use blocks.int()")
    return _implementation("selected", q, nsa, backend).selected_attention(q, k, v, blocks, nsa)


def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Attention over the w latest tokens, t included: q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv]

    -> out [B, T, H, Dv], lse float32 [B, T, H]. Raises ValueError for shapes that do not belong together.
    """
    _check_heads(q, k, v, keys=q.shape[1], named=("k", "v"))
    return _implementation("window", q, nsa, backend).window_attention(q, k, v, nsa)


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
    backend: str | Mapping[str, Choice] = "auto",
) -> Tensor:
    """The whole of NSA after projection, compression and gating (eq. 5) -> [B, T, H, Dv].

    q [B, T, H, D]; k_cmp, v_cmp [B, N, G, .]; k_sel, v_sel, k_win, v_win [B, T, G, .]; gates [B, T, H, 3] in the order
    cmp, sel, win. `backend` is a name, or what `resolve_backend` gave. Raises as the four functions above.
    """
    choices = resolve_backend(q.device, q.dtype, nsa, backend=backend) if isinstance(backend, str) else backend
    _check_heads(q, k_cmp, v_cmp, keys=geometry.num_compressed(q.shape[1], nsa), named=("k_cmp", "v_cmp"))
    _check_heads(q, k_sel, v_sel, keys=q.shape[1], named=("k_sel", "v_sel"))
    _check_heads(q, k_win, v_win, keys=q.shape[1], named=("k_win", "v_win"))
    _expect("gates", gates, (*q.shape[:3], 3))
    if all(choices[part].backend == "triton" for part in PARTS):
        return kernels.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa)
    run = {part: _MODULES[choices[part].backend] for part in PARTS}
    out_cmp, lse = run["compressed"].compressed_attention(q, k_cmp, v_cmp, nsa)
    blocks = run["selection"].select_blocks(q, k_cmp, lse, nsa)
    out_sel, _ = run["selected"].selected_attention(q, k_sel, v_sel, blocks, nsa)
    out_win, _ = run["window"].window_attention(q, k_win, v_win, nsa)
    return run["combine"].combine(out_cmp, out_sel, out_win, gates)


class _Flash:
    """flash-attn as a backend of one part."""

    window_attention = staticmethod(flash.flash_window)


_MODULES: Mapping[str, ModuleType | type] = {
    "reference": reference,
    "torch": torch_backend,
    "triton": kernels,
    "flash": _Flash,
}


def _implementation(part: str, q: Tensor, nsa: NSAConfig, backend: str) -> ModuleType | type:
    if backend == "flash" and part != "window":
        raise NotImplementedError(
            f"backend = 'flash' has the window branch and dense attention only, not {part}; use auto, triton or torch"
        )
    return _MODULES[resolve_backend(q.device, q.dtype, nsa, backend=backend)[part].backend]


def _resolve_dense(device: torch.device, dtype: torch.dtype, backend: str) -> Choice:
    if backend == "triton":
        raise NotImplementedError("backend = 'triton' has no dense attention; use auto, torch or flash")
    if backend == "flash":
        reason = flash.flash_unusable(device, dtype)
        if reason:
            raise BackendError(f"backend = 'flash' cannot run: {reason}")
        return Choice("flash", "asked for by name")
    return Choice("torch", "scaled_dot_product_attention picks the best kernel of the device")


def _expect(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor, keys: int, named: tuple[str, str]) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"expected q [B, T, H, D] and keys, values [B, S, G, D], got {q.ndim}, {k.ndim} and {v.ndim} dimensions"
        )
    B, _, H, D = q.shape
    G = k.shape[2]
    if G == 0 or H % G:
        raise ValueError(f"{H} query heads do not divide into {G} key/value groups")
    _expect(named[0], k, (B, keys, G, D))
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{named[1]}: expected shape {(*k.shape[:3], 'Dv')}, got {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, keys and values differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}; cast them to one")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, keys and values lie on {q.device}, {k.device} and {v.device}; move them to one device")
