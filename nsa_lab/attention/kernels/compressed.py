"""The compressed branch in Triton: attention over the visible compressed blocks (arXiv 2502.11089, eq. 7 and 8)."""

from __future__ import annotations

from torch import Tensor

from nsa_lab.attention.geometry import num_compressed
from nsa_lab.attention.kernels.band import band_attention
from nsa_lab.attention.kernels.common import check_attention_inputs
from nsa_lab.config import NSAConfig


def compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig) -> tuple[Tensor, Tensor]:
    """Query t sees block i iff i*d + l - 1 <= t; a query that sees none gets out 0, lse -inf and zero gradients.

    q [B, T, H, Dk], k_cmp [B, N, G, Dk], v_cmp [B, N, G, Dv], bf16, fp16 or fp32 -> out [B, T, H, Dv] in that dtype and
    lse float32 [B, T, H], natural log; both are differentiable. ValueError for shapes that do not fit, and
    NotImplementedError for a dtype, width or device past the kernels' limits.
    """
    check_attention_inputs("compressed_attention", q, k_cmp, v_cmp, num_compressed(q.shape[1], nsa))
    return band_attention(q, k_cmp, v_cmp, nsa.l, nsa.d, 0)
