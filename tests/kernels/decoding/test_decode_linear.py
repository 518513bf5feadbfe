"""Linear maps of few rows, with norm, activation and residual, against plain sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_lab.attention import kernels
from nsa_lab.attention.kernels import launch_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-2  # large enough to show
# Rows, K: fewer than a tensor core takes, and more; odd depths, and several chunks of them.
CASES = [((1, 1), 48), ((3, 1), 1100), ((2, 2), 300), ((5, 1), 96), ((7, 3), 200)]
NAMES = ["".join(f"{n}x" for n in (*rows, K))[:-1] for rows, K in CASES]


def make_tensors(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes]


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def activate(name: str, x: Tensor) -> Tensor:
    return {"": lambda: x, "silu": lambda: x / (1 + (-x).exp()), "sigmoid": lambda: 1 / (1 + (-x).exp())}[name]()


def assert_close(found: Tensor, plain: Tensor, true: Tensor) -> None:
    """At most twice the error of the same mathematics in plain low precision."""
    assert found.dtype == plain.dtype and found.shape == true.shape
    floor = 4 * torch.finfo(torch.float32).eps * true.abs().max().item()
    assert (found.double() - true).abs().max().item() <= 2 * (plain.double() - true).abs().max().item() + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_maps_are_plain_sums(case: tuple, dtype: torch.dtype) -> None:
    rows, K = case
    x, norm, one, two, three, residual = make_tensors(
        K, (*rows, K), (K,), (17, K), (3, K), (40, K), (*rows, 17), dtype=dtype
    )
    asked = [(one, ""), (two, "sigmoid"), (three, "silu")]
    for maps in (asked[:1], asked[1:], asked):
        found = kernels.linear(x, *maps, norm=(norm, EPS))
        for y, (weight, name) in zip(found, maps, strict=True):
            true = activate(name, normalize(x.double(), norm.double()) @ weight.double().T)
            assert_close(y, activate(name, normalize(x, norm) @ weight.T), true)
    (y,) = kernels.linear(x, (one, ""), residual=residual)
    assert_close(y, residual + x @ one.T, residual.double() + x.double() @ one.double().T)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_first_half_of_a_gated_map_is_the_gate(case: tuple) -> None:
    rows, K = case
    x, norm, weight = make_tensors(K, (*rows, K), (K,), (2 * 21, K), dtype=torch.float32)
    (y,) = kernels.linear(x, (weight, "silu"), norm=(norm, EPS), is_gated=True)
    gate, times = (normalize(x.double(), norm.double()) @ weight.double().T).chunk(2, -1)
    plain_gate, plain_times = (normalize(x, norm) @ weight.T).chunk(2, -1)
    assert_close(y, activate("silu", plain_gate) * plain_times, activate("silu", gate) * times)


def test_what_lies_behind_the_rows_is_neither_read_nor_written() -> None:
    x, weight = make_tensors(1, (5, 40), (9, 40), dtype=torch.float32)
    poisoned = torch.full((8, 40), float("nan"), device=DEVICE)
    poisoned[:5] = x
    assert torch.equal(kernels.linear(poisoned[:5], (weight, ""))[0], kernels.linear(x, (weight, ""))[0])


def test_a_row_is_the_same_in_any_company() -> None:
    """As far as a tile goes: of rows that share one, none enters another's sum."""
    x, weight, norm = make_tensors(2, (4, 40), (9, 40), (40,), dtype=torch.float32)
    whole = kernels.linear(x, (weight, "silu"), norm=(norm, EPS))[0]
    other = torch.full_like(x, float("nan"))
    other[2] = x[2]
    assert torch.equal(kernels.linear(other, (weight, "silu"), norm=(norm, EPS))[0][2], whole[2])


def test_many_rows_are_left_to_a_library() -> None:
    assert kernels.has_few_rows(torch.zeros(launch_table.MAX_LINEAR_ROWS, 1, 8))
    assert not kernels.has_few_rows(torch.zeros(launch_table.MAX_LINEAR_ROWS + 1, 1, 8))
