"""Sums of products of tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_lab.attention.kernels.tiles import add_product_compensated


@triton.jit
def _sum_of(a_ptr, b_ptr, total_ptr, tiles, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    place = i[:, None] * SIZE + i[None, :]
    total = tl.load(total_ptr + place)
    lost = tl.zeros([SIZE, SIZE], tl.float32)
    for tile in range(tiles):
        a, b = tl.load(a_ptr + tile * SIZE * SIZE + place), tl.load(b_ptr + tile * SIZE * SIZE + place)
        total, lost = add_product_compensated(total, lost, a, b)
    tl.store(total_ptr + place, total)


def test_a_long_sum_in_float32_is_rounded_as_one_of_a_few_tiles(device: torch.device) -> None:
    """Products of which each by itself is less than what the sum can hold: added one by one they would leave no trace."""
    size, tiles = 16, 400
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(tiles, size, size, generator=generator) for _ in range(2))
    b *= 2.0**-29
    total = torch.ones(size, size)
    exact = total.double() + (a.double() @ b.double()).sum(0)
    found = total.to(device)
    _sum_of[(1,)](a.to(device), b.to(device), found, tiles, SIZE=size)
    assert (exact - 1).min() > 1e-6
    assert (found.cpu().double() - exact).abs().max() <= 2.0**-23
