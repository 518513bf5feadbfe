"""What the trainer takes of the machine: memory of the process, of the GPU and of tensors, and how busy the GPU is."""

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
    """Resident memory of this process now; its peak where /proc is not at hand."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def get_memory_capacity(device: torch.device) -> int:
    """All the memory of a GPU, or of this machine, less where a control group grants less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        granted = CGROUP_LIMIT.read_text().strip()
    except OSError:
        # Another system than Linux, or no limit of this kind.
        return installed
    return min(installed, int(granted)) if granted.isdecimal() else installed


def get_peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: by tensors on a GPU, by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def count_bytes_by_dtype(tensors: Iterable[Any]) -> dict[str, int]:
    """Bytes that tensors hold on this rank, by dtype (`float32`); a sharded one counts its shard. Other values are none."""
    held: dict[str, int] = {}
    for value in tensors:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "to_local", None)
            own = local() if local else value
            name = str(own.dtype).removeprefix("torch.")
            held[name] = held.get(name, 0) + own.numel() * own.element_size()
    return held


def compute_percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of `values` that `share` of them do not exceed; 0 of none."""
    return sorted(values)[max(math.ceil(fraction * len(values)), 1) - 1] if values else 0.0


def make_gpu_utilization_reader(device: torch.device) -> tuple[Any, str | None]:
    """A function giving the GPU's utilisation in percent or None, and why it gives None."""
    if device.type != "cuda":
        return lambda: None, "the device is a CPU"
    try:
        torch.cuda.utilization(device)
    except (ModuleNotFoundError, RuntimeError) as error:
        return lambda: None, str(error).splitlines()[0]
    return lambda: float(torch.cuda.utilization(device)), None
