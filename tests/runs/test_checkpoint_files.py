"""Whether a checkpoint is whole: one answer, whoever asks, the trainer, a verdict or who loads its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save

from nsa_lab.health import list_verdicts
from nsa_lab.inference import NoCheckpoint, load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoint_files
from nsa_lab.train.checkpoint import CheckpointStore, NoValidCheckpoint


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run whose only checkpoint holds real weights."""
    config = make_config(train__save_every=200)
    made = write_run(tmp_path, config)
    write_checkpoint(made, 200, save(NSATransformer(config.model, seed=0).state_dict()))
    return made


@pytest.mark.parametrize("called", ["step-00000100", "final"])
def test_a_checkpoint_is_of_the_step_that_its_folder_is_called(run_dir: Path, called: str) -> None:
    """Under another name it would be computed as of another step, whose stage may turn positions otherwise."""
    folder = checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200)
    load_model(folder)
    renamed = folder.rename(folder.with_name(called))
    with pytest.raises(NoCheckpoint, match=r"MANIFEST.json is that of step 200: call the folder step-00000200"):
        load_model(renamed)
    assert not trainer_accepts(run_dir)


def trainer_accepts(run_dir: Path) -> bool:
    try:
        return CheckpointStore(checkpoint_files.get_checkpoint_dir(run_dir)).load_latest()[0] is not None
    except NoValidCheckpoint:
        return False


def check_passes(run_dir: Path) -> bool:
    return next(verdict for verdict in list_verdicts(run_dir) if verdict.name == "checkpoints").ok is True


def weights_load(run_dir: Path) -> bool:
    try:
        load_model(checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200))
    except NoCheckpoint:
        return False
    return True


def leave_intact(folder: Path) -> None:
    pass


def falsify_digest(folder: Path) -> None:
    manifest = json.loads((folder / checkpoint_files.MANIFEST).read_text())
    (folder / checkpoint_files.MANIFEST).write_text(json.dumps({**manifest, "digest": "0" * 64}))


def remove_digest(folder: Path) -> None:
    manifest = json.loads((folder / checkpoint_files.MANIFEST).read_text())
    del manifest["digest"]
    (folder / checkpoint_files.MANIFEST).write_text(json.dumps(manifest))


def replace_weights(folder: Path) -> None:
    """The manifest's entry follows the file, its digest does not: what a careless copy or a forger leaves."""
    (folder / "model.safetensors").write_bytes(save({"head.weight": torch.zeros(1)}))
    manifest = json.loads((folder / checkpoint_files.MANIFEST).read_text())
    manifest["files"]["model.safetensors"]["size"] = (folder / "model.safetensors").stat().st_size
    (folder / checkpoint_files.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("asked", [trainer_accepts, check_passes, weights_load])
@pytest.mark.parametrize("damage", [leave_intact, falsify_digest, remove_digest, replace_weights])
def test_everyone_takes_and_refuses_the_same_checkpoint(
    asked: Callable[[Path], bool], damage: Callable[[Path], None], run_dir: Path
) -> None:
    damage(checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200))
    assert asked(run_dir) is (damage is leave_intact)


def test_steps_are_those_of_whole_names_in_ascending_order(tmp_path: Path) -> None:
    for name in ("step-00000100", "step-00000020", "step-123456789", "step-", "step-1x", "latest", ".saving-step-00000300"):
        (tmp_path / name).mkdir()
    assert checkpoint_files.list_steps(tmp_path) == [20, 100, 123456789]
    assert checkpoint_files.list_steps(tmp_path / "absent") == []
    assert all(
        checkpoint_files.parse_step(checkpoint_files.get_checkpoint_path(tmp_path, step)) == step
        for step in (20, 100, 123456789)
    )


def test_sizes_alone_are_enough_where_hashes_are_not_asked_for(run_dir: Path) -> None:
    folder = checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert checkpoint_files.find_problems(folder, check_hashes=False) == []
    assert checkpoint_files.find_problems(folder) == ["model.safetensors does not match its sha256"]
    assert checkpoint_files.find_problems(folder.with_name("step-00000400")) == ["step-00000400 is gone"]


def test_weights_fit_by_name_and_by_shape(tmp_path: Path) -> None:
    saved = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    assert checkpoint_files.describe_mismatch(tmp_path, saved, {"b": torch.ones(4), "a": torch.ones(2, 3)}) is None
    said = checkpoint_files.describe_mismatch(tmp_path, saved, {"a": torch.ones(3, 2), "b": torch.ones(4)})
    assert said and "its a is [2, 3], the model's [3, 2]" in said and "config.yaml" in said
    said = checkpoint_files.describe_mismatch(tmp_path, saved, {"a": torch.ones(2, 3)})
    assert said and "it has b" in said
