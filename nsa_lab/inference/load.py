"""Load a trained model from a checkpoint of a run or from a bundled model.

Reads only the weights and `config.yaml`; does not import the trainer. A single-file checkpoint is read without unpickling,
the index of a sharded one with an allowlist.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from nsa_lab.attention.input_checks import SUPPORTED_DTYPES
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.optional_deps import require
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoint_files, directory, resolve
from nsa_lab.runs.atomic_io import read_json
from nsa_lab.runs.checkpoint_files import MODEL
from nsa_lab.runs.finite_weights import describe_nonfinite
from nsa_lab.runs.model_files import NoCheckpoint, find_checkpoint
from nsa_lab.runs.trajectory import list_changed_settings


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, backend: str = "auto"
) -> NSATransformer:
    """Load a trained model in evaluation mode.

    path: a run directory (its newest checkpoint), a checkpoint folder, or the name of a bundled model, as in
        `load_model("needle-8m")`. A folder with that name takes precedence.
    dtype: of the weights and of attention. backend: as in `NSATransformer`.

    Raises `NoCheckpoint` if there is no checkpoint, its files differ from its manifest, it was trained with another
    config.yaml, it is of a step after the last one of the run, or its weights do not match the model or are not finite;
    `ConfigError` for an invalid config.yaml, dtype or device; `MissingPackage` without the packages of nsa-lab[train].
    """
    device = _check_device_and_dtype(device, dtype)
    require("safetensors")
    folder = _resolve_checkpoint(path)
    problems = checkpoint_files.find_problems(folder)
    if problems:
        remedy = (
            "install nsa-lab again"
            if resolve.is_packaged_model(folder.parent.parent)
            else "use another checkpoint of the run"
        )
        raise NoCheckpoint(f"{folder}: {', '.join(problems)}; {remedy}")
    config = RunConfig.from_yaml(folder.parent.parent / directory.CONFIG)
    _check_config(folder, config)
    step, n_steps = checkpoint_files.parse_step(folder), config.train.steps
    if step > n_steps:
        raise NoCheckpoint(
            f"{folder}: expected a checkpoint of step 0 to {n_steps}, the last step in {directory.CONFIG}, got {step}; use "
            "another checkpoint of the run"
        )
    model = NSATransformer(config.model_at(step), backend=backend, device=device, dtype=dtype, seed=0)
    weights = _read_weights(folder, device)
    if mismatch := checkpoint_files.describe_mismatch(folder, weights, model.state_dict()):
        raise NoCheckpoint(mismatch)
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise NoCheckpoint(
                f"{folder}: {name}: expected weights of a float type, got {weight.dtype}; use another checkpoint"
            )
    model.load_state_dict(weights, strict=True)
    model = model.to(dtype).eval()
    for name, weight in model.state_dict().items():
        # Also finite weights that are too large for `dtype`.
        if problem := describe_nonfinite(name, weight):
            raise NoCheckpoint(f"{folder}: {problem} in {dtype}; use an earlier checkpoint of the run, or another dtype")
    return model


def _check_config(folder: Path, config: RunConfig) -> None:
    """Raise `NoCheckpoint` if the checkpoint was trained with other settings than `config`, as far as it records them.

    Settings that a resumed run may change are not compared.
    """
    recorded = read_json(folder / checkpoint_files.MANIFEST).get("config_hash", config.hash())
    if recorded == config.hash():
        return
    trajectory = read_json(folder / checkpoint_files.STATE).get("trajectory")
    differences = list_changed_settings(trajectory, config) if isinstance(trajectory, dict) else ["settings not recorded"]
    if differences:
        raise NoCheckpoint(
            f"{folder.parent.parent / directory.CONFIG}: expected the configuration of the checkpoint {folder.name} with "
            f"hash {recorded}, got {config.hash()} ({'; '.join(differences)}); restore the file"
        )


def _read_weights(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by name; of a sharded one, those that all ranks wrote."""
    if (folder / MODEL).is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(folder / MODEL, device=str(device))
        except (SafetensorError, OSError) as error:
            raise NoCheckpoint(f"{folder / MODEL}: cannot be read ({error}); use another checkpoint of the run") from None
    from nsa_lab.model import sharded_files

    try:
        return sharded_files.read_weights(folder, device)
    except sharded_files.ShardError as error:
        raise NoCheckpoint(str(error)) from error


def _check_device_and_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.device:
    """Return the device of the weights. Raises `ConfigError` for a device or dtype that cannot compute."""
    if dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(map(str, SUPPORTED_DTYPES))
        raise ConfigError(f"load_model: dtype = {dtype!r}: expected one of {supported}, for example dtype=torch.bfloat16")
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"load_model: device = {device!r}: expected a torch device, for example cpu or cuda") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"load_model: device = '{device}': torch finds no CUDA device; use cpu, or install a CUDA build")
    try:
        torch.zeros(1, device=parsed).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"load_model: device = '{device}': torch cannot compute on it ({reason}); use cpu") from None
    return torch.device("cpu") if parsed.type == "cpu" else parsed  # which all libraries accept, without an index


def _resolve_checkpoint(path: str | Path) -> Path:
    folder = next((candidate for candidate in (Path(path), resolve.MODELS_DIR / path) if os.path.isdir(candidate)), None)
    if folder is None:
        raise NoCheckpoint(
            f"{Path(path).absolute()}: no such folder; give a run directory, a folder in its {directory.CHECKPOINTS}/, or "
            f"the name of a model; {resolve.describe_models()}; {resolve.describe_runs(resolve.get_outputs_dir())}"
        )
    return find_checkpoint(folder) if (folder / directory.CONFIG).is_file() else folder.resolve()
