"""Exclude functions from torch.compile; refuse transforms and traces that the backends do not support, with the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` excluded from tracing, like torch.compiler.disable, but without importing the compiler now."""
    return torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def is_exporting() -> bool:
    """Return whether torch.export traces; False under torch.compile.

    `torch.compiler.is_exporting` is True under torch.compile, too, in torch 2.11 (False from 2.13 on), and missing in 2.6.
    Its flag is right in all of them; in 2.6 torch.export is not supported.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether this is inside of a transform of torch.func, or one of `tensors` has a tangent of forward-mode
    differentiation.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore
        return True
    return _has_tangent(*tensors)


def is_forward_mode(*tensors: Tensor | None) -> bool:
    """Return whether derivatives are computed in forward mode: a transform of torch.func does it (jvp, jacfwd, linearize,
    hessian), or one of `tensors` has a tangent.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch  # pyright: ignore
    transforms = functorch.get_interpreter_stack() or ()  # pyright: ignore
    return any(x.key() == functorch.TransformType.Jvp for x in transforms) or _has_tangent(*tensors)  # pyright: ignore


def _has_tangent(*tensors: Tensor | None) -> bool:
    unpack = forward_ad.unpack_dual  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return any(x is not None and unpack(x).tangent is not None for x in tensors)


def check_no_transform(backends: Iterable[str], *tensors: Tensor | None, supported: str = "reference") -> None:
    """Raise NotImplementedError if `is_transformed`, unless all of `backends` are the one that PyTorch differentiates."""
    if not is_transformed(*tensors):
        return
    unsupported = next((name for name in backends if name != supported), None)
    if unsupported is not None:
        raise NotImplementedError(
            "torch.func (grad, vmap, jvp, linearize) and torch.autograd.forward_ad: "
            f"backend = {unsupported!r} does not support them, because its backward pass is written by hand; use "
            f"backend={supported!r}, or torch.autograd.grad and batches"
        )


def check_not_traced() -> None:
    """Raise NotImplementedError inside of torch.jit.trace."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise NotImplementedError(
            "torch.jit.trace: not supported, because a trace is valid only for the length that it saw: block selection "
            "depends on it; use torch.export.export with dynamic_shapes, or torch.compile"
        )
