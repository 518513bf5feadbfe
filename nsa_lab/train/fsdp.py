"""FSDP2 helpers for `World`, which imports this module only if weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module) -> nn.Module:
    """Shard the model in place: each block separately, then the remaining parameters."""
    for block in getattr(model, "blocks", []):
        fully_shard(block)
    fully_shard(model)
    return model


@contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """Gather all weights on every rank, for calls that bypass the model's `forward`. Collective: all ranks must call it."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def full_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def distribute_like(value: Tensor, reference: Tensor) -> Tensor:
    return (
        distribute_tensor(value, reference.device_mesh, reference.placements) if isinstance(reference, DTensor) else value
    )
