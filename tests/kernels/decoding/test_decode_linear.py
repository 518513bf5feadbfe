"""Linear layers of few rows, with norm, activation and residual, against float64."""

from __future__ import annotations

import pytest
import torch
from looping import looped
from torch import Tensor

from nsa_lab.attention import kernels
from nsa_lab.attention.kernels.decoding import decoding_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-2  # large enough to change the result
# Rows, K: fewer and more rows than a tensor-core product; odd depths, and several chunks of them.
CASES = [((1, 1), 48), ((3, 1), 1100), ((2, 2), 300), ((5, 1), 96), ((7, 3), 200)]


def make_tensors(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def activate(name: str, x: Tensor) -> Tensor:
    return {"": lambda: x, "silu": lambda: x / (1 + (-x).exp()), "sigmoid": lambda: 1 / (1 + (-x).exp())}[name]()


def assert_close(actual: Tensor, plain: Tensor, true: Tensor) -> None:
    """Assert at most twice the error of the same computation in plain low precision."""
    assert actual.dtype == plain.dtype and actual.shape == true.shape
    floor = 4 * torch.finfo(torch.float32).eps * true.abs().max().item()
    assert (actual.double() - true).abs().max().item() <= 2 * (plain.double() - true).abs().max().item() + floor


@pytest.mark.slow
@looped
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_linear_equals_loops(case: tuple, dtype: torch.dtype) -> None:
    rows, K = case
    x, norm, weight_a, weight_b, weight_c, residual = make_tensors(
        K, (*rows, K), (K,), (17, K), (3, K), (40, K), (*rows, 17), dtype=dtype
    )
    all_projections = [(weight_a, ""), (weight_b, "sigmoid"), (weight_c, "silu")]
    for projections in (all_projections[:1], all_projections[1:], all_projections):
        outputs = kernels.linear(x, *projections, norm=(norm, EPS))
        for y, (weight, activation) in zip(outputs, projections, strict=True):
            true = activate(activation, normalize(x.double(), norm.double()) @ weight.double().T)
            assert_close(y, activate(activation, normalize(x, norm) @ weight.T), true)
    (y,) = kernels.linear(x, (weight_a, ""), residual=residual)
    assert_close(y, residual + x @ weight_a.T, residual.double() + x.double() @ weight_a.double().T)


@looped
@pytest.mark.parametrize("case", CASES)
def test_first_half_of_a_gated_layer_is_the_gate(case: tuple) -> None:
    rows, K = case
    x, norm, weight = make_tensors(K, (*rows, K), (K,), (2 * 21, K), dtype=torch.float32)
    (y,) = kernels.linear(x, (weight, "silu"), norm=(norm, EPS), is_gated=True)
    gate, factor = (normalize(x.double(), norm.double()) @ weight.double().T).chunk(2, -1)
    plain_gate, plain_factor = (normalize(x, norm) @ weight.T).chunk(2, -1)
    assert_close(y, activate("silu", plain_gate) * plain_factor, activate("silu", gate) * factor)


def test_nothing_past_the_rows_is_read_or_written() -> None:
    x, weight = make_tensors(1, (5, 40), (9, 40), dtype=torch.float32)
    poisoned = torch.full((8, 40), float("nan"), device=DEVICE)
    poisoned[:5] = x
    assert torch.equal(kernels.linear(poisoned[:5], (weight, ""))[0], kernels.linear(x, (weight, ""))[0])


@pytest.mark.parametrize("rows", [4, 7])
def test_row_does_not_depend_on_other_rows(rows: int) -> None:
    """Rows of one tile do not enter the sums of each other."""
    x, weight, norm = make_tensors(2, (rows, 40), (9, 40), (40,), dtype=torch.float32)
    expected = kernels.linear(x, (weight, "silu"), norm=(norm, EPS))[0]
    other = torch.full_like(x, float("nan"))
    other[2] = x[2]
    assert torch.equal(kernels.linear(other, (weight, "silu"), norm=(norm, EPS))[0][2], expected[2])


def test_many_rows_use_pytorch() -> None:
    assert kernels.has_few_rows(torch.zeros(decoding_table.MAX_LINEAR_ROWS, 1, 8))
    assert not kernels.has_few_rows(torch.zeros(decoding_table.MAX_LINEAR_ROWS + 1, 1, 8))
