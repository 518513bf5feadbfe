"""Kernel tests run on the GPU if there is one, and under Triton's interpreter on a CPU if not (tests/conftest.py).

The rule of error is flash-attention's: against float64, a kernel may err at most `factor` times what the same mathematics
written plainly in its own dtype errs (2 forward, 3 backward).
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """||actual - exact|| / ||exact||, NaN where anything is NaN; the root mean square error where `exact` is all zero."""
    difference = (actual.double() - exact.double()).norm().item()
    return difference / (exact.double().norm().item() or max(exact.numel(), 1) ** 0.5)


@pytest.fixture
def assert_error_within():
    """assert_error_within(name, actual, exact, plain, factor): the rule above, never asking for less than one rounding."""

    def check(name: str, actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, factor: float) -> None:
        assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
        error = relative_error(actual, exact)
        allowed = factor * max(relative_error(plain, exact), torch.finfo(actual.dtype).eps)
        assert error <= allowed, f"{name}: error {error:.2e} against float64, allowed {allowed:.2e}"

    return check
