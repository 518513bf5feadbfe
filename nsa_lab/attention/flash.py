"""The `flash` backend: flash-attn (Dao-AILab) for the window branch and the dense baseline.

Optional. It needs a CUDA device and half precision. For a chunk, flash-attn (2.1 and newer) aligns queries and keys at
their ends. Packed documents use its variable-length functions.
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
    "or pip install flash-attn --no-build-isolation (compiles for at least 15 minutes)"
)


def find_flash_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why flash-attn cannot run here, with the remedy; None if it can."""
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
    """Raise NotImplementedError unless flash-attn supports these head widths (2.8: d_k = d_v <= 256)."""
    if d_k != d_v:
        raise NotImplementedError(
            f"flash-attn needs equal key and value widths, got d_k = {d_k} and d_v = {d_v}; "
            f"use {d_k} for both, or backend='torch'"
        )
    if d_k > MAX_HEAD_WIDTH:
        raise NotImplementedError(
            f"flash-attn supports head widths up to {MAX_HEAD_WIDTH}, got {d_k}; use {MAX_HEAD_WIDTH}, or backend='torch'"
        )


def flash_dense_attention(q: Tensor, k: Tensor, v: Tensor, *, span: Span | None = None) -> Tensor:
    """Return dense causal attention; shapes and errors as in `dense_attention`."""
    check_widths(k.shape[3], v.shape[3])
    return _call_flash_attn(q, k, v, span)


def flash_window_attention(
    q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig, *, span: Span | None = None
) -> tuple[Tensor, Tensor]:
    """Return the window branch, (out, lse); shapes as in `window_attention`.

    flash-attn counts only the keys to the left of the query, so a window of w keys is w - 1 there. Raise
    NotImplementedError for head widths that flash-attn does not support.
    """
    check_widths(k.shape[3], v.shape[3])
    out, lse, _ = _call_flash_attn(q, k, v, span, window_size=(nsa.w - 1, 0), return_attn_probs=True)
    return out, lse.transpose(1, 2)  # flash-attn returns LSE as [B, H, T]


def _call_flash_attn(q: Tensor, k: Tensor, v: Tensor, span: Span | None, **kwargs: Any) -> Any:
    """Call `flash_attn_func`, or its variable-length version if the documents are packed."""
    if span is None or span.kind != "packed":
        return _import_flash_attn().flash_attn_func(q, k, v, causal=True, **kwargs)
    cu_seqlens, max_seqlen = span.cu_seqlens(q.device), span.longest_allocated
    packed = _import_flash_attn().flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True, **kwargs
    )
    if torch.is_tensor(packed):
        return packed[None]
    out, lse, probabilities = packed
    if lse.ndim != 2:
        raise NotImplementedError(
            f"flash-attn returned the LSE of packed documents as {tuple(lse.shape)}, expected [heads, tokens] as from "
            "2.6.2 on; install a newer version, or use backend='torch'"
        )
    return out[None], lse[None], probabilities


def _import_flash_attn() -> ModuleType:
    return importlib.import_module("flash_attn")
