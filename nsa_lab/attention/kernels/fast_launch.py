"""How a kernel is launched: `kernel[grid](...)`, as everywhere with Triton, at less of the host's time.

Triton binds the arguments of every launch anew, works out what it compiles for, and writes the compiler's options into a
string to look the kernel up: 20 us of each launch. What it compiles for is little, though: the dtype of a tensor, and
whether its address is a multiple of 16; whether a number is 1, is a multiple of 16, and fits 32 bits; all that is constant.
The first launch of such a kind is Triton's own here, and the kernel that it gives back is launched for others of its kind.
What Triton reads anew at every launch, knobs for debugging and hooks before a run, counts at the first.
"""

# Triton has no types for what is reached here.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nsa_lab.attention.kernels.launch_table import is_amd

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
CAN_CACHE_LAUNCHES = not is_amd() and (3, 6) <= _VERSION < (3, 8)
"""Whether a kernel that was compiled takes all arguments in their order, and depends on no more than `_kinds` says. Read in
Triton 3.6 and 3.7: older ones want those left out that are constant, of newer ones nobody knows yet, and for AMD's GPUs it
asks how large a tensor is."""


def _make_specialization_key(args: tuple[Any, ...]) -> tuple[object, ...]:
    """What Triton compiles for, of arguments that are not constant: at least as fine as it tells them apart."""
    return tuple(
        [
            (x & 15 == 0) + 2 * (x == 1) + 4 * (not -(2**31) <= x < 2**31)
            if type(x) is int
            else (x.dtype, x.data_ptr() & 15 == 0)
            if isinstance(x, Tensor)
            else (type(x), x)
            for x in args
        ]
    )


def _get_device_index(args: tuple[Any, ...]) -> int:
    """The number of the GPU that the first tensor lies on; -1 where there is none."""
    for x in args:
        if isinstance(x, Tensor):
            return x.get_device()
    return -1


class CachedLauncher:
    """A function under triton.jit whose constants come last, to be launched on the GPU that its tensors lie on."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        constant = [param.is_constexpr for param in kernel.params]
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.n_runtime_args = constant.index(True) if True in constant else len(constant)
        if not all(constant[self.n_runtime_args :]):
            raise TypeError(f"{kernel.__name__}: expected all tl.constexpr behind all other parameters")
        self._compiled: dict[object, CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        current, device = driver.active.get_current_device(), _get_device_index(args)
        if device not in (current, -1):
            with torch.cuda.device(device):
                self._launch(grid, *args, **options)
            return
        if not is_launch_enabled():
            self.kernel.run(*args, grid=grid, warmup=True, **options)
            return
        if not CAN_CACHE_LAUNCHES:
            self.kernel[grid](*args, **options)
            return
        if len(args) < self.n_runtime_args:
            raise TypeError(
                f"{self.kernel.__name__}: expected all of {', '.join(self.arg_names[: self.n_runtime_args])} by position"
            )
        key = (
            current,
            _make_specialization_key(args[: self.n_runtime_args]),
            args[self.n_runtime_args :],
            tuple(options),
            tuple(options.values()),
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*args, **options)
            if isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled
            return
        constants = (options[name] for name in self.arg_names[len(args) :])
        compiled[(*grid, 1, 1)](*args, *constants)


def cache_launches(kernel: Any) -> Any:
    """Of what triton.jit gives; the interpreter's functions stay as they are."""
    return CachedLauncher(kernel) if isinstance(kernel, JITFunction) else kernel


@contextlib.contextmanager
def disable_launches() -> Generator[None]:
    """Within, in this thread, a launch of ours compiles its kernel and ends there: Triton's own warm-up."""
    token = _launch_enabled.set(False)
    try:
        yield
    finally:
        _launch_enabled.reset(token)


def is_launch_enabled() -> bool:
    """Whether this thread is not within `launching_nothing`."""
    return _launch_enabled.get()


_launch_enabled = ContextVar("launching", default=True)
