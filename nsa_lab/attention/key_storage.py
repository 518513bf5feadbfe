"""Storage of index keys in few bits: fp8 (e4m3) or MXFP4 (OCP Microscaling Formats 1.0).

fp8: one byte per channel, rounded to nearest, ties to even, and saturated at 448. MXFP4: four bits per channel (e2m1) and
for each 32 channels, or for all of a narrower key, a scale of one byte, a power of two. The scale is 2 ** (floor(log2 of
the largest magnitude) - 2), as in the specification, so magnitudes above 6 times the scale saturate. A row holds the codes
of the first half of the channels in its low and of the second half in its high four bits, then the scales.

Training rounds index keys by the same functions, so a key has the same value in training and in a cache.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nsa_lab.attention.compile_utils import is_exporting
from nsa_lab.config.model_config import MXFP4_BLOCK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
NAN_SCALE = 255  # scale of 32 channels of which one is not finite; all of them are then NaN
MIN_SCALE, MAX_SCALE = 1, 253  # biased by 127


def get_row_format(index_dtype: str, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the number of elements and the dtype of a stored key of `width` channels.

    `index_dtype`: bf16 (the keys are stored in `dtype`), fp8 or mxfp4, as in `ModelConfig.indexer_dtype`.
    """
    if index_dtype == "fp8":
        return width, FP8
    if index_dtype == "mxfp4":
        return width // 2 + _count_scales(width), torch.uint8
    return width, dtype


def count_row_bytes(index_dtype: str, width: int, itemsize: int) -> int:
    """Return the bytes of a stored key of `width` channels; `itemsize`: bytes per element of the keys before."""
    if index_dtype == "bf16":
        return width * itemsize
    n_elements, dtype = get_row_format(index_dtype, width, FP8)
    return n_elements * dtype.itemsize


def encode_keys(k: Tensor, index_dtype: str) -> Tensor:
    """Return keys k [..., D] in the storage format of `index_dtype`, [..., n]; see `get_row_format`."""
    if index_dtype == "fp8":
        return k.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return _encode_mxfp4(k) if index_dtype == "mxfp4" else k


def decode_keys(stored: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the keys [..., width] in `dtype` that `encode_keys` stored; its dtype shows the format."""
    return _decode_mxfp4(stored, width).to(dtype) if stored.dtype == torch.uint8 else stored.to(dtype)


def round_keys(k: Tensor, index_dtype: str) -> Tensor:
    """Return k [..., D] rounded to the values that `index_dtype` can store, with the gradient of the identity."""
    if index_dtype == "bf16":
        return k
    if is_exporting():
        return decode_keys(encode_keys(k, index_dtype), k.shape[-1], k.dtype)
    return cast(Tensor, _StraightThrough.apply(k, index_dtype))  # pyright: ignore[reportUnknownMemberType]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, index_dtype: str) -> Tensor:
        return decode_keys(encode_keys(k, index_dtype), k.shape[-1], k.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


def _encode_mxfp4(k: Tensor) -> Tensor:
    width, n_scales = k.shape[-1], _count_scales(k.shape[-1])
    x = torch.unflatten(k.to(torch.float32), -1, (n_scales, -1))
    # The biased exponent of the largest magnitude; 255 for infinity and NaN.
    exponent = x.abs().amax(-1).view(torch.int32) >> 23
    scale = (exponent - 2).clamp(MIN_SCALE, MAX_SCALE)
    magnitude = x.abs() * ((254 - scale) << 23).view(torch.float32)[..., None]  # divided by the scale, exactly
    code = torch.where(magnitude < 4, 2 + magnitude.round(), 4 + (magnitude / 2).round()).clamp_max(7)
    code = torch.where(magnitude < 2, (2 * magnitude).round(), code) + 8 * (x < 0)
    code = torch.where(exponent[..., None] == NAN_SCALE, 0, code).to(torch.uint8).flatten(-2)
    packed = code[..., : width // 2] | (code[..., width // 2 :] << 4)
    scale = torch.where(exponent == NAN_SCALE, NAN_SCALE, scale).to(torch.uint8)
    return torch.cat([packed, scale], -1)


def _decode_mxfp4(stored: Tensor, width: int) -> Tensor:
    packed, scale = torch.split(stored, [width // 2, _count_scales(width)], -1)
    code = torch.cat([packed & 15, packed >> 4], -1).to(torch.float32)
    magnitude, is_negative = code % 8, code >= 8
    # Codes 0 to 7: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    magnitude = torch.where(magnitude < 6, magnitude - 2, 2 * magnitude - 8).where(magnitude >= 4, magnitude / 2)
    value = torch.where(is_negative, -magnitude, magnitude)
    factor = (scale.to(torch.int32) << 23).view(torch.float32)
    factor = torch.where(scale == NAN_SCALE, torch.nan, factor)
    return (torch.unflatten(value, -1, (scale.shape[-1], -1)) * factor[..., None]).flatten(-2)


def _count_scales(width: int) -> int:
    return -(-width // MXFP4_BLOCK)
