"""Sharded checkpoints: every rank writes its shard, in the background, while training continues.

    .metadata  __0_0.distcp  __1_0.distcp …  random.pt  state.json  probe.safetensors  MANIFEST.json

The first files are those of torch.distributed.checkpoint; `nsa_lab.model.sharded_files` reads them. A save copies this
rank's shard to host memory, where it stays until it is written. A rank loads only the rows that it holds, whatever number
of ranks wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from nsa_lab.model.sharded_files import INDEX, MOMENTS, WEIGHTS, fill_tensors, read_shapes
from nsa_lab.runs.checkpoint_files import describe_mismatch, read_manifest_entry

if TYPE_CHECKING:
    from nsa_lab.train.build import TrainContext

Entries = dict[str, dict[str, Any]]
"""Manifest entries by file name."""


class ShardWriter:
    """Writes the shards of all ranks. Collective: all ranks create one, and call `start` in the same order."""

    def __init__(self) -> None:
        # A group for the background thread alone: its collectives must not mix with those of training.
        self.group = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo"))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def start(self, folder: Path, state: dict[str, Any], complete: Callable[[Entries], Any]) -> Future[Any]:
        """Copy this rank's shards of `state` to host memory, and write them to `folder` in the background.

        When all ranks have written, rank 0 calls `complete` with the manifest entries of all files, in the background
        thread. The future has its result, and None on other ranks. It raises `OSError` if a rank could not write.
        """
        written = async_save(state, storage_writer=ShardFileWriter(folder), process_group=self.group)
        return self._pool.submit(self._finish, folder, written, complete)

    def _finish(self, folder: Path, written: Any, complete: Callable[[Entries], Any]) -> Any:
        try:
            written.result()
        except CheckpointException as error:
            raise _get_os_error(error) from error
        rank = distributed.get_rank()
        try:
            own: Entries | OSError = {
                path.name: read_manifest_entry(path) for path in folder.iterdir() if path.name.startswith(f"__{rank}_")
            }
        except OSError as error:
            own = error
        gathered: list[Any] | None = None if rank else [None] * distributed.get_world_size()
        distributed.gather_object(own, gathered, group=self.group)
        if gathered is None:
            return None
        entries: Entries = {}
        for part in gathered:
            if isinstance(part, OSError):
                raise part
            entries |= part
        return complete({INDEX: read_manifest_entry(folder / INDEX), **entries})


class ShardFileWriter(FileSystemWriter):
    """Writes one file per rank and syncs it to disk. The index does not contain the path of the folder."""

    def storage_meta(self) -> None:
        return None


def _get_os_error(error: CheckpointException) -> OSError:
    """Return the failure of the first rank that failed, as an error of the filesystem."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(cause, OSError):
        return cause
    return OSError(f"rank {rank} could not write its shard: {type(cause).__name__}: {cause}")


def restore(path: Path, context: TrainContext) -> str | None:
    """Read weights and optimizer state of the sharded checkpoint at `path` into `context`, each rank its own rows.

    Return how the checkpoint does not fit the model, as a message; the context is then unchanged. Collective.
    """
    parameters = dict(context.model.named_parameters())
    saved: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, MOMENTS: {}}
    for key, shape in read_shapes(path).items():
        part, _, name = key.partition(".")
        saved[part][name] = torch.empty(shape, device="meta")
    if mismatch := describe_mismatch(path, saved[WEIGHTS], parameters):
        return mismatch
    moments: dict[str, dict[str, Tensor]] = {}
    for key, moment in saved[MOMENTS].items():
        name, _, kind = key.rpartition(".")
        # Moments are sharded as their weights are. The step counter is a scalar on every rank.
        moments.setdefault(name, {})[kind] = (
            torch.zeros_like(parameters[name], requires_grad=False)
            if moment.ndim
            else torch.zeros((), device=context.device)
        )
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    fill_tensors(path, {WEIGHTS: weights, MOMENTS: moments}, context.shard_writer and context.shard_writer.group)
    context.optimizer.state.clear()
    for name, values in moments.items():
        context.optimizer.state[parameters[name]] = values
    return None
