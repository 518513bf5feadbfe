"""A trained model from disk: which checkpoint of a run, or of a model that ships, and the model that it holds.

Reads `model.safetensors` and `config.yaml` alone; nothing here loads the trainer or unpickles.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nsa_lab.attention.input_checks import SUPPORTED_DTYPES
from nsa_lab.config import ConfigError, RunConfig, UsageError
from nsa_lab.config.optional_deps import require
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoint_files, directory, resolve

WEIGHTS = "model.safetensors"


class NoCheckpoint(UsageError, RuntimeError):
    """A run has no checkpoint that can be used. The message says what there is instead."""


def find_checkpoint(run_dir: str | Path, step: int | None = None) -> Path:
    """The folder of the checkpoint of `step`, by default of the newest. Raises `NoCheckpoint`."""
    folder = checkpoint_files.get_checkpoint_dir(directory.check_run_dir(run_dir))
    there = checkpoint_files.list_steps(folder)
    if not there:
        raise NoCheckpoint(f"{folder}: no checkpoint here; train the run, or copy its checkpoints beside it")
    if step is not None and step not in there:
        raise NoCheckpoint(f"{folder}: no checkpoint of step {step}; there is {', '.join(map(str, there))}")
    return checkpoint_files.get_checkpoint_path(folder, there[-1] if step is None else step)


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
    _check_device_and_dtype(device, dtype)
    require("safetensors")
    from safetensors.torch import load_file

    folder = _resolve_checkpoint(path)
    problems = checkpoint_files.find_problems(folder)
    if problems:
        remedy = (
            "install nsa-lab again" if resolve.is_packaged_model(folder.parents[1]) else "use another checkpoint of the run"
        )
        raise NoCheckpoint(f"{folder}: {', '.join(problems)}; {remedy}")
    config = RunConfig.from_yaml(folder.parents[1] / directory.CONFIG)
    trained = config.model_at(checkpoint_files.parse_step(folder))
    model = NSATransformer(trained, backend=backend, device=device, dtype=dtype, seed=0)
    weights = load_file(folder / WEIGHTS, device=str(device))
    if other := checkpoint_files.describe_mismatch(folder, weights, model.state_dict()):
        raise NoCheckpoint(other)
    model.load_state_dict(weights, strict=True)
    return model.to(dtype).eval()


def _check_device_and_dtype(device: torch.device | str, dtype: torch.dtype) -> None:
    if dtype not in SUPPORTED_DTYPES:
        known = ", ".join(map(str, SUPPORTED_DTYPES))
        raise ConfigError(f"load_model: dtype = {dtype!r}: expected one of {known}; for example dtype=torch.bfloat16")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"load_model: device = {device!r}: expected a device of torch, for example cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"load_model: device = '{device}': torch sees no CUDA device; use cpu, or install a CUDA build")


def _resolve_checkpoint(path: str | Path) -> Path:
    folder = next((place for place in (Path(path), resolve.MODELS_DIR / path) if os.path.isdir(place)), None)
    if folder is None:
        raise NoCheckpoint(
            f"{Path(path).resolve()}: no such folder; give a run directory, a folder in its {directory.CHECKPOINTS}/, or "
            f"the name of a model; {resolve.describe_models()}; {resolve.describe_runs(resolve.get_outputs_dir())}"
        )
    return find_checkpoint(folder) if (folder / directory.CONFIG).is_file() else folder.resolve()
