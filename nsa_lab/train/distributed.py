"""The ranks of a run: this process's rank, and the few collectives that training needs.

Ranks are configured by torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT). The option `--ranks` of `python -m nsa_lab.train` sets the first four, and its ranks meet in a file instead
of at an address. Without these variables there is one rank and no process group.

With `runtime.parallel: ddp` every rank holds the full model. With `fsdp` (FSDP2) weights, gradients and optimizer moments
are sharded over all ranks; with `hsdp` they are sharded over the ranks of a host and replicated over the hosts.
torch.distributed.fsdp takes most of a second to import, so fsdp.py is imported only if it is needed.

All ranks must call a method that is marked as collective.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore, PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage] - documented
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from nsa_lab.config import ConfigError, compute_context_size
from nsa_lab.model import NSATransformer

logger = logging.getLogger("nsa_lab.train")

# Rank 0 may prepare the data for a long time. A collective that waits longer than this has lost a rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

_REMEDY = "start the ranks with torchrun or --ranks, which set both, or unset RANK and WORLD_SIZE to train in one process"


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of ranks of the run.

    `local_size`: number of ranks on this host; 0: all of them. `store`: file in which the ranks of one host meet; None:
    they meet at MASTER_ADDR. `parallel`, `context_parallel`: as in `runtime`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 0
    store: Path | None = None
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    context_parallel: int = 1

    @classmethod
    def from_environment(cls, store: Path | None = None) -> World:
        """Return the rank that torchrun gave this process; one rank if it was not started by torchrun.

        Raises `ConfigError` if the variables are incomplete or contradict each other.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls()
        rank, size = _read_count("RANK"), _read_count("WORLD_SIZE")
        if rank >= size:
            raise ConfigError(f"environment: expected RANK below WORLD_SIZE, got RANK={rank}, WORLD_SIZE={size}; {_REMEDY}")
        return cls(rank, size, _read_count("LOCAL_RANK", 0), _read_count("LOCAL_WORLD_SIZE", 0), store)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the run's files."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """True if weights and optimizer state are sharded."""
        return self.parallel != "ddp" and self.size > 1

    @property
    def n_shards(self) -> int:
        """Number of ranks that share one copy of the weights and optimizer state.

        Raises `ConfigError` with hsdp if hosts have different numbers of ranks.
        """
        if not self.is_sharded:
            return 1
        local_size = self.local_size or self.size
        if self.parallel == "fsdp":
            return self.size
        if self.size % local_size:
            raise ConfigError(
                f"runtime.parallel = hsdp: expected the same number of ranks on every host, got {self.size} ranks, "
                f"{local_size} of them on this host; start the same number on each, or set runtime.parallel: fsdp"
            )
        return local_size

    def init_process_group(self, device: torch.device) -> None:
        """Meet the other ranks. Raises `ConfigError` if the environment has no address to meet at. Collective."""
        if self.size > 1:
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=self._make_store(),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
                # NCCL then connects now, and a failure appears before data is prepared.
                device_id=device if device.type == "cuda" else None,
            )

    def _make_store(self) -> Store | None:
        """Return the store in which the ranks meet; None: the one at MASTER_ADDR, as it is."""
        if self.store:
            return FileStore(str(self.store), self.size)
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ConfigError(f"environment: WORLD_SIZE={self.size} needs {' and '.join(missing)} too; {_REMEDY}")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        # After a restart, the store of torchrun's agent still has the addresses of the ranks before it.
        if self.local_size == self.size:
            store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=COLLECTIVE_TIMEOUT))
            return PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        # Agents of several hosts count restarts separately, so there is no common name.
        if self.is_first and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            logger.warning(
                "torchrun shares one store between restarts, so restarts on several hosts may fail; set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every host (docs/howto/multiple_gpus.md)"
            )
        return None

    def destroy_process_group(self, *, is_alone: bool = False) -> None:
        """Leave the other ranks. `is_alone`: after an error, when other ranks may wait in a collective for this one.

        Collective unless `is_alone`.
        """
        if self.size == 1 or not distributed.is_initialized():
            return
        if is_alone and distributed.get_backend() == "nccl":
            # destroy_process_group would wait until the collectives of all ranks have ended. The supervisor ends the other
            # ranks when this process has ended.
            distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        else:
            distributed.destroy_process_group()
        # A group that a reference cycle holds would be destroyed while the interpreter ends. With gloo, about one process
        # in 24 was then aborted, and its exit code lost.
        gc.collect()

    def get_context_size(self, n_sequences: int) -> int:
        """Return the number of ranks that share each sequence of a step of `n_sequences`; see `compute_context_size`."""
        return compute_context_size(n_sequences, self.size, self.context_parallel)

    def get_sequence_share(self, n_sequences: int) -> tuple[int, int]:
        """Return (start, count) of the sequences of this rank in a step of `n_sequences`.

        Ranks that share each sequence are adjacent, and have the same sequences.
        """
        size = self.get_context_size(n_sequences)
        count = n_sequences * size // self.size
        return self.rank // size * count, count

    def make_context_group(self, size: int, device: torch.device) -> distributed.ProcessGroup:
        """Return the group of `size` adjacent ranks that share sequences with this rank. Collective over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh  # takes a tenth of a second to import

        mesh = init_device_mesh(device.type, (self.size // size, size), mesh_dim_names=("data", "context"))
        return mesh.get_group("context")

    def build_model(self, build: Callable[[], NSATransformer]) -> NSATransformer:
        """Return the model that `build` returns. A model that will be sharded has no storage until `wrap`."""
        if not self.is_sharded:
            return build()
        with torch.device("meta"):
            return build()

    def wrap(self, model: NSATransformer, device: torch.device, *, seed: int, use_bf16: bool) -> nn.Module:
        """Wrap `model` so that its backward pass averages gradients over the ranks. Collective.

        A model without storage is initialized from `seed` and sharded in place. `use_bf16`: gather sharded weights in
        bfloat16; gradients are reduced in float32.
        """
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.shard(model, fsdp.make_mesh(device, self.size, self.n_shards), seed=seed, use_bf16=use_bf16)
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

    def defer_gradient_exchange(self, forward: Callable[..., Any]) -> AbstractContextManager:
        """Accumulate gradients without exchanging them. The next backward pass outside this context exchanges the sum.

        Until then, each rank of a sharded model holds a full float32 gradient.
        """
        if self.is_sharded:
            from nsa_lab.train import fsdp

            return fsdp.defer_reduction(forward)
        return forward.no_sync() if isinstance(forward, DistributedDataParallel) else nullcontext()

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

    @torch.no_grad()
    def copy_rows(self, target: Tensor, source: Any) -> None:
        """Copy `source` into `target`; only this rank's rows if `target` is sharded.

        `source`: the full tensor, or a slice of a safetensors file, from which only these rows are read.
        """
        if self.is_sharded:
            from nsa_lab.train import fsdp

            fsdp.copy_rows(target, source)
        else:
            target.copy_(source[:])

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


def _read_count(name: str, default: int | None = None) -> int:
    """Return a number that torchrun sets. Raises `ConfigError` if it is malformed, or missing without a `default`."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        other = "WORLD_SIZE" if name == "RANK" else "RANK"
        raise ConfigError(f"environment: {other}={os.environ[other]} is set, but {name} is not; {_REMEDY}")
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"environment: {name}={text!r}: expected a whole number; {_REMEDY}")
    return int(text)
