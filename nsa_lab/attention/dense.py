"""Dense causal attention: the baseline that NSA is compared with, and the mixing of `model.attention: dense`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention.flash import flash_dense


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str = "torch") -> Tensor:
    """q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv] -> [B, T, H, Dv].

    `torch` is scaled_dot_product_attention, which picks the device's best kernel; `flash` is flash-attn.
    """
    if backend == "flash":
        return flash_dense(q, k, v)
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)
