"""A run whose newest checkpoint is damaged resumes from the previous one and records it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.train.attempt import run


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig.from_dict(
        {
            "name": "damaged",
            "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 4, "d_v": 4},
            "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {"source": "synthetic", "max_tokens": 50_000, "val_fraction": 0.2},
            "train": {"steps": 6, "seq_len": 32, "batch_size": 2, "lr": 1e-2, "save_every": 2, "eval_every": 0},
        }
    )
    run_dir = lifecycle.create_run(config, tmp_path_factory.mktemp("whole"))
    assert run(run_dir) == 0
    return run_dir


@pytest.fixture
def finished_run(trained_run: Path, tmp_path: Path) -> Path:
    """A finished run in a temporary directory, for this test only."""
    return shutil.copytree(trained_run, tmp_path / trained_run.name)


def weights(run_dir: Path, step: int) -> bytes:
    return (run_dir / f"checkpoints/step-{step:08d}/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "probe.safetensors", "MANIFEST.json"])
def test_a_flipped_byte_in_any_file_costs_one_checkpoint_and_no_accuracy(finished_run: Path, name: str) -> None:
    expected = weights(finished_run, 6)
    path = finished_run / "checkpoints/step-00000006" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x04
    path.write_bytes(data)
    assert run(finished_run) == 0
    assert weights(finished_run, 6) == expected
    record = events.read_events(finished_run)
    guard = next(e for e in record if e["kind"] == "guard")
    assert guard["rule"] == "checkpoint" and guard["action"] == "quarantined" and name in guard["value"]
    assert [e["from_step"] for e in record if e["kind"] == "resume"] == [4]


def test_with_no_valid_checkpoint_left_the_run_halts_and_is_not_started_over(finished_run: Path) -> None:
    for path in finished_run.glob("checkpoints/step-*/model.safetensors"):
        path.write_bytes(b"")
    assert run(finished_run) == directory.EXIT_HALTED
    assert "not started over" in directory.read_status(finished_run)["reason"]
    shutil.rmtree(finished_run / "checkpoints")
    assert run(finished_run) == directory.EXIT_HALTED, "the record remembers that there were checkpoints"
