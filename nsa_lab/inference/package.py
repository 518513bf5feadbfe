"""Package the model of a run for distribution: a folder with the layout of a run with one checkpoint.

Functions that accept a run directory therefore accept it too.

    config.yaml  evaluation.json  README.md (the model card)  checkpoints/step-00001526/{model.safetensors, MANIFEST.json}

Weights are in bfloat16. Local paths and files that only training needs are left out.
Bundled models in `nsa_lab/models/` have this format.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.optional_deps import require
from nsa_lab.inference.load import load_model
from nsa_lab.inference.model_card import build_model_card
from nsa_lab.runs import checkpoint_files, directory
from nsa_lab.runs.atomic_io import write_bytes, write_text
from nsa_lab.runs.evaluation import write_evaluation
from nsa_lab.runs.history import History
from nsa_lab.runs.model_files import check_new_folder, find_checkpoint, read_final_evaluation

MODEL_CARD = "README.md"
MAX_WEIGHT_BYTES = 16 << 20


def ship(run_dir: str | Path, folder: str | Path, about: str) -> Path:
    """Write the model of a run's newest checkpoint to `folder`, and return it. The folder name becomes the model name.

    about: Markdown on data, license and limitations, appended to the model card.

    Raises `ConfigError` for a run that is not done, not evaluated at its last step or not a byte model, for weights of
    more than `MAX_WEIGHT_BYTES`, and for a folder that has files; `NoCheckpoint` as in `load_model`.
    """
    require("safetensors")
    from safetensors.torch import save

    history, checkpoint, folder = History.read(run_dir), find_checkpoint(run_dir), check_new_folder(folder)
    step = checkpoint_files.parse_step(checkpoint)
    evaluation = read_final_evaluation(history, step)
    weights = save({name: value.to(torch.bfloat16) for name, value in load_model(checkpoint).state_dict().items()})
    if len(weights) > MAX_WEIGHT_BYTES:
        raise ConfigError(
            f"{history.run}: expected at most {MAX_WEIGHT_BYTES:,} bytes of bfloat16 weights, got {len(weights):,}; "
            "package a smaller model"
        )
    checkpoint_dir = checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(folder), step)
    checkpoint_dir.mkdir(parents=True)
    config, entry = _strip_local_path(history.config), checkpoint_files.make_manifest_entry(weights)
    write_bytes(checkpoint_dir / checkpoint_files.MODEL, weights)
    write_text(
        checkpoint_dir / checkpoint_files.MANIFEST,
        checkpoint_files.format_manifest(step, {checkpoint_files.MODEL: entry}, {"config_hash": config.hash()}),
    )
    write_evaluation(folder, evaluation)
    write_text(folder / MODEL_CARD, build_model_card(folder.name, history, evaluation, len(weights), about))
    # Written last: a folder without it is not accepted as a run.
    write_text(folder / directory.CONFIG, config.to_yaml())
    return folder


def _strip_local_path(config: RunConfig) -> RunConfig:
    """Return the configuration without local paths. Elsewhere, the default evaluation text is then that of Python."""
    source = "stdlib" if config.data.source == "local" else config.data.source
    return config.model_copy(update={"data": config.data.model_copy(update={"path": None, "source": source})})
