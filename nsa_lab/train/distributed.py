"""The ranks of a run: who this process is, and the few collectives that training needs.

Ranks come from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or from the
`--ranks` option of `python -m nsa_lab.train`, which sets the same variables. Without them there is one rank and no
process group.

With `runtime.parallel: ddp` every rank holds the model. With `fsdp` (FSDP2) weights, gradients and moments are sharded over
the ranks, and `full` and `like` go between a sharded tensor and a plain one. What that needs of torch takes most of a
second to load, so fsdp.py, which holds it, is imported only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from nsa_lab.config import divide_among_ranks

# Filling shards on the first rank can take long; a collective that waits longer than this has lost a partner.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    is_sharded: bool = False

    @classmethod
    def from_environment(cls) -> World:
        """The rank that torchrun gave this process; one rank if it was not started so."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    def init_process_group(self, device: torch.device) -> None:
        if self.size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT)

    def destroy_process_group(self) -> None:
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def get_sequence_share(self, n_sequences: int) -> tuple[int, int]:
        """First sequence and number of sequences of a step that this rank takes."""
        count = divide_among_ranks(n_sequences, self.size)
        return self.rank * count, count

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it is called: it averages gradients over the ranks in its backward pass. FSDP shards it in place."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.shard(model)
        if self.size == 1:
            return model
        # Buffers are tables that every rank computes alike; gradients are averaged where they lie, not in copies.
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def unshard(self, model: nn.Module) -> AbstractContextManager:
        """All weights of a sharded model on every rank, for calls that go around its own `forward`; every rank must ask."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.unshard(model)
        return nullcontext()

    def sync_gradients(self, forward: Callable[..., Any], *, enabled: bool) -> AbstractContextManager:
        """Copies exchange gradients in the last micro-batch only; shards in each, or they would have to be kept whole."""
        if enabled or not isinstance(forward, DistributedDataParallel):
            return nullcontext()
        return forward.no_sync()

    def all_reduce(self, values: Tensor) -> Tensor:
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def full_tensor(self, value: Tensor) -> Tensor:
        """A plain tensor from a sharded one, which every rank must ask for."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.full_tensor(value)
        return value

    def distribute_like(self, value: Tensor, reference: Tensor) -> Tensor:
        """A plain tensor sharded as `pattern` is."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.distribute_like(value, reference)
        return value

    def any_rank(self, flag: bool, device: torch.device) -> bool:
        """Whether any rank says yes; every rank must ask. Waits for the device."""
        if self.size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(float(flag), device=device)).item())

    def broadcast_from_first(self, value: float, device: torch.device) -> float:
        """The first rank's value, on every rank; every rank must ask. Waits for the device."""
        if self.size == 1:
            return value
        return self.all_reduce(torch.tensor(value if self.is_first else 0.0, dtype=torch.float64, device=device)).item()
