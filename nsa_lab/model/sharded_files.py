"""Read sharded checkpoints: files of torch.distributed.checkpoint, one per rank that wrote them, and an index.

Any number of ranks can read them, and so can a single process. The index is a pickle. It is decoded with an allowlist of
torch's classes, so a file from elsewhere cannot run code, and it may list only tensors.

torch.distributed.checkpoint takes a second to import, so import this module only if it is needed.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load_state_dict

INDEX = ".metadata"
WEIGHTS, MOMENTS = "weights", "moments"  # the parts of a checkpoint; a tensor's key is its part, a dot and its name

# All classes and functions in a valid index. Dtypes are allowed too.
_INDEX_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


class ShardError(RuntimeError):
    """A sharded checkpoint cannot be read."""


def read_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a sharded checkpoint by its key. Raises `ShardError`."""
    return {key: entry.size for key, entry in _read_index(folder).state_dict_metadata.items()}  # pyright: ignore


def iterate_tensors(folder: Path, parts: Sequence[str] = (WEIGHTS, MOMENTS)) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and value of every tensor in `parts` of a sharded checkpoint, unsharded, one at a time.

    Raises `ShardError`.
    """
    for key, entry in _read_index(folder).state_dict_metadata.items():
        part, _, name = key.partition(".")
        if part not in parts:
            continue
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)  # pyright: ignore
        fill_tensors(folder, {part: {name: tensor}})
        yield key, tensor


def read_weights(folder: Path, device: torch.device | str) -> dict[str, Tensor]:
    """Return all weights of a sharded checkpoint, unsharded, by name. Raises `ShardError`."""
    index, prefix = _read_index(folder), f"{WEIGHTS}."
    weights = {
        key.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, metadata.TensorStorageMetadata)
    }
    fill_tensors(folder, {WEIGHTS: weights})
    return weights


def fill_tensors(
    folder: Path, parts: Mapping[str, Mapping[str, Any]], group: distributed.ProcessGroup | None = None
) -> None:
    """Read the tensors in `parts` in place; for a sharded one, only this rank's shard. Raises `ShardError`.

    `parts`: nested mappings with tensors as leaves; the key of a tensor is its path, joined by dots. `group`: ranks that
    read together, with a CPU backend; None: this process reads without others.
    """
    try:
        with warnings.catch_warnings():
            # `load` cannot read without the other ranks in torch 2.6 if a process group exists.
            warnings.simplefilter("ignore", FutureWarning)
            load_state_dict(dict(parts), _Reader(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ShardError(f"{folder}: {type(reason).__name__}: {reason}") from error


class _Reader(filesystem.FileSystemReader):
    """A reader whose index is decoded by `_read_index`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *arguments: Any, **keywords: Any) -> metadata.Metadata:
        return _read_index(self._folder)


def _read_index(folder: Path) -> metadata.Metadata:
    try:
        with open(folder / INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        TypeError,
        ValueError,
        IndexError,
        KeyError,
    ) as error:
        raise ShardError(f"{folder / INDEX}: cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(index, metadata.Metadata) or not all(
        isinstance(entry, metadata.TensorStorageMetadata) for entry in index.state_dict_metadata.values()
    ):
        raise ShardError(f"{folder / INDEX}: expected an index of tensors only, as this trainer writes it")
    # Names lead to files in this folder only.
    for place in (index.storage_data or {}).values():
        if not isinstance(place, filesystem._StorageInfo) or Path(place.relative_path).name != place.relative_path:
            raise ShardError(f"{folder / INDEX}: expected files in its own folder, got {place!r}")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not is_dtype and global_name not in _INDEX_CLASSES.get(module_name, ()):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into an index")
        return super().find_class(module_name, global_name)
