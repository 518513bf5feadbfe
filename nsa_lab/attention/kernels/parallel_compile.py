"""Kernels compiled several at once, ahead of their first launch.

By itself Triton compiles a kernel when it is launched for the first time, and the launch waits: some fifteen kernels, one
after another, for the operator forward and backward. Here they are queued as they come up, and threads compile them;
Triton lets go of Python's lock for most of the way. What is compiled lies in Triton's cache on the disk, where every later
process finds it. So does what a kernel is launched by: before Triton 3.7 that is a function in C for each list of
arguments, a third of a second of the C compiler's.
"""

# Triton has no types for what is reached here.
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
    """Compile every kernel that `work` would launch, in `threads` threads, and launch none of them; how many there were.

    Nothing is computed, so results of kernels are whatever memory held: `work` must not use them as indices, nor in a
    decision. Gradients are worked out in this thread. Raises NotImplementedError for a Triton that cannot compile in
    parallel, and what compiling raises, unless errors are ignored: a kernel that does not compile, or that the GPU has no
    room for, then says so when it is launched.
    """
    if not CAN_COMPILE_IN_PARALLEL:
        raise NotImplementedError(
            f"compiling ahead takes a Triton with AsyncCompileMode, and this is {triton.__version__}: upgrade triton, or "
            "let the first step compile"
        )
    with ThreadPoolExecutor(n_threads) as pool:
        # Autograd has a thread per GPU, which would know nothing of the mode that this thread is in.
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
    """What Triton does of a kernel when it is launched for the first time: its launcher, and the kernel on the GPU."""
    if not compiled or not hasattr(driver.active, "launcher_cls"):
        return  # the latter compiles for a GPU that is not there
    device = driver.active.get_current_device()

    def make(kernel: CompiledKernel) -> None:
        try:
            # Which GPU is the current one is each thread's own.
            with torch.cuda.device(device):
                _ = kernel.run  # made, and the kernel loaded, when it is first asked for
        except Exception:
            if not ignore_errors:
                raise

    list(pool.map(make, compiled))


@contextlib.contextmanager
def _restore_async_mode() -> Generator[None]:
    """Triton's mode is over after it, also where a kernel did not compile or somebody lost patience: Triton itself leaves
    the mode only once all has compiled, and until then compiles nothing more in this thread."""
    before = _active_mode.get()
    try:
        yield
    finally:
        _active_mode.set(before)


def try_compile_in_parallel(work: Callable[[], object]) -> bool:
    """`compile_ahead` with a thread for each core, where that is possible and not under way; whether it was."""
    possible = CAN_COMPILE_IN_PARALLEL and not IS_INTERPRETED and not _is_compiling()
    if possible:
        compile_in_parallel(work, os.cpu_count() or 1)
    return possible


def _is_compiling() -> bool:
    """Whether this thread compiles ahead already, by us or by Triton's own mode."""
    return not is_launch_enabled() or _active_mode.get() is not None


def compile_before_first_call(compute: Callable[..., R]) -> Callable[..., R]:
    """`compute` with its kernels compiled in parallel where a call is the first of its kind: of these widths, heads and
    geometry, of about this many tokens. Such a call is made twice, at first without a launch.

    Three tensors [B, T, heads, width] come first. Kinds are told apart roughly: what a later call of the same kind wants
    besides is compiled when it is launched.
    """
    known: set[object] = set()

    @functools.wraps(compute)
    def computed(*args: Any) -> R:
        (batch, tokens, *_), rest = args[0].shape, args[3:]
        kind = (
            (args[0].dtype, batch.bit_length(), tokens.bit_length()),
            tuple([x.shape[2:] for x in args[:3]]),
            tuple([x.bit_length() if type(x) is int else x is None for x in rest]),
        )
        if kind not in known and try_compile_in_parallel(lambda: compute(*args)):
            known.add(kind)
        return compute(*args)

    return computed
