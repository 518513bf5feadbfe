"""System metrics of the training process: memory of process, GPU and tensors, and GPU utilization."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def get_resident_bytes() -> int:
    """Return the resident memory of this process; its peak if /proc is not available."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def get_memory_capacity(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine, limited by the control group."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        cgroup_limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        # Not Linux, or no such limit.
        return installed
    return min(installed, int(cgroup_limit)) if cgroup_limit.isdecimal() else installed


def get_peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def count_bytes_by_dtype(tensors: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of tensors on this rank by dtype (`float32`).

    A sharded tensor counts its local shard. Values that are not tensors are ignored.
    """
    n_bytes: dict[str, int] = {}
    for value in tensors:
        if isinstance(value, torch.Tensor):
            to_local = getattr(value, "to_local", None)
            tensor = to_local() if to_local else value
            name = str(tensor.dtype).removeprefix("torch.")
            n_bytes[name] = n_bytes.get(name, 0) + tensor.numel() * tensor.element_size()
    return n_bytes


def compute_percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is at least as large as `fraction` of `values`; 0 if there are none."""
    return sorted(values)[max(math.ceil(fraction * len(values)), 1) - 1] if values else 0.0


def make_gpu_utilization_reader(device: torch.device) -> tuple[Any, str | None]:
    """Return a function that reads the GPU utilization in percent, or None, and the reason if it returns None."""
    if device.type != "cuda":
        return lambda: None, "the device is a CPU"
    try:
        torch.cuda.utilization(device)
    except (ModuleNotFoundError, RuntimeError) as error:
        return lambda: None, str(error).splitlines()[0]
    return lambda: float(torch.cuda.utilization(device)), None
