"""The window branch in Triton: attention over the w latest tokens (arXiv 2502.11089, section 3.3.3)."""

from __future__ import annotations

from torch import Tensor

from nsa_lab.attention.kernels.band import band_attention
from nsa_lab.attention.kernels.common import check_attention_inputs
from nsa_lab.config import NSAConfig


def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """Query t sees the keys t-w+1 .. t: exactly min(w, t+1) of them, its own included.

    q [B, T, H, Dk], k [B, T, G, Dk], v [B, T, G, Dv], bf16, fp16 or fp32 -> out [B, T, H, Dv] in that dtype and
    lse float32 [B, T, H], natural log; both are differentiable. ValueError for shapes that do not fit, and
    NotImplementedError for a dtype, width or device past the kernels' limits.
    """
    check_attention_inputs("window_attention", q, k, v, q.shape[1])
    return band_attention(q, k, v, 1, 1, nsa.w)
