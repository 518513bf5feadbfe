"""Weights, gradients and moments sharded over the ranks, for `World`, which imports this only where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module) -> nn.Module:
    """Shard the model in place, each block of its own and then the rest."""
    for block in getattr(model, "blocks", []):
        fully_shard(block)
    fully_shard(model)
    return model


@contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """All weights on every rank, for calls that go around the model's own `forward`; every rank must ask."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def full_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def distribute_like(value: Tensor, reference: Tensor) -> Tensor:
    return (
        distribute_tensor(value, reference.device_mesh, reference.placements) if isinstance(reference, DTensor) else value
    )
