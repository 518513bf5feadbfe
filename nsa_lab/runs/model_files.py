"""Checkpoints to load a model from, and folders to write one to: the checks that need no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_lab.config import BYTE_VOCAB_SIZE, ConfigError, RunConfig, UsageError
from nsa_lab.runs import checkpoint_files, directory, resolve
from nsa_lab.runs.atomic_io import check_output_file
from nsa_lab.runs.evaluation import EVALUATION, RULER, RULER_UNFINISHED, UNFINISHED, read_evaluation

if TYPE_CHECKING:
    from nsa_lab.runs.history import History  # imports numpy


class NoCheckpoint(UsageError, RuntimeError):
    """A run has no usable checkpoint. The message lists the available ones."""


def find_checkpoint(run_dir: str | Path, step: int | None = None) -> Path:
    """Return the folder of the checkpoint of `step`; default: the newest. Raises `NoCheckpoint`."""
    path = directory.check_run_dir(run_dir)
    folder = checkpoint_files.get_checkpoint_dir(path)
    try:
        directory.check_checkpoint_folder(path)
        steps = checkpoint_files.list_steps(folder)
    except directory.RunDirectoryError as error:
        raise NoCheckpoint(str(error)) from None
    except PermissionError as error:
        raise NoCheckpoint(f"{error.filename}: permission denied; let its owner open the folder") from None
    if not steps:
        raise NoCheckpoint(f"{folder}: no checkpoint found; train the run, or copy its checkpoints here")
    if step is not None and step not in steps:
        raise NoCheckpoint(f"{folder}: no checkpoint of step {step}; available: {', '.join(map(str, steps))}")
    return checkpoint_files.get_checkpoint_path(folder, steps[-1] if step is None else step)


def check_new_folder(folder: str | Path) -> Path:
    """Return the absolute path of `folder`. Raises `ConfigError` if it has files, is a file, or cannot be created."""
    folder = Path(folder).resolve()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: expected an empty or new folder for the model, got one with files; give another folder"
            )
        with tempfile.TemporaryDirectory(dir=next(parent for parent in (folder, *folder.parents) if parent.exists())):
            pass  # it can be created; `folder` itself is not created before all checks have passed
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot write the model to this folder ({error.strerror}); give another folder"
        ) from error
    return folder


def check_evaluable(run_dir: Path, out: str | Path | None = None, step: int | None = None) -> tuple[RunConfig, Path, Path]:
    """Return the configuration, checkpoint and output folder of an evaluation; the folder is created if necessary.

    Raises `ConfigError` for a bundled model without `out`; `NoCheckpoint`.
    """
    config = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    if out is None and resolve.is_packaged_model(run_dir):
        raise ConfigError(
            f"{run_dir.name} is a bundled model, whose evaluation is fixed; give an output folder, for example "
            f"--out {resolve.get_outputs_dir() / run_dir.name}"
        )
    checkpoint = find_checkpoint(run_dir, step)
    names = EVALUATION, UNFINISHED, RULER, RULER_UNFINISHED
    return config, checkpoint, make_evaluation_folder(run_dir, out, *names)


def make_evaluation_folder(run_dir: Path, out: str | Path | None, *names: str) -> Path:
    """Create the folder for an evaluation of a run if necessary and return it; `out` None: the run's own directory.

    Raises `UsageError` if the folder belongs to another run, or cannot have the files `names`.
    """
    folder = Path(out or run_dir)
    if (folder / directory.CONFIG).is_file() and folder.resolve() != run_dir.resolve():
        raise ConfigError(
            f"{folder}: expected a folder for results of {run_dir.name}, got another run; give another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write an evaluation here ({error.strerror}); give another folder") from None
    for name in names:
        check_output_file(folder / name)
    return folder


def check_byte_model(run_dir: Path) -> None:
    """Raise `ConfigError` for a run whose tokens are not bytes."""
    config = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    if config.data.tokenizer != "byte" or config.model.vocab_size < BYTE_VOCAB_SIZE:
        raise ConfigError(
            f"{run_dir.name}: expected a byte model, got data.tokenizer = {config.data.tokenizer}; "
            "evaluate a run with data.tokenizer: byte, or add --ruler, or --blocks for a converted model"
        )


def read_final_evaluation(history: History, step: int) -> dict[str, Any]:
    """Return the evaluation of the last step. Raises `ConfigError` with the command to run if it cannot be packaged."""
    steps, tokenizer = history.config.train.steps, history.config.data.tokenizer
    evaluation, run = read_evaluation(history.run_dir), resolve.format_run_argument(history.run_dir)
    if not history.is_done or step != steps:
        raise ConfigError(
            f"{history.run}: expected a run that is done, got {history.state} with its newest checkpoint at step {step:,} "
            f"of {steps:,}; continue it with nsa-lab resume {run}"
        )
    if tokenizer != "byte":
        raise ConfigError(f"{history.run}: data.tokenizer = {tokenizer} cannot be packaged; use data.tokenizer: byte")
    if not evaluation or evaluation["step"] != step:
        raise ConfigError(f"{history.run}: no {EVALUATION} of step {step:,}; run nsa-lab evaluate {run}")
    return evaluation
