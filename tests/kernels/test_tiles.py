"""Compensated sums of tile products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_lab.attention.kernels.tiles import add_product_compensated


@triton.jit
def _sum_products(a_ptr, b_ptr, total_ptr, tiles, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    offsets = i[:, None] * SIZE + i[None, :]
    total = tl.load(total_ptr + offsets)
    error = tl.zeros([SIZE, SIZE], tl.float32)
    for tile in range(tiles):
        a, b = tl.load(a_ptr + tile * SIZE * SIZE + offsets), tl.load(b_ptr + tile * SIZE * SIZE + offsets)
        total, error = add_product_compensated(total, error, a, b)
    tl.store(total_ptr + offsets, total)


def test_long_float32_sum_has_the_error_of_a_short_one(device: torch.device) -> None:
    """Each product is below the rounding error of the sum: without compensation all of them would be lost."""
    size, tiles = 16, 400
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(tiles, size, size, generator=generator) for _ in range(2))
    b *= 2.0**-29
    total = torch.ones(size, size)
    exact = total.double() + (a.double() @ b.double()).sum(0)
    actual = total.to(device)
    _sum_products[(1,)](a.to(device), b.to(device), actual, tiles, SIZE=size)
    assert (exact - 1).min() > 1e-6
    assert (actual.cpu().double() - exact).abs().max() <= 2.0**-23
