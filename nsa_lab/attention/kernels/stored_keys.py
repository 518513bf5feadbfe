"""Load index keys in the formats of `nsa_lab.attention.key_storage`: as they are, fp8 (e4m3) or MXFP4.

GPUs of compute capability 8.9 and later convert fp8 in hardware. Otherwise the codes are converted by integer operations:
with the exponent bits of a float16, a code of fewer exponent bits is the value divided by a power of two, also if it is
subnormal.
"""

# Parameters of triton.jit functions have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention import key_storage
from nsa_lab.attention.kernels.tiles import load_rows, load_rows_masked
from nsa_lab.config.model_config import MXFP4_BLOCK

PLAIN, FP8, MXFP4, HARDWARE_FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NAN_SCALE = tl.constexpr(key_storage.NAN_SCALE)
SCALED_CHANNELS = tl.constexpr(MXFP4_BLOCK)


def get_format(keys: Tensor) -> tuple[Tensor, int]:
    """Return the keys as the kernels take them, and the code of their format."""
    if keys.dtype == key_storage.FP8:
        return keys.view(torch.uint8), FP8.value
    return keys, (MXFP4 if keys.dtype == torch.uint8 else PLAIN).value


def get_load_format(keys: Tensor) -> tuple[Tensor, int]:
    """Return what `get_format` returns, with HARDWARE_FP8 for fp8 keys where the GPU can convert them."""
    codes, key_format = get_format(keys)
    return codes, HARDWARE_FP8.value if key_format == FP8.value and _has_fp8(keys.device) else key_format


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


# fmt: off
@triton.jit
def load_stored_rows(
    base, offsets, columns, inside, WIDTH: tl.constexpr, STOP: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr
):
    """Return keys at `offsets` elements from `base`, in `dtype`; columns from WIDTH on are zero.

    inside: rows that exist, the others are zero; None: all exist.
    """
    if FORMAT == MXFP4:
        HALF: tl.constexpr = WIDTH // 2
        mask = (columns < WIDTH)[None, :]
        if inside is not None:
            mask = mask & inside[:, None]
        rows = base + offsets[:, None]
        code = tl.load(rows + (columns % HALF)[None, :], mask=mask, other=0).to(tl.int32)
        code = (code >> tl.where(columns >= HALF, 4, 0)[None, :]) & 15
        value = from_float16_bits(((code & 7) << 9) | ((code & 8) << 12)) * 16384.0
        scale = tl.load(rows + HALF + (columns // SCALED_CHANNELS)[None, :], mask=mask, other=0).to(tl.int32)
        factor = (scale << 23).to(tl.float32, bitcast=True)
        keys = (value * tl.where(scale == NAN_SCALE, float("nan"), factor)).to(dtype)
    else:
        if inside is None:
            keys = load_rows(base, offsets, columns, WIDTH, STOP)
        else:
            keys = load_rows_masked(base, offsets, columns, inside, WIDTH, STOP)
        if FORMAT == HARDWARE_FP8:
            keys = keys.to(tl.float8e4nv, bitcast=True).to(dtype)
        elif FORMAT == FP8:
            code = keys.to(tl.int32)
            value = from_float16_bits(((code & 127) << 7) | ((code & 128) << 8)) * 256.0
            keys = tl.where((code & 127) == 127, float("nan"), value).to(dtype)
    return keys


@triton.jit
def scale_to_float16(q):
    """Return q [ROWS, D] times a power of two per row, in float16, and the inverse of these factors, float32 [ROWS].

    Codes of fp8 are exact in float16, and their conversion takes half as many instructions as to bfloat16. The factor moves
    the largest magnitude of a row to 2 ** 14, so bfloat16 values from 2 ** -28 of it on are exact.
    """
    bits = q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum(tl.max(bits, 1) >> 23, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * factor[:, None]).to(tl.float16), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_float16_bits(bits):
    """Return the float16 of these bits, int32, as a float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
# fmt: on
