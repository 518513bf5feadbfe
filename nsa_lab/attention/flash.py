"""The `flash` backend: flash-attn (Dao-AILab), for the window branch and the dense baseline.

Optional; it needs a CUDA device and half precision.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from nsa_lab.config import NSAConfig

INSTALL = (
    "install it with: conda install -c conda-forge flash-attn (prebuilt), "
    "or pip install flash-attn --no-build-isolation (compiles for a quarter of an hour or more)"
)


def flash_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot run here, with the remedy; None if it can."""
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, and this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in bfloat16 or float16, not {dtype}; set runtime.precision: bf16"
    try:
        _library()
    except ImportError as error:
        return f"flash-attn cannot be imported ({error}); {INSTALL}"
    return None


def flash_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention; shapes as in `dense_attention`."""
    return _library().flash_attn_func(q, k, v, causal=True)


def flash_window(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """Window branch; its window counts the keys to the left of the query's own, so w keys are w - 1."""
    out, lse, _ = _library().flash_attn_func(q, k, v, causal=True, window_size=(nsa.w - 1, 0), return_attn_probs=True)
    return out, lse.transpose(1, 2)  # flash-attn keeps LSE as [B, H, T]


def _library() -> ModuleType:
    return importlib.import_module("flash_attn")
