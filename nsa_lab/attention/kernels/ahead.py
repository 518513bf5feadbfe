"""Kernels compiled ahead of their first launch, several at once.

By itself Triton compiles a kernel when it is launched for the first time, and the launch waits: some thirty kernels, one
after another, for the operator forward and backward. Here they are queued as they come up, and threads compile them;
Triton lets go of Python's lock for most of the way. What is compiled lies in Triton's cache on the disk, where every later
process finds it.
"""

# Triton has no types for what is reached here.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction


def compile_ahead(work: Callable[[], object], threads: int) -> int:
    """Compile every kernel that `work` would launch, in `threads` threads, and launch none of them; how many there were.

    Nothing is computed, so results of kernels are whatever memory held: `work` must not use them as indices, nor in a
    decision. Gradients are worked out in this thread. Raises NotImplementedError for a Triton that cannot compile in
    parallel, and what compiling raises.
    """
    if not hasattr(triton, "AsyncCompileMode"):
        raise NotImplementedError(
            f"compiling ahead takes a Triton with AsyncCompileMode, and this is {triton.__version__}: upgrade triton, or "
            "let the first step compile"
        )
    # Autograd has a thread per GPU, which would know nothing of the mode that this thread is in.
    with (
        torch.autograd.set_multithreading_enabled(False),
        ThreadPoolExecutor(threads) as pool,
        _launching_nothing(),
        triton.AsyncCompileMode(pool) as mode,
    ):
        work()
    return len(mode.future_kernels)


@contextlib.contextmanager
def _launching_nothing() -> Generator[None]:
    """Within, a launch compiles its kernel and ends there: Triton's own warm-up, for every kernel of this process."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
