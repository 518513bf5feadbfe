"""FSDP2: shard a model, and gather parts of it. `World` imports this module only if weights are sharded.

Invariants
* The embedding, the n-gram tables and each block are gathered separately, so a rank holds one of them at a time.
* A sharded model starts with the weights of an unsharded one with the same seed. Each layer is initialized on the CPU and
  sharded before the next one exists.
* Sharded weights, moments and gradients are float32. With bf16, weights are gathered in bfloat16, and the residual stream
  stays in float32, as under autocast without sharding.
* Every parameter is sharded by rows: placement Shard(0) over the mesh axis `shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from nsa_lab.model import NSATransformer


def make_mesh(device: torch.device, n_ranks: int, n_shards: int) -> DeviceMesh:
    """Return the mesh over which weights are sharded: axis `shard`, after an axis `replicate` if there are several copies.

    Ranks of one copy are adjacent, so with one copy per host the weights are gathered within the host. Collective.
    """
    if n_shards == n_ranks:
        return init_device_mesh(device.type, (n_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (n_ranks // n_shards, n_shards), mesh_dim_names=("replicate", "shard"))


def shard(model: NSATransformer, mesh: DeviceMesh, *, seed: int, use_bf16: bool) -> NSATransformer:
    """Initialize the weights of a model on the meta device from `seed`, and shard it in place over `mesh`."""

    def make_policy(output_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
        if not use_bf16:
            return MixedPrecisionPolicy()
        # Inputs are not cast: autocast casts them for each operation, and the residual stream stays float32.
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype, cast_forward_inputs=False)

    generator = torch.Generator().manual_seed(seed)
    for name, layer in model.get_layers().items():
        layer.to_empty(device="cpu")
        model.initialize_layer(name, generator)
        if layer is model.embedding:
            fully_shard(layer, mesh=mesh, mp_policy=make_policy(torch.float32))
        elif layer not in (model.norm, model.head):
            fully_shard(layer, mesh=mesh, mp_policy=make_policy())
    # The remaining layers. fully_shard moves parameters to the device of the mesh.
    fully_shard(model, mesh=mesh, mp_policy=make_policy())
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


@contextmanager
def defer_reduction(forward: Callable[..., Any]) -> Iterator[None]:
    """Accumulate full gradients on every rank in float32 instead of reducing and sharding them."""
    model = cast(FSDPModule, forward)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def full_tensor(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def copy_rows(target: Tensor, source: Any) -> None:
    """Copy this rank's rows of `source`, which can be sliced, into the sharded `target`. The last ranks may have none."""
    value = cast(DTensor, target)
    (axis,) = (number for number, placement in enumerate(value.placements) if isinstance(placement, Shard))
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of the mesh"
    start = coordinate[axis] * -(-value.shape[0] // value.device_mesh.size(axis))
    local = value.to_local()
    if len(local):
        local.copy_(source[start : start + len(local)])
