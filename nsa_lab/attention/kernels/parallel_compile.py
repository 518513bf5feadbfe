"""Compile several kernels in parallel before their first launch.

Triton compiles a kernel at its first launch, and the launch waits: about fifteen kernels, one after another, for the
operator forward and backward. Here the kernels are queued when they are called, and threads compile them; Triton releases
the GIL most of the time. Compiled kernels are stored in Triton's cache on disk, and later processes reuse them. The
launcher of a kernel is cached as well: before Triton 3.7 it is a C function per argument list, which takes the C compiler
0.3 seconds.
"""

# Triton has no type annotations for these objects.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from nsa_lab.attention.kernels.fast_launch import disable_launches, is_launch_enabled
from nsa_lab.attention.kernels.tiles import IS_INTERPRETED

R = TypeVar("R")

CAN_COMPILE_IN_PARALLEL = hasattr(triton, "AsyncCompileMode")
_active_mode: Any = (
    importlib.import_module("triton.runtime._async_compile").active_mode if CAN_COMPILE_IN_PARALLEL else None
)


def compile_in_parallel(work: Callable[[], object], n_threads: int, *, ignore_errors: bool = False) -> int:
    """Compile every kernel that `work` would launch in `n_threads` threads without launching any. Return their number.

    The outputs of kernels are uninitialized memory: `work` must not use them as indices or in conditions. Autograd runs in
    this thread.

    Args:
        work: called once, with launches disabled.
        n_threads: kernels that are compiled at the same time.
        ignore_errors: do not raise if a kernel does not compile or exceeds the resources of the GPU; its launch raises.

    Raises:
        NotImplementedError: this version of Triton cannot compile in parallel.
    """
    if not CAN_COMPILE_IN_PARALLEL:
        raise NotImplementedError(
            f"parallel compilation needs Triton with AsyncCompileMode; this is {triton.__version__}: upgrade triton, or "
            "let the first step compile the kernels"
        )
    with ThreadPoolExecutor(n_threads) as pool:
        # Otherwise autograd would run the backward pass in a thread per GPU, where this thread's compile mode is not
        # active.
        with (
            torch.autograd.set_multithreading_enabled(False),
            disable_launches(),
            _restore_async_mode(),
            triton.AsyncCompileMode(pool, ignore_errors=ignore_errors) as mode,
        ):
            work()
        compiled = [future.kernel for future in mode.future_kernels.values()]
        _make_launchable([kernel for kernel in compiled if kernel is not None], pool, ignore_errors)
    return len(compiled)


def _make_launchable(compiled: list[CompiledKernel], pool: ThreadPoolExecutor, ignore_errors: bool) -> None:
    """Do what Triton does at the first launch of a kernel: build its launcher and load it onto the GPU.

    Threads only fill Triton's cache with launchers, and this thread loads them. Before Triton 3.7 all launchers are
    extension modules of one name, for which Python has one module object: a thread that loads a launcher again, for another
    kernel with the same argument types, can get the function of a launcher that another thread is loading.
    """
    if not compiled or not hasattr(driver.active, "launcher_cls"):
        return  # no launcher class: compiling for a GPU that this machine does not have

    def build(kernel: CompiledKernel) -> None:
        with contextlib.suppress(Exception):  # loading the kernel raises the error again
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    list(pool.map(build, compiled))
    for kernel in compiled:
        with contextlib.suppress(*[Exception] * ignore_errors):
            _ = kernel.run  # the first access builds the launcher and loads the kernel


@contextlib.contextmanager
def _restore_async_mode() -> Generator[None]:
    """Leave Triton's async compile mode after the `with` body, also after a compile error or an interrupt.

    Triton itself leaves the mode only after all kernels have compiled. Until then it would compile nothing in this thread.
    """
    previous_mode = _active_mode.get()
    try:
        yield
    finally:
        _active_mode.set(previous_mode)


def try_compile_in_parallel(work: Callable[[], object]) -> bool:
    """Call `compile_in_parallel` with a thread per core. Return False without effect if not possible or already active."""
    is_possible = CAN_COMPILE_IN_PARALLEL and not IS_INTERPRETED and not _is_compiling()
    if is_possible:
        compile_in_parallel(work, os.cpu_count() or 1)
    return is_possible


def _is_compiling() -> bool:
    """Return True if this thread is in `compile_in_parallel` or in Triton's own async compile mode."""
    return not is_launch_enabled() or _active_mode.get() is not None


def compile_before_first_call(compute: Callable[..., R]) -> Callable[..., R]:
    """Wrap `compute` so that its kernels are compiled in parallel before the first call of a kind.

    A kind is a dtype, widths, numbers of heads, geometry, and batch and length up to a power of two. The first call of a
    kind runs `compute` twice, first with launches disabled. The first argument is a tensor [B, T, heads, width]. Kinds are
    coarse: if a later call of the same kind needs another kernel, it is compiled at its launch.
    """
    compiled_kinds: set[object] = set()

    @functools.wraps(compute)
    def wrapper(*args: Any) -> R:
        batch, tokens, *_ = args[0].shape
        kind = (
            (args[0].dtype, batch.bit_length(), tokens.bit_length()),
            tuple([x.shape[2:] if isinstance(x, Tensor) else x.bit_length() if type(x) is int else x for x in args]),
        )
        if kind not in compiled_kinds and try_compile_in_parallel(lambda: compute(*args)):
            compiled_kinds.add(kind)
        return compute(*args)

    return wrapper
