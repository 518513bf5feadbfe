"""Fixtures of the kernel tests. The tests run on a GPU, or under Triton's interpreter on a CPU (tests/conftest.py).

The error limit is the rule of flash-attention: the error against float64 may be at most `factor` times the error of a plain
PyTorch implementation in the same dtype (2 forward, 3 backward).
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned():
    """Fill new tensors with NaN, so that elements that no kernel writes are visible."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ||actual - exact|| / ||exact||, NaN if anything is NaN; the root mean square error if `exact` is zero."""
    difference = (actual.double() - exact.double()).norm().item()
    return difference / (exact.double().norm().item() or max(exact.numel(), 1) ** 0.5)


@pytest.fixture
def assert_error_within():
    """assert_error_within(name, actual, exact, plain, factor): the rule above; the limit is at least one rounding."""

    def check(name: str, actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, factor: float) -> None:
        assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
        error = relative_error(actual, exact)
        allowed = factor * max(relative_error(plain, exact), torch.finfo(actual.dtype).eps)
        assert error <= allowed, f"{name}: error {error:.2e} against float64, allowed {allowed:.2e}"

    return check
