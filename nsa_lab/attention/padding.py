"""Padded batches as packed documents: what a mask marks, one row after another, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_lab.attention.layout import Span


def pack_padded(x: Tensor, mask: Tensor) -> tuple[Tensor, Span]:
    """The tokens of x [B, T, ...] that `mask` marks, row after row: [1, tokens, ...], and their span, a document a row.

    mask [B, T], bool, or 0 and 1 as tokenizers give it: true where a token is no padding, wherever the padding stands. What
    a model says of them with this span is what it says of every row alone; `unpack_padded` puts it back. Differentiable.
    Waits for the device, where the mask lies on one. Raises ValueError for a mask of another shape or kind, or without a
    token.
    """
    kept = _to_bool_mask(mask)
    if x.shape[:2] != kept.shape:
        raise ValueError(f"x {tuple(x.shape)} and mask {tuple(mask.shape)}: expected x [B, T, ...] and mask [B, T]")
    lengths = kept.sum(1).cpu()
    if not lengths.any():
        raise ValueError(f"mask {tuple(mask.shape)} marks no token; drop a batch that is all padding")
    return x[kept][None], Span.packed(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int())


def unpack_padded(x: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `pack_padded`: x [1, tokens, ...] -> [B, T, ...], zeros where `mask` [B, T] is false.

    Raises ValueError unless the mask marks as many tokens as x has.
    """
    kept = _to_bool_mask(mask)
    if x.ndim < 2 or x.shape[:2] != (1, int(kept.sum())):
        raise ValueError(
            f"x {tuple(x.shape)} and a mask {tuple(mask.shape)} of {int(kept.sum())} tokens: expected x [1, tokens, ...]; "
            "give the mask that packed it"
        )
    padded = x.new_zeros(*kept.shape, *x.shape[2:])
    padded[kept] = x[0]
    return padded


def _to_bool_mask(mask: Tensor) -> Tensor:
    wanted = "mask: expected bool [B, T], or integers 0 and 1, true where a token is no padding"
    if mask.ndim != 2 or mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{wanted}; got {mask.dtype} {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{wanted}; got {mask.dtype} from {mask.min()} to {mask.max()}")
    return mask.bool()
