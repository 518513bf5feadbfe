"""Dense causal attention: the baseline that NSA is compared with, and the mixing of `model.attention: dense`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import checks, geometry
from nsa_lab.attention.flash import flash_dense
from nsa_lab.attention.span import Span


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str = "torch", span: Span | None = None) -> Tensor:
    """q [B, T, H, D], k [B, T, G, D], v [B, T, G, Dv] -> [B, T, H, Dv].

    `torch` is scaled_dot_product_attention, which picks the device's best kernel; `flash` is flash-attn, which takes a full
    span only. Both share tiles of values between queries: causality holds for every finite value, and a NaN or an infinity
    can reach earlier queries (zero times NaN is NaN). With `Span.chunk`, q and the result have its `length` rows, k and v
    positions 0 .. start+length-1; with `Span.packed`, B is 1 and every document is attended alone. Raises ValueError for
    inputs that do not belong together, NotImplementedError for what flash-attn does not take.
    """
    checks.check_raw(q, k, v, span)
    full = span is None or span.is_full
    if backend == "flash":
        if not full:
            raise NotImplementedError(f"backend = 'flash' takes a full span only, not {span}; use backend='torch'")
        return flash_dense(q, k, v)
    if span is None or full:
        return _attend(q, k, v)
    if span.kind == "chunk":
        t, s = span.positions(q.device), geometry.positions(0, span.keys, q.device)
        return _attend(q, k, v, seen=s <= t[:, None])
    lengths = [document.last for document in span.documents if document.last]
    parts = zip(*(torch.split(x, lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([_attend(*part) for part in parts], dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Over the keys `seen` (bool [T, S]); None: those up to the query's own."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        is_causal=seen is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
