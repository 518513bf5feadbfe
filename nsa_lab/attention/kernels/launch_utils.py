"""Host functions that launchers share: strides, sizes, operator registration, a second stream. They never synchronize."""

# The dispatch below autograd that torch.library uses has no public name.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor


# For plain integers: Triton's functions of the same names cost several microseconds of host time per call.
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded_width(width: int) -> int:
    """Return `width` rounded up to a power of two: the size of the tile axis that holds it."""
    return 1 << (width - 1).bit_length()


def make_rows_contiguous(x: Tensor) -> Tensor:
    """Return `x` [B, T, H, D], copied only if its last axis is not contiguous or 256 steps along axis 1 overflow 32 bits.

    The kernels read whole rows. Offsets inside a tile have 32 bits, all others 64.
    """
    return x if x.stride(3) == 1 and x.stride(1) < 2**23 else x.contiguous()


class _GradientWithoutDerivative(torch.autograd.Function):
    """Return a gradient that depends on `sources`, and raise if it is differentiated with respect to them."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise NotImplementedError(
            "backend = 'triton' has no second derivatives: its gradients cannot be differentiated (create_graph=True, "
            "gradient penalties, Hessians); use backend='torch', which has them"
        )


class _SavedTensors:
    """Attributes of an autograd context. Saved tensors are unpacked once, as activation checkpointing requires."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors: tuple[Tensor | None, ...] = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Register the backward pass, as torch.library.register_autograd, for an operator with positional arguments only.

    PyTorch's function reads the default values of arguments from the schema at each call. For seventeen arguments this
    takes 0.13 ms, a tenth of the host time of a forward and backward pass. Here the defaults are read once.
    """
    op = getattr(torch.ops.nsa_lab, name).default
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def forward(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = op(*inputs)
            setup_context(ctx, inputs, output)
        return output

    def backward_once(ctx: Any, *grad_outputs: Any) -> Any:
        if not torch.is_grad_enabled():  # it is enabled if the backward pass is to be differentiated (create_graph=True)
            return backward(ctx, *grad_outputs)
        saved = _SavedTensors(ctx)
        with torch.no_grad():
            grads = backward(saved, *grad_outputs)
        tensors: tuple[Tensor | None, ...] = (*grad_outputs, *saved.saved_tensors)
        sources = [x for x in tensors if x is not None and x.requires_grad]
        return tuple(None if grad is None else _GradientWithoutDerivative.apply(grad, *sources) for grad in grads)

    node = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward_once)}
    )

    def differentiable(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return node.apply(*inputs, *defaults[len(inputs) :])  # PyTorch omits trailing arguments that equal a default
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    torch.library.impl(f"nsa_lab::{name}", "Autograd", differentiable)


def get_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return all strides except the last of each tensor, concatenated in the order of the kernel arguments."""
    return tuple(stride for x in tensors for stride in x.stride()[:-1])


@functools.cache
def _get_second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def run_on_second_stream(device: torch.device) -> Generator[Callable[[], None], None, None]:
    """Launch the kernels of the `with` body on a second stream, so that they can overlap with kernels launched after it.

    Yields a function `join`: kernels launched after calling it wait for the body. Kernels of the body start after
    all kernels launched before the body. Tensors that the body reads must stay alive until `join` is called. Tensors
    allocated in the body need no care: the allocator reuses their memory only on the second stream. A CUDA graph can
    capture all of this. On a CPU the function does nothing.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    second, first = _get_second_stream(device), torch.cuda.current_stream(device)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        yield lambda: first.wait_stream(second)
