"""Index keys in 8 and 4 bits: values, bytes, values that are not finite, and gradients."""

from __future__ import annotations

import brute_force
import numpy as np
import pytest
import torch
from looping import looped

from nsa_lab.attention.key_storage import count_row_bytes, decode_keys, encode_keys, get_row_format, round_keys

ROUNDINGS = {"fp8": brute_force.round_to_fp8, "mxfp4": brute_force.round_to_mxfp4}
WIDTHS = {"fp8": (1, 7, 64), "mxfp4": (2, 6, 32, 96)}
BYTES = {"fp8": (1, 7, 64), "mxfp4": (2, 4, 17, 51)}


def draw_keys(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return keys [., width] of many magnitudes: also values with codes, midpoints between them, and zeros."""
    generator = torch.Generator().manual_seed(width)
    n = 400 // width + 20
    scale = 2.0 ** torch.randint(-14, 12, (n, 1), generator=generator)
    values = [torch.randn(n, width, generator=generator) * scale]
    codes = torch.tensor(sorted({0.0, *brute_force.E2M1, *brute_force.E4M3}))
    codes = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    picks = torch.randint(len(codes), (n, width), generator=generator)
    values.append(codes[picks] * torch.randn(n, width, generator=generator).sign())
    return torch.cat([*values, torch.zeros(1, width), torch.full((1, width), -1e6)]).to(dtype)


@looped
@pytest.mark.parametrize("index_dtype", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_stored_keys_are_the_nearest_values_with_a_code(index_dtype: str, dtype: torch.dtype) -> None:
    for width, n_bytes in zip(WIDTHS[index_dtype], BYTES[index_dtype], strict=True):
        k = draw_keys(width, dtype)
        stored = encode_keys(k, index_dtype)
        assert (stored.shape[1], stored.dtype) == get_row_format(index_dtype, width, dtype)
        assert stored[0].nbytes == count_row_bytes(index_dtype, width, dtype.itemsize) == n_bytes
        expected = np.apply_along_axis(ROUNDINGS[index_dtype], -1, k.double().numpy())
        decoded = decode_keys(stored, width, dtype)
        assert decoded.dtype == dtype
        np.testing.assert_array_equal(decoded.double().numpy(), expected)
        torch.testing.assert_close(round_keys(k, index_dtype), decoded, rtol=0, atol=0)


def test_keys_that_are_not_finite_are_nan_in_their_group_of_channels() -> None:
    k = torch.ones(3, 64)
    k[1, 5], k[2, 40] = torch.nan, torch.inf
    is_nan = decode_keys(encode_keys(k, "mxfp4"), 64, torch.float32).isnan()
    expected = torch.zeros(3, 64, dtype=torch.bool)
    expected[1, :32] = expected[2, 32:] = True
    assert torch.equal(is_nan, expected)
    decoded = decode_keys(encode_keys(k, "fp8"), 64, torch.float32)
    assert torch.equal(decoded.isnan(), k.isnan()) and decoded[2, 40] == 448
    assert decode_keys(torch.full((1, 17), 255, dtype=torch.uint8), 32, torch.float32).isnan().all()


@looped
@pytest.mark.parametrize("index_dtype", ["bf16", *ROUNDINGS])
def test_the_gradient_passes_through_the_rounding(index_dtype: str) -> None:
    k = draw_keys(32).requires_grad_()
    weight = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((round_keys(k, index_dtype) * weight).sum(), k)
    assert torch.equal(gradient, weight)
