"""Integrity of checkpoints: the trainer, the health check and the model loader accept and refuse the same ones."""

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
    """A finished run with one checkpoint of real weights."""
    config = make_config(train__save_every=200)
    run_dir = write_run(tmp_path, config)
    write_checkpoint(run_dir, 200, save(NSATransformer(config.model, seed=0).state_dict()))
    return run_dir


@pytest.mark.parametrize("folder_name", ["step-00000100", "final"])
def test_folder_name_must_match_the_step(run_dir: Path, folder_name: str) -> None:
    """Under another name it would be used for another step, whose stage may have another rope_theta."""
    folder = checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200)
    load_model(folder)
    renamed = folder.rename(folder.with_name(folder_name))
    with pytest.raises(NoCheckpoint, match=r"MANIFEST.json is that of step 200: rename the folder to step-00000200"):
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
    """The manifest's entry matches the new file, its digest does not, as after a careless copy or a forgery."""
    (folder / "model.safetensors").write_bytes(save({"head.weight": torch.zeros(1)}))
    manifest = json.loads((folder / checkpoint_files.MANIFEST).read_text())
    manifest["files"]["model.safetensors"]["size"] = (folder / "model.safetensors").stat().st_size
    (folder / checkpoint_files.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("accepts", [trainer_accepts, check_passes, weights_load])
@pytest.mark.parametrize("damage", [leave_intact, falsify_digest, remove_digest, replace_weights])
def test_all_readers_accept_the_same_checkpoints(
    accepts: Callable[[Path], bool], damage: Callable[[Path], None], run_dir: Path
) -> None:
    damage(checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200))
    assert accepts(run_dir) is (damage is leave_intact)


def test_steps_are_listed_ascending_from_exact_names(tmp_path: Path) -> None:
    for name in ("step-00000100", "step-00000020", "step-123456789", "step-", "step-1x", "latest", ".saving-step-00000300"):
        (tmp_path / name).mkdir()
    assert checkpoint_files.list_steps(tmp_path) == [20, 100, 123456789]
    assert checkpoint_files.list_steps(tmp_path / "absent") == []
    assert all(
        checkpoint_files.parse_step(checkpoint_files.get_checkpoint_path(tmp_path, step)) == step
        for step in (20, 100, 123456789)
    )


def test_contents_are_compared_only_with_hashes(run_dir: Path) -> None:
    folder = checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(run_dir), 200)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert checkpoint_files.find_problems(folder, check_hashes=False) == []
    assert checkpoint_files.find_problems(folder) == ["model.safetensors does not match its sha256"]
    assert checkpoint_files.find_problems(folder.with_name("step-00000400")) == ["step-00000400 does not exist"]


def test_mismatch_names_missing_weights_and_shapes(tmp_path: Path) -> None:
    saved = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    assert checkpoint_files.describe_mismatch(tmp_path, saved, {"b": torch.ones(4), "a": torch.ones(2, 3)}) is None
    message = checkpoint_files.describe_mismatch(tmp_path, saved, {"a": torch.ones(3, 2), "b": torch.ones(4)})
    assert message and "a has shape [2, 3], the model needs [3, 2]" in message and "config.yaml" in message
    message = checkpoint_files.describe_mismatch(tmp_path, saved, {"a": torch.ones(2, 3)})
    assert message and "it has b" in message


def test_signed_manifests_that_cannot_be_used(tmp_path: Path) -> None:
    from nsa_lab.runs.checkpoint_files import compute_digest, find_problems, make_manifest_entry

    folder = tmp_path / "step-00000010"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "elsewhere").write_bytes(b"weights")
    files = {"model.safetensors": make_manifest_entry(b"weights")}
    entry = files["model.safetensors"]
    good = {"v": 1, "step": 10, "files": files}
    bad = [{"v": 1, "files": files}, *({**good, "step": step} for step in ("10", True, None, 10.0))]
    bad += [{**good, "v": version} for version in (2, "1", None)]
    names = ("a" * 5000, "a\0b", "..", "\ud800", "", "../elsewhere", str(tmp_path / "elsewhere"))
    bad += [{**good, "files": {**files, name: entry, "state.json": entry}} for name in names]
    (folder / "state.json").write_bytes(b"weights")
    whole = {**good, "files": {**files, "state.json": entry}}
    for index, manifest in enumerate([whole, *bad]):
        (folder / "MANIFEST.json").write_text(json.dumps({**manifest, "digest": compute_digest(manifest)}))
        assert bool(find_problems(folder)) == (index > 0), manifest
