"""What torch.compile is not to look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which torch.compile steps around: as torch.compiler.disable, which loads the compiler at once."""
    return torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
