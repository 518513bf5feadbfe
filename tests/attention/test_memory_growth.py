"""Memory of the torch backend is linear in T: it allocates no tensor with T*T or T*N elements."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from attention_inputs import Shape
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_lab import attention
from nsa_lab.attention import torch_backend
from nsa_lab.config import NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=32)
PATHS = {"masking": 10**6, "gathering": 0}  # GATHER_MIN_BUDGETS


@pytest.fixture(autouse=True)
def _use_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "CHUNK_BYTES", {"cpu": 2**14})


class Allocations(TorchDispatchMode):
    """Record the largest tensor and the peak of allocated bytes; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // x.element_size())
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


def measure_allocations(T: int, backend: str) -> Allocations:
    """Run forward and backward of all three branches."""
    inputs = Shape(NSA, T=T, d_k=4, d_v=4).inputs(torch.float32).map(lambda x: x.requires_grad_())
    gc.collect()
    with Allocations() as seen:
        attention.nsa_attention(*inputs, NSA, backend=backend).square().sum().backward()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_memory_is_linear_in_tokens(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GATHER_MIN_BUDGETS", PATHS[path])
    once, twice = measure_allocations(192, "torch"), measure_allocations(384, "torch")
    assert twice.largest <= 2.05 * once.largest
    assert twice.peak_bytes <= 2.2 * once.peak_bytes
    assert twice.largest < 384 * 384 / 8


def test_reference_memory_is_quadratic_in_tokens() -> None:
    """The measurement detects full score matrices."""
    once, twice = measure_allocations(128, "reference"), measure_allocations(256, "reference")
    assert twice.largest >= 3.9 * once.largest
    assert twice.peak_bytes > 3 * once.peak_bytes


@pytest.mark.slow
def test_memory_is_freed_with_the_results() -> None:
    """All buffers are freed after a call."""
    with Allocations() as seen:
        for seed in range(3):
            inputs = Shape(NSA, T=64, seed=seed).inputs().map(lambda x: x.requires_grad_())
            attention.nsa_attention(*inputs, NSA, backend="torch").sum().backward()
            del inputs
            gc.collect()
            alive = [ref for ref, _ in seen._alive.values() if not ref.expired()]
            assert not alive
