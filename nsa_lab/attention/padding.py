"""Conversion of padded batches to packed documents: `pack_padded` removes padding, `unpack_padded` restores it.

A mask [B, T] is true for tokens that are not padding, which can be anywhere in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_lab.attention.layout import Span


def pack_padded(x: Tensor, mask: Tensor) -> tuple[Tensor, Span]:
    """Return the unpadded tokens of x [B, T, ...] as one row [1, tokens, ...], and their layout, one document per row of x.

    mask [B, T], bool, or integers 0 and 1 as from a tokenizer: true for tokens that are not padding, which can be on either
    side. A model's outputs for these tokens and this layout equal its outputs for each row alone; `unpack_padded` restores
    the padding. Differentiable. Synchronizes with the device if the mask is on one. Raise ValueError if the shape or dtype
    of the mask is wrong or if no token is left.
    """
    is_token = _to_bool_mask(mask)
    if x.shape[:2] != is_token.shape:
        raise ValueError(f"x {tuple(x.shape)} and mask {tuple(mask.shape)}: expected x [B, T, ...] and mask [B, T]")
    lengths = is_token.sum(1).cpu()
    if not lengths.any():
        raise ValueError(f"mask {tuple(mask.shape)} marks no token; drop a batch that is all padding")
    return x[is_token][None], Span.packed(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int())


def unpack_padded(x: Tensor, mask: Tensor) -> Tensor:
    """Invert `pack_padded`: x [1, tokens, ...] -> [B, T, ...], zeros where `mask` [B, T] is false.

    Raise ValueError unless the mask marks as many tokens as x has.
    """
    is_token = _to_bool_mask(mask)
    if x.ndim < 2 or x.shape[:2] != (1, int(is_token.sum())):
        raise ValueError(
            f"x {tuple(x.shape)} and a mask {tuple(mask.shape)} of {int(is_token.sum())} tokens: "
            "expected x [1, tokens, ...]; use the mask that packed it"
        )
    padded = x.new_zeros(*is_token.shape, *x.shape[2:])
    padded[is_token] = x[0]
    return padded


def _to_bool_mask(mask: Tensor) -> Tensor:
    expected = "mask: expected bool [B, T], or integers 0 and 1, true for tokens that are not padding"
    if mask.ndim != 2 or mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{expected}; got {mask.dtype} {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{expected}; got {mask.dtype} from {mask.min()} to {mask.max()}")
    return mask.bool()
