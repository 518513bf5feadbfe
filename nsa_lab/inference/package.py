"""A run's model as a folder to hand on: laid out as a run with one checkpoint, so that whatever takes a run takes it.

    config.yaml  evaluation.json  README.md (the model card)  checkpoints/step-00001526/{model.safetensors, MANIFEST.json}

Weights are in bfloat16; nothing of the machine that trained them, and nothing that only training needs, comes along.
Models that ship with the package lie in `nsa_lab/models/` as this module writes them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.optional_deps import require
from nsa_lab.inference.load import WEIGHTS, find_checkpoint, load_model
from nsa_lab.inference.model_card import build_model_card
from nsa_lab.runs import checkpoint_files, directory
from nsa_lab.runs.atomic_io import write_bytes, write_text
from nsa_lab.runs.evaluation import EVALUATION, read_evaluation, write_evaluation
from nsa_lab.runs.history import History

MODEL_CARD = "README.md"
MAX_WEIGHT_BYTES = 16 << 20


def ship(run_dir: str | Path, folder: str | Path, about: str) -> Path:
    """Write the model of a run's newest checkpoint into `folder`, whose name is the model's; the folder.

    about: Markdown on data, licence and limits, which the record of a run does not know; the end of the model card.

    Raises `ConfigError` for a run that is not done, not evaluated at its last step or that reads other tokens than bytes,
    for weights of more than `MOST_BYTES`, and for a folder with files in it; `NoCheckpoint` as `load_model` does.
    """
    require("safetensors")
    from safetensors.torch import save

    history, checkpoint, folder = History.read(run_dir), find_checkpoint(run_dir), check_new_folder(folder)
    step = checkpoint_files.parse_step(checkpoint)
    evaluation = _read_final_evaluation(history, step)
    weights = save({name: value.to(torch.bfloat16) for name, value in load_model(checkpoint).state_dict().items()})
    if len(weights) > MAX_WEIGHT_BYTES:
        raise ConfigError(
            f"{history.run}: its weights take {len(weights):,} bytes in bfloat16, and a model that ships has at most "
            f"{MAX_WEIGHT_BYTES:,}; train a smaller one"
        )
    to = checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(folder), step)
    to.mkdir(parents=True)
    write_bytes(to / WEIGHTS, weights)
    write_text(
        to / checkpoint_files.MANIFEST,
        checkpoint_files.format_manifest(step, {WEIGHTS: checkpoint_files.make_manifest_entry(weights)}),
    )
    write_evaluation(folder, evaluation)
    write_text(folder / MODEL_CARD, build_model_card(folder.name, history, evaluation, len(weights), about))
    # Last: a folder without it is no run.
    write_text(folder / directory.CONFIG, _strip_local_path(history.config).to_yaml())
    return folder


def check_new_folder(folder: str | Path) -> Path:
    """`folder`, which need not exist. Raises `ConfigError` where it has files, is none, or cannot be made."""
    folder = Path(folder).resolve()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: expected an empty or a new folder to write the model to; it has files; name another"
            )
        with tempfile.TemporaryDirectory(dir=next(above for above in (folder, *folder.parents) if above.exists())):
            pass  # one can be made there, and what is refused later leaves none behind
    except OSError as error:
        raise ConfigError(f"{folder}: no folder to write the model to ({error.strerror}); name another") from error
    return folder


def _read_final_evaluation(history: History, step: int) -> dict[str, Any]:
    """That of the run's last step, where everything is as a model to hand on has it."""
    steps, tokenizer, evaluation = (
        history.config.train.steps,
        history.config.data.tokenizer,
        read_evaluation(history.run_dir),
    )
    if not history.is_done or step != steps:
        raise ConfigError(
            f"{history.run} is {history.state}, its newest checkpoint is of step {step:,} of {steps:,}: expected a run "
            f"that is done; nsa-lab resume {history.run}"
        )
    if tokenizer != "byte":
        raise ConfigError(
            f"{history.run}: data.tokenizer = {tokenizer} does not travel with a model; use data.tokenizer: byte"
        )
    if not evaluation or evaluation["step"] != step:
        raise ConfigError(f"{history.run} has no {EVALUATION} of step {step:,}; nsa-lab evaluate {history.run}")
    return evaluation


def _strip_local_path(config: RunConfig) -> RunConfig:
    """The configuration without this machine's paths: asked elsewhere, the model is asked on the text of Python."""
    source = "stdlib" if config.data.source == "local" else config.data.source
    return config.model_copy(update={"data": config.data.model_copy(update={"path": None, "source": source})})
