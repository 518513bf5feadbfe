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
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_lab.attention import key_storage
from nsa_lab.attention.kernels.tiles import load_rows_masked
from nsa_lab.config.model_config import MXFP4_BLOCK

PLAIN, FP8, MXFP4, HARDWARE_FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NAN_SCALE = tl.constexpr(key_storage.NAN_SCALE)
SCALED_CHANNELS = tl.constexpr(MXFP4_BLOCK)


def get_mxfp4_chunk(width: int) -> int:
    """Return the number of channels of half a key of `width` channels that have the same scale, for `load_mxfp4_halves`."""
    return math.gcd(width // 2, MXFP4_BLOCK)


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

    Rows that are not `inside` are not read and are zero.
    """
    if FORMAT == MXFP4:
        HALF: tl.constexpr = WIDTH // 2
        mask = (columns < WIDTH)[None, :] & inside[:, None]
        rows = base + offsets[:, None]
        code = tl.load(rows + (columns % HALF)[None, :], mask=mask, other=0).to(tl.int32)
        value = decode_low_nibble(code >> tl.where(columns >= HALF, 4, 0)[None, :]).to(tl.float32)
        scale = tl.load(rows + HALF + (columns // SCALED_CHANNELS)[None, :], mask=mask, other=0)
        keys = (value * decode_scale(scale)).to(dtype)
    else:
        keys = load_rows_masked(base, offsets, columns, inside, WIDTH, STOP)
        if FORMAT == HARDWARE_FP8:
            keys = keys.to(tl.float8e4nv, bitcast=True).to(dtype)
        elif FORMAT == FP8:
            code = keys.to(tl.int32)
            value = from_float16_bits(((code & 127) << 7) | ((code & 128) << 8)).to(tl.float32) * 256.0
            keys = tl.where((code & 127) == 127, float("nan"), value).to(dtype)
    return keys


@triton.jit
def load_mxfp4_halves(
    base, offsets, first_byte, inside, HALF: tl.constexpr, CHUNK: tl.constexpr, CHUNK_PAD: tl.constexpr,
    HAS_WORDS: tl.constexpr,
):
    """Return CHUNK channels of the first and of the second half of MXFP4 keys from `first_byte` on, float16
    [keys, CHUNK_PAD], and their factors, float32 [keys].

    HALF: half of the channels. A chunk of either half has a single factor per key. HAS_WORDS: addresses are even, and CHUNK
    is CHUNK_PAD; then two bytes are loaded and decoded together.
    """
    rows = base + offsets
    if HAS_WORDS:
        word_rows = (rows + first_byte).to(tl.pointer_type(tl.uint16), bitcast=True)
        words = tl.load(word_rows[:, None] + tl.arange(0, CHUNK_PAD // 2)[None, :], mask=inside[:, None], other=0)
        spread = words.to(tl.int32)
        spread = (spread | (spread << 8)) & 0x00FF00FF
        low = split_float16(((spread & 0x00070007) << 9) | ((spread & 0x00080008) << 12))
        high = split_float16(((spread & 0x00700070) << 5) | ((spread & 0x00800080) << 8))
    else:
        byte = tl.arange(0, CHUNK_PAD)
        mask = (byte < CHUNK)[None, :] & inside[:, None]
        code = tl.load(rows[:, None] + (first_byte + byte)[None, :], mask=mask, other=0).to(tl.int32)
        low, high = decode_low_nibble(code), decode_low_nibble(code >> 4)
    low_scale = tl.load(rows + HALF + first_byte // SCALED_CHANNELS, mask=inside, other=0)
    high_scale = tl.load(rows + HALF + (HALF + first_byte) // SCALED_CHANNELS, mask=inside, other=0)
    return low, high, decode_scale(low_scale), decode_scale(high_scale)


@triton.jit
def split_float16(bits):
    """Return the two float16 values in each int32 of `bits` [keys, words] as adjacent columns."""
    halves = tl.join(from_float16_bits(bits & 0xFFFF), from_float16_bits((bits >> 16) & 0xFFFF))
    return tl.reshape(halves, [bits.shape[0], 2 * bits.shape[1]])


@triton.jit
def decode_low_nibble(code):
    """Return the e2m1 value in the low four bits of int32 codes, divided by 2 ** 14, which is exact in float16."""
    return from_float16_bits(((code & 7) << 9) | ((code & 8) << 12))


@triton.jit
def decode_scale(scale):
    """Return 2 ** 14 times the factor of a stored scale, uint8, for values of `decode_low_nibble`; float32."""
    scale = scale.to(tl.int32)
    return tl.where(scale == NAN_SCALE, float("nan"), (scale << 23).to(tl.float32, bitcast=True)) * 16384.0


@triton.jit
def get_float16_factor(q):
    """Return a power of two per column of q [D, ROWS], float32: times it, the largest magnitude of the column is 2 ** 14.

    Codes of fp8 and MXFP4 are exact in float16, and their conversion takes fewer instructions than to bfloat16. With this
    factor, bfloat16 queries from 2 ** -28 of the largest magnitude on are exact in float16, too.
    """
    bits = q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum(tl.max(bits, 0) >> 23, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_float16_bits(bits):
    """Return the float16 of these bits, int32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)
# fmt: on
