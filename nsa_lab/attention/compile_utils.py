"""Exclude functions from torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` excluded from tracing, like torch.compiler.disable, but without importing the compiler now."""
    return torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
