"""New tokens in one launch: each number of the cache is the one that plain loops write, or still what it was."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa_lab.attention import kernels
from nsa_lab.attention.layer_cache import LayerCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THETA = 100.0


def turned(row: Tensor, position: int, R: int) -> Tensor:
    """The pairs (i, i + R/2) of a row of float64, turned one by one."""
    out = row.clone()
    for i in range(R // 2):
        angle = position * THETA ** (-2 * i / R)
        out[i] = row[i] * math.cos(angle) - row[i + R // 2] * math.sin(angle)
        out[i + R // 2] = row[i + R // 2] * math.cos(angle) + row[i] * math.sin(angle)
    return out


# Lengths, S, H, G, d_k, d_v, R, and slots of the raw ring, of the window's, and rows of all tokens.
CASES = [
    ((0, 5, 22), 1, 6, 2, 32, 16, 32, 7, 11, 40),
    ((37, 3), 5, 3, 1, 48, 80, 16, 9, 5, 39),  # padding past the capacity, and a ring as long as the step
    ((12,), 3, 4, 4, 16, 16, 0, 5, 64, 15),  # nothing is turned
    ((8, 9, 10, 30), 2, 5, 1, 96, 32, 96, 33, 8, 31),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_what_loops_keep(case: tuple, dtype: torch.dtype) -> None:
    lengths, S, H, G, Dk, Dv, R, raw_slots, slots, capacity = case
    draw, B = torch.Generator().manual_seed(S), len(lengths)
    # As a projection gives them: neighbours in one row.
    given = torch.randn(B, S, (H + 3 * G) * Dk + 3 * G * Dv + 3, generator=draw).to(DEVICE, dtype)
    roped, values, _ = given.split([(H + 3 * G) * Dk, 3 * G * Dv, 3], dim=-1)
    roped, values = roped.unflatten(-1, (-1, Dk)), values.unflatten(-1, (-1, Dv))
    sizes = [(n, width) for n in (raw_slots, capacity, slots) for width in (Dk, Dv)]
    # A row more than there are, in every sequence: what lies behind a sequence is not written either.
    laid_out = [torch.full((B, n + 1, G, width), float("nan"), device=DEVICE, dtype=dtype) for n, width in sizes]
    k_raw, v_raw, *kept = (x[:, :-1] for x in laid_out)
    before = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    positions = before.long()[:, None] + torch.arange(S, device=DEVICE)
    angles = positions.double()[..., None] * THETA ** (-torch.arange(0, R, 2, device=DEVICE).double() / max(R, 1))
    rotary = angles.cos().float(), angles.sin().float()

    q = kernels.append(roped, values, rotary, before, LayerCache(roped[..., :0], values[..., :0], *kept), k_raw, v_raw)

    expected = [torch.full(x.shape, float("nan"), dtype=torch.float64) for x in laid_out]
    turned_q = torch.empty(B, S, H, Dk, dtype=torch.float64)
    wide_k, wide_v = roped.double().cpu(), values.double().cpu()
    for b, length in enumerate(lengths):
        for s in range(S):
            p = length + s
            for head in range(H):
                turned_q[b, s, head] = turned(wide_k[b, s, head], p, R)
            places = (p % raw_slots, p, p % slots)
            for branch, place in enumerate(places):
                for g in range(G):
                    if branch == 1 and p >= capacity:
                        continue
                    expected[2 * branch][b, place, g] = turned(wide_k[b, s, H + branch * G + g], p, R)
                    expected[2 * branch + 1][b, place, g] = wide_v[b, s, branch * G + g]
    off = 2e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(q.double().cpu(), turned_q, rtol=off, atol=off)
    for found, true in zip(laid_out, expected, strict=True):
        torch.testing.assert_close(found.double().cpu(), true, rtol=off, atol=off, equal_nan=True)


def test_widths_that_kernels_do_not_take_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="append, backend = 'triton': the kernels take head widths"):
        kernels.append(
            torch.zeros(1, 1, 5, 20), torch.zeros(1, 1, 3, 16), (), torch.zeros(1), LayerCache(*[torch.zeros(1)] * 6), *"kv"
        )  # pyright: ignore[reportArgumentType]
