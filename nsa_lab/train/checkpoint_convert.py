"""Convert a checkpoint between its two forms: single files, and sharded files as several ranks write them.

The trainer and all readers accept both forms, and any number of ranks; conversion is for other programs.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from nsa_lab.config import ConfigError
from nsa_lab.model.sharded_files import MOMENTS, WEIGHTS, fill_tensors, read_shapes
from nsa_lab.runs import checkpoint_files, directory
from nsa_lab.runs.checkpoint_files import MODEL, OPTIMIZER, PROBE, RANDOM, STATE
from nsa_lab.train.checkpoint import CheckpointStore, SavedCheckpoint, Serializer
from nsa_lab.train.checkpoint_state import serialize_torch
from nsa_lab.train.sharded_checkpoint import ShardFileWriter

State = dict[str, Any]
"""`weights` by name, `moments` by parameter name and kind, and `rng`."""


def convert_checkpoint(checkpoint: Path, folder: Path, form: Literal["single", "sharded"]) -> Path:
    """Write `checkpoint` of a run in another form below `folder`, and return the new checkpoint.

    `folder` gets the run's config.yaml and `checkpoints/step-…`, so everything that accepts a run directory accepts it.
    The full state is in memory. Raises `ConfigError` if the files of `checkpoint` do not match its manifest, if it has
    this form already, or if `folder` has such a checkpoint.
    """
    if problems := checkpoint_files.find_problems(checkpoint):
        raise ConfigError(f"{checkpoint}: {', '.join(problems)}; use another checkpoint of the run")
    if (checkpoint / MODEL).is_file() == (form == "single"):
        raise ConfigError(f"{checkpoint}: expected the other form, got a checkpoint that is {form} already; copy it")
    step = checkpoint_files.parse_step(checkpoint)
    store = CheckpointStore(folder / directory.CHECKPOINTS)
    started = store.begin(step)
    if isinstance(started, SavedCheckpoint):
        raise ConfigError(f"{started.path}: this checkpoint exists; give another folder")
    state = _read_single(checkpoint) if form == "sharded" else _read_sharded(checkpoint)
    files: dict[str, Serializer] = {name: (lambda name=name: (checkpoint / name).read_bytes()) for name in (STATE, PROBE)}
    entries = {}
    if form == "single":
        files[MODEL] = lambda: save(state[WEIGHTS])
        files[OPTIMIZER] = lambda: serialize_torch({"moments": state[MOMENTS], "rng": state["rng"]})
    else:
        files[RANDOM] = lambda: serialize_torch({"rng": state["rng"]})
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")  # there is one process
                tensors = {part: state[part] for part in (WEIGHTS, MOMENTS)}
                save_shards(tensors, storage_writer=ShardFileWriter(started.folder))
            entries = {path.name: checkpoint_files.read_manifest_entry(path) for path in started.folder.iterdir()}
        except BaseException as error:
            store.abandon(started, error)
            raise
    manifest = json.loads((checkpoint / checkpoint_files.MANIFEST).read_text(encoding="utf-8"))
    facts = {key: manifest[key] for key in ("config_hash", "data_identity") if key in manifest}
    saved = store.complete(started, files, facts, entries)
    shutil.copyfile(checkpoint.parents[1] / directory.CONFIG, folder / directory.CONFIG)
    return saved.path


def _read_single(checkpoint: Path) -> State:
    training_state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
    return {WEIGHTS: load_file(checkpoint / MODEL), MOMENTS: training_state["moments"], "rng": training_state["rng"]}


def _read_sharded(checkpoint: Path) -> State:
    state: State = {WEIGHTS: {}, MOMENTS: {}}
    for key, shape in read_shapes(checkpoint).items():
        part, _, name = key.partition(".")
        if part == WEIGHTS:
            state[WEIGHTS][name] = torch.zeros(shape)
        else:
            parameter, _, kind = name.rpartition(".")
            state[MOMENTS].setdefault(parameter, {})[kind] = torch.zeros(shape)
    fill_tensors(checkpoint, state)
    return state | {"rng": torch.load(checkpoint / RANDOM, map_location="cpu", weights_only=True)["rng"]}
