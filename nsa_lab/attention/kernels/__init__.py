"""The `triton` backend: one file a part, imported when first used, so that triton stays optional."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from nsa_lab.config import ModelConfig, NSAConfig

HEAD_WIDTHS = (32, 64, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unusable(device: torch.device, dtype: torch.dtype, nsa: NSAConfig, model: ModelConfig | None) -> str | None:
    """Why the kernels cannot run here, with the remedy; None if they can.

    On a CPU they run under Triton's interpreter, which its own variable TRITON_INTERPRET=1 turns on.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton (it comes with the CUDA build of torch)"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the device is cpu, where the kernels run only under Triton's interpreter: TRITON_INTERPRET=1"
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter, which runs the kernels on a cpu, multiplies bfloat16 wrongly; use float32 or float16"
    if device.type not in ("cpu", "cuda"):
        return f"the kernels need a CUDA device, and this is {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0 or higher, and {torch.cuda.get_device_name(device)} has less"
    if dtype not in DTYPES:
        return f"the kernels compute in bfloat16, float16 or float32, not {dtype}"
    if model is not None and not {model.d_k, model.d_v} <= set(HEAD_WIDTHS):
        return f"the kernels take head widths {HEAD_WIDTHS}, and model.d_k, model.d_v = {model.d_k}, {model.d_v}"
    if nsa.l_sel % 16:
        return f"the kernels take nsa.l_sel in multiples of 16, and it is {nsa.l_sel}"
    return None


def compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """As `reference.compressed_attention`."""
    from nsa_lab.attention.kernels import compressed

    return compressed.compressed_attention(q, k_cmp, v_cmp, nsa)


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig) -> Tensor:
    """As `reference.select_blocks`."""
    from nsa_lab.attention.kernels import selection

    return selection.select_blocks(q, k_cmp, lse, nsa)


def selected_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """As `reference.selected_attention`."""
    from nsa_lab.attention.kernels import selected

    return selected.selected_attention(q, k, v, blocks, nsa)


def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """As `reference.window_attention`."""
    from nsa_lab.attention.kernels import window

    return window.window_attention(q, k, v, nsa)


def combine(out_cmp: Tensor, out_sel: Tensor, out_win: Tensor, gates: Tensor) -> Tensor:
    """As `reference.combine`."""
    from nsa_lab.attention.kernels import gating

    return gating.gated_sum(out_cmp, out_sel, out_win, gates)


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
) -> Tensor:
    """As `dispatch.nsa_attention`, every part on Triton."""
    from nsa_lab.attention.kernels import whole

    return whole.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa)
