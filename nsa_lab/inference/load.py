"""A trained model from disk: which checkpoint of a run, or of a model that ships, and the model that it holds.

Reads `model.safetensors` and `config.yaml` alone; nothing here loads the trainer or unpickles.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nsa_lab.attention.checks import DTYPES
from nsa_lab.config import ConfigError, RunConfig, UsageError
from nsa_lab.config.extras import require
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoints, directory, names

WEIGHTS = "model.safetensors"


class NoCheckpoint(UsageError, RuntimeError):
    """A run has no checkpoint that can be used. The message says what there is instead."""


def find_checkpoint(run_dir: str | Path, step: int | None = None) -> Path:
    """The folder of the checkpoint of `step`, by default of the newest. Raises `NoCheckpoint`."""
    folder = checkpoints.folder_of(directory.check(run_dir))
    there = checkpoints.steps(folder)
    if not there:
        raise NoCheckpoint(f"{folder}: no checkpoint here; train the run, or copy its checkpoints beside it")
    if step is not None and step not in there:
        raise NoCheckpoint(f"{folder}: no checkpoint of step {step}; there is {', '.join(map(str, there))}")
    return checkpoints.path_of(folder, there[-1] if step is None else step)


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, backend: str = "auto"
) -> NSATransformer:
    """The trained model of a run directory (its newest checkpoint) or of one checkpoint folder in it, in evaluation mode;
    or one that ships with the package, by its name: `load_model("needle-8m")`. A folder of that name comes first.

    `dtype` is that of weights and of attention; `backend` as `NSATransformer` takes it.

    Raises `NoCheckpoint` if there is none, its files are not what its manifest says or its weights are of other code,
    `ConfigError` for a foreign config.yaml and for a dtype or a device that there is not, `MissingPackage` without the
    packages of nsa-lab[train].
    """
    _check_place(device, dtype)
    require("safetensors")
    from safetensors.torch import load_file

    folder = _checkpoint_at(path)
    problems = checkpoints.verify(folder)
    if problems:
        remedy = "install nsa-lab again" if names.ships(folder.parents[1]) else "use another checkpoint of the run"
        raise NoCheckpoint(f"{folder}: {', '.join(problems)}; {remedy}")
    config = RunConfig.from_yaml(folder.parents[1] / directory.CONFIG)
    trained = config.model_at(checkpoints.step_of(folder))
    model = NSATransformer(trained, backend=backend, device=device, dtype=dtype, seed=0)
    weights = load_file(folder / WEIGHTS, device=str(device))
    if other := checkpoints.misfit(folder, weights, model.state_dict()):
        raise NoCheckpoint(other)
    model.load_state_dict(weights, strict=True)
    return model.to(dtype).eval()


def _check_place(device: torch.device | str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ConfigError(f"load_model: dtype = {dtype!r}: expected one of {known}; for example dtype=torch.bfloat16")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"load_model: device = {device!r}: expected a device of torch, for example cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"load_model: device = '{device}': torch sees no CUDA device; use cpu, or install a CUDA build")


def _checkpoint_at(path: str | Path) -> Path:
    folder = next((place for place in (Path(path), names.MODELS / path) if os.path.isdir(place)), None)
    if folder is None:
        raise NoCheckpoint(
            f"{Path(path).resolve()}: no such folder; give a run directory, a folder in its {directory.CHECKPOINTS}/, or "
            f"the name of a model; {names.models_there_are()}; {names.runs_there_are(names.outputs_folder())}"
        )
    return find_checkpoint(folder) if (folder / directory.CONFIG).is_file() else folder.resolve()
