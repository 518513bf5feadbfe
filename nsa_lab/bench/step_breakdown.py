"""Share of the time of a training or decode step per part, from a profile of its kernels."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch

from nsa_lab.attention.kernels.kernel_names import get_kernel_part
from nsa_lab.bench.timing import record_kernels

COMMUNICATION = "communication"
# Part of a step -> substrings of kernel names from other libraries; the first match counts.
OTHER_KERNELS = {
    COMMUNICATION: ("nccl",),
    "gemm": ("gemm", "nvjet", "cutlass", "splitk", "matmul", "xmma"),
    "dense attention": ("flash", "fmha", "sdpa", "attention"),
    "optimiser": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "copy": ("memcpy", "memset"),
}


def compute_breakdown(run: Callable[[], object], device: torch.device, n_runs: int = 2) -> dict[str, float]:
    """Return the share of the wall time of `run` per part, including `idle`; empty on a CPU.

    `communication`: the share in which only kernels of NCCL run, so nothing hides them.
    """
    kernels = record_kernels(lambda: [run() for _ in range(n_runs)], device)
    time_by_part = _sum_time_by_part((classify_kernel(name), start, end) for name, start, end in kernels)
    total = sum(time_by_part.values())
    return {part: us / total for part, us in sorted(time_by_part.items(), key=lambda item: -item[1]) if total}


def classify_kernel(kernel: str) -> str:
    """Return the part of a step that a kernel belongs to, by its name only: a replayed graph has no operators."""
    return get_kernel_part(kernel) or next(
        (part for part, words in OTHER_KERNELS.items() if any(word in kernel.lower() for word in words)), "elementwise"
    )


def _sum_time_by_part(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the time per part, given (part, start, end) of each kernel.

    Concurrent kernels share their time; communication gets none of it. Time without a kernel is `idle`.
    """
    edges = sorted((time, change, part) for part, *ends in kernels for time, change in zip(ends, (1, -1), strict=True))
    time_by_part, running = defaultdict[str, float](float, idle=0.0), Counter[str]()
    for (start, change, part), (end, *_) in itertools.pairwise(edges):
        running[part] += change
        computing = {name: count for name, count in running.items() if count and name != COMMUNICATION}
        active = computing or {COMMUNICATION if running[COMMUNICATION] else "idle": 1}
        for active_part, count in active.items():
            time_by_part[active_part] += (end - start) * count / sum(active.values())
    return dict(time_by_part)
