"""The ranks of a run: this process's rank, and the few collectives that training needs.

Ranks are configured by torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The
option `--ranks` of `python -m nsa_lab.train` sets the same variables. Without them there is one rank and no process
group.

With `runtime.parallel: ddp` every rank holds the full model. With `fsdp` (FSDP2) weights, gradients and optimizer moments
are sharded over the ranks; `full_tensor` and `distribute_like` convert between sharded and plain tensors.
torch.distributed.fsdp takes most of a second to import, so fsdp.py is imported only if it is needed.

All ranks must call a method that is marked as collective.
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

# Rank 0 may prepare the data for a long time. A collective that waits longer than this has lost a rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    is_sharded: bool = False

    @classmethod
    def from_environment(cls) -> World:
        """Return the rank that torchrun gave this process; one rank if it was not started by torchrun."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the run's files."""
        return self.rank == 0

    def init_process_group(self, device: torch.device) -> None:
        if self.size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT)

    def destroy_process_group(self) -> None:
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def get_sequence_share(self, n_sequences: int) -> tuple[int, int]:
        """Return (start, count) of this rank's sequences in a step of `n_sequences`."""
        count = divide_among_ranks(n_sequences, self.size)
        return self.rank * count, count

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` so that its backward pass averages gradients over the ranks. FSDP shards it in place."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.shard(model)
        if self.size == 1:
            return model
        # Buffers are tables that every rank computes identically. Gradients are averaged in place, without a copy.
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def unshard(self, model: nn.Module) -> AbstractContextManager:
        """Gather all weights of a sharded model, for calls that bypass its `forward`. Collective."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.unshard(model)
        return nullcontext()

    def sync_gradients(self, forward: Callable[..., Any], *, enabled: bool) -> AbstractContextManager:
        """Disable DDP's gradient exchange unless `enabled` (the last micro-batch of a step).

        FSDP reduces gradients in every micro-batch; deferring it would keep full gradients on every rank.
        """
        if enabled or not isinstance(forward, DistributedDataParallel):
            return nullcontext()
        return forward.no_sync()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks, in place. Return `values`."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def full_tensor(self, value: Tensor) -> Tensor:
        """Return the full tensor of a sharded one. Collective."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.full_tensor(value)
        return value

    def distribute_like(self, value: Tensor, reference: Tensor) -> Tensor:
        """Return a plain tensor sharded as `reference` is."""
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.distribute_like(value, reference)
        return value

    def any_rank(self, flag: bool, device: torch.device) -> bool:
        """Return whether `flag` is true on any rank. Collective; synchronizes with the device."""
        if self.size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(float(flag), device=device)).item())

    def broadcast_from_first(self, value: float, device: torch.device) -> float:
        """Return rank 0's value on every rank. Collective; synchronizes with the device."""
        if self.size == 1:
            return value
        return self.all_reduce(torch.tensor(value if self.is_first else 0.0, dtype=torch.float64, device=device)).item()
