"""Launch Triton kernels with less host time. The syntax is Triton's own: `kernel[grid](...)`.

At every launch Triton binds the arguments, computes the specialization key, and formats the compiler options into a string
to look up the compiled kernel, which takes 20 us. The specialization depends on little: the dtype of a tensor and whether
its address is a multiple of 16; whether an integer is 1, is a multiple of 16, and fits in 32 bits; and all constants. Here
the first launch with a specialization goes through Triton, and the compiled kernel that it returns is cached and launched
directly for all later calls with the same specialization. Debugging knobs and pre-run hooks, which Triton reads at every
launch, take effect only at the first one.
"""

# Triton has no type annotations for these objects.
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
"""True if a compiled kernel takes all arguments in order and depends only on `_make_specialization_key`.

This was verified in the sources of Triton 3.6 and 3.7. Older versions omit constant arguments, newer ones are untested, and
on AMD GPUs the specialization also depends on the size of a tensor.
"""


def _make_specialization_key(args: tuple[Any, ...]) -> tuple[object, ...]:
    """Return a key of the properties of runtime arguments that Triton specializes on. It distinguishes at least as much."""
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
    """Return the index of the GPU of the first tensor, or -1 if it is on a CPU or there is no tensor."""
    for x in args:
        if isinstance(x, Tensor):
            return x.get_device()
    return -1


class CachedLauncher:
    """A triton.jit function whose tl.constexpr parameters come last. It is launched on the GPU of its tensors."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        constant = [param.is_constexpr for param in kernel.params]
        self.kernel, self.arg_names = kernel, kernel.arg_names
        self.n_runtime_args = constant.index(True) if True in constant else len(constant)
        if not all(constant[self.n_runtime_args :]):
            raise TypeError(f"{kernel.__name__}: expected all tl.constexpr parameters after all other parameters")
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
                f"{self.kernel.__name__}: expected {', '.join(self.arg_names[: self.n_runtime_args])} by position"
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
    """Wrap a triton.jit function in a `CachedLauncher`. Functions of the interpreter are returned unchanged."""
    return CachedLauncher(kernel) if isinstance(kernel, JITFunction) else kernel


@contextlib.contextmanager
def disable_launches() -> Generator[None]:
    """Compile kernels without launching them (Triton's warm-up) in the `with` body, in this thread only."""
    token = _launch_enabled.set(False)
    try:
        yield
    finally:
        _launch_enabled.reset(token)


def is_launch_enabled() -> bool:
    """Return False inside `disable_launches` in this thread, otherwise True."""
    return _launch_enabled.get()


_launch_enabled = ContextVar("launching", default=True)
