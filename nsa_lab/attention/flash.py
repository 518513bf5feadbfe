"""The `flash` backend: flash-attn (Dao-AILab), for the window branch and the dense baseline.

Optional; it needs a CUDA device and half precision. Spans: a chunk is fewer queries than keys, which flash-attn lines up at
their ends (2.1 and up); packed documents go to its variable-length functions, by the bounds on the device.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nsa_lab.attention.layout import Span
from nsa_lab.config import NSAConfig

MAX_HEAD_WIDTH = 256
INSTALL_HINT = (
    "install it with: conda install -c conda-forge flash-attn (prebuilt), "
    "or pip install flash-attn --no-build-isolation (compiles for a quarter of an hour or more)"
)


def get_flash_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot run here, with the remedy; None if it can."""
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, and this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in bfloat16 or float16, not {dtype}; set runtime.precision: bf16"
    try:
        _import_flash_attn()
    except ImportError as error:
        return f"flash-attn cannot be imported ({error}); {INSTALL_HINT}"
    return None


def check_widths(d_k: int, d_v: int) -> None:
    """Raises NotImplementedError unless flash-attn takes heads of these widths (2.8: one width for both, up to 256)."""
    if d_k != d_v:
        raise NotImplementedError(
            f"flash-attn takes keys and values of one head width, and they are {d_k} and {d_v}; "
            f"use {d_k} for both, or backend='torch'"
        )
    if d_k > MAX_HEAD_WIDTH:
        raise NotImplementedError(
            f"flash-attn takes head widths up to {MAX_HEAD_WIDTH}, and it is {d_k}; use {MAX_HEAD_WIDTH}, or backend='torch'"
        )


def flash_dense_attention(q: Tensor, k: Tensor, v: Tensor, *, span: Span | None = None) -> Tensor:
    """Dense causal attention; shapes as in `dense_attention`. Raises NotImplementedError for widths."""
    check_widths(k.shape[3], v.shape[3])
    return _call_flash_attn(q, k, v, span)


def flash_window_attention(
    q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Window branch; its window counts the keys left of the query's own, so w keys are w - 1.

    Shapes as in `window_attention`. Raises NotImplementedError for head widths that flash-attn does not take.
    """
    check_widths(k.shape[3], v.shape[3])
    out, lse, _ = _call_flash_attn(q, k, v, span, window_size=(nsa.w - 1, 0), return_attn_probs=True)
    return out, lse.transpose(1, 2)  # flash-attn keeps LSE as [B, H, T]


def _call_flash_attn(q: Tensor, k: Tensor, v: Tensor, span: Span | None, **how: Any) -> Any:
    """What `flash_attn_func` gives for these, document by document if they are packed."""
    if span is None or span.kind != "packed":
        return _import_flash_attn().flash_attn_func(q, k, v, causal=True, **how)
    bounds, most = span.cu_seqlens(q.device), span.longest_allocated
    packed = _import_flash_attn().flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, most, most, causal=True, **how)
    if torch.is_tensor(packed):
        return packed[None]
    out, lse, probabilities = packed
    if lse.ndim != 2:
        raise NotImplementedError(
            f"flash-attn gives the LSE of packed documents as {tuple(lse.shape)}, and [heads, tokens] is read, as from "
            "2.6.2 on; install a later one, or use backend='torch'"
        )
    return out[None], lse[None], probabilities


def _import_flash_attn() -> ModuleType:
    return importlib.import_module("flash_attn")
