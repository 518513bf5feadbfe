"""What every launcher needs on the host: strides, sizes, a second stream. Nothing here synchronises with the device."""

# What torch.library itself does below autograd has no public name.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor


# Plain integers: Triton's own helpers of these names cost several microseconds per call on the host.
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded_width(width: int) -> int:
    """The power of two that this many elements occupy in a tile."""
    return 1 << (width - 1).bit_length()


def make_rows_contiguous(x: Tensor) -> Tensor:
    """`x` [B, T, H, D], copied only where its last axis is not contiguous or 256 steps of its second overflow 32 bits.

    The kernels read whole rows, and offsets inside a tile are 32-bit; everything outside the tile is 64-bit.
    """
    return x if x.stride(3) == 1 and x.stride(1) < 2**23 else x.contiguous()


def check_no_chunk_gradients(first: int) -> None:
    """Raise NotImplementedError where queries did not begin with the first key."""
    if first:
        raise NotImplementedError(
            f"backend = 'triton' has no gradients of Span.chunk({first}, ...); use backend='torch', or torch.no_grad()"
        )


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """As torch.library.register_autograd, for an operator whose arguments all go by position.

    PyTorch's own asks the schema for the defaults of arguments at each call, which takes .13 ms for seventeen of them, a
    tenth of the host's time of a forward and backward pass; here they are asked for once.
    """
    op = getattr(torch.ops.nsa_lab, name).default
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def forward(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = op(*inputs)
            setup_context(ctx, inputs, output)
        return output

    node = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def differentiable(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return node.apply(*inputs, *defaults[len(inputs) :])  # PyTorch leaves out what is as by default
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    torch.library.impl(f"nsa_lab::{name}", "Autograd", differentiable)


def get_strides(*tensors: Tensor) -> tuple[int, ...]:
    """All strides but the last of each tensor, one after another: how a launch passes them."""
    return tuple(stride for x in tensors for stride in x.stride()[:-1])


@functools.cache
def _get_second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def run_on_second_stream(device: torch.device) -> Generator[Callable[[], None], None, None]:
    """What is launched inside may run at the same time as what is launched after it.

    Yields a function: what is launched after calling it waits for all that was launched inside. What is launched inside
    starts after all that was launched before. A tensor that it reads must live until the function is called; one made
    inside needs no care: its memory is given out again inside only, and that starts after all that was launched before. A
    CUDA graph records this like anything else. On a CPU, where nothing runs beside anything, it does nothing.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    second, first = _get_second_stream(device), torch.cuda.current_stream(device)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        yield lambda: first.wait_stream(second)
