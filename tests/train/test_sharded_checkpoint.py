"""Sharded checkpoints: portable between numbers of ranks, written in the background, bounded in memory, safe to read."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_checks import run_ranks
from test_multi_rank import run_with
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from nsa_lab.config import ConfigError
from nsa_lab.inference.load import NoCheckpoint, load_model
from nsa_lab.model import sharded_files
from nsa_lab.model.sharded_files import INDEX, WEIGHTS
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.checkpoint_files import find_problems
from nsa_lab.train.checkpoint_convert import convert_checkpoint
from nsa_lab.train.sharded_checkpoint import ShardFileWriter

Make = Callable[..., Path]

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("forked")]


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_any_number_of_ranks_loads_what_any_number_saved(tmp_path: Path, optimizer: str) -> None:
    """Sharded and unsharded ranks, hosts with copies, and one rank; all continue as one rank would."""
    check = "portable_checkpoint"
    for name, n_ranks, local_size in ((check, 2, 0), (f"{check}_ddp", 1, 0)):
        folder = tmp_path / f"{name}-{n_ranks}"
        folder.mkdir()
        run_ranks(name, n_ranks, folder, "save", optimizer, local_size=local_size)
        for loading, n_loading, local in ((f"{check}_ddp", 1, 0), (check, 4, 2), (check, 3, 0)):
            run_ranks(loading, n_loading, folder, "load", optimizer, local_size=local)


@pytest.mark.slow
def test_the_two_forms_of_a_checkpoint_convert_into_each_other_bit_for_bit(tmp_path: Path) -> None:
    run_ranks("portable_checkpoint", 2, tmp_path, "save", "adamw")
    sharded = tmp_path / "checkpoints/step-00000003"
    (tmp_path / "config.yaml").write_text("name: ranks\n")
    single = convert_checkpoint(sharded, tmp_path / "single", "single")
    again = convert_checkpoint(single, tmp_path / "again", "sharded")
    assert not find_problems(single) and not find_problems(again)
    assert (single.parents[1] / "config.yaml").is_file() and (single / "model.safetensors").is_file()
    run_ranks("equal_state_ddp", 1, sharded, single)
    run_ranks("equal_state", 2, single, again)


@pytest.mark.slow
def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run_ranks("background_save", 2, tmp_path)


@pytest.mark.slow
def test_a_rank_that_cannot_write_fails_the_save_of_all(tmp_path: Path) -> None:
    run_ranks("failed_save", 2, tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc")
def test_a_save_takes_at_most_one_and_a_half_shards_of_host_memory(tmp_path: Path) -> None:
    for check, n_ranks in (("memory_of_save", 2), ("memory_of_save_ddp", 1)):
        print(*run_ranks(check, n_ranks, tmp_path / check), sep="")


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, ("called",)


def test_a_malicious_index_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({WEIGHTS: {"a": torch.ones(3)}}, storage_writer=ShardFileWriter(tmp_path))
    assert torch.equal(sharded_files.read_weights(tmp_path, "cpu")["a"], torch.ones(3))
    whole = pickle.loads((tmp_path / INDEX).read_bytes())
    assert str(tmp_path) not in str(whole), "an index does not contain the path of this machine"
    escaping = copy.deepcopy(whole)
    for place in escaping.storage_data.values():
        place.relative_path = "../elsewhere.distcp"
    with_bytes = copy.deepcopy(whole)
    with_bytes.state_dict_metadata["b"] = BytesStorageMetadata()
    for index, reason in (
        (Call(), "does not belong into an index"),
        ([Call()], "does not belong into an index"),
        (with_bytes, "does not belong into an index"),
        ({"not": "an index"}, "expected an index of tensors only"),
        (escaping, "expected files in its own folder"),
    ):
        (tmp_path / INDEX).write_bytes(pickle.dumps(index))
        for read in (sharded_files.read_shapes, lambda folder: sharded_files.read_weights(folder, "cpu")):
            with pytest.raises(sharded_files.ShardError, match=reason):
                read(tmp_path)
    assert not (tmp_path / "called").exists()
    for data in (b"", b"\x80", pickle.dumps(whole)[:-20]):
        (tmp_path / INDEX).write_bytes(data)
        with pytest.raises(sharded_files.ShardError, match="cannot be read"):
            sharded_files.read_shapes(tmp_path)
    (tmp_path / INDEX).write_bytes(pickle.dumps(whole))
    (tmp_path / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(sharded_files.ShardError, match=re.escape(str(tmp_path))):
        sharded_files.read_weights(tmp_path, "cpu")


SHARDED = {"runtime": {"parallel": "fsdp"}, "batch_size": 2, "accumulate_grad_batches": 1}


@pytest.mark.slow
def test_readers_load_a_sharded_run_and_quarantine_a_damaged_shard(new_run: Make) -> None:
    run_dir = new_run(**SHARDED, steps=10)
    assert run_with(run_dir, 2) == 0
    newest, previous = (run_dir / f"checkpoints/step-000000{step}" for step in ("10", "05"))
    saved = [e for e in events.read_events(run_dir) if e["kind"] == "checkpoint"]
    assert [(e["step"], e["tokens"]) for e in saved] == [(5, 5 * 64), (10, 10 * 64)]
    assert saved[1]["bytes"] == sum(path.stat().st_size for path in newest.iterdir())
    model = load_model(run_dir)
    weights = sharded_files.read_weights(newest, "cpu")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="sharded already"):
        convert_checkpoint(newest, run_dir.parent / "new", "sharded")
    shard = newest / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(NoCheckpoint, match=r"__1_0\.distcp does not match its sha256"):
        load_model(run_dir)
    with pytest.raises(ConfigError, match=r"__1_0\.distcp does not match its sha256"):
        convert_checkpoint(newest, run_dir.parent / "new", "single")
    directory.write_status(run_dir, run=run_dir.name, status=directory.PREEMPTED)
    assert run_with(run_dir, 2) == 0
    record = events.read_events(run_dir)
    assert [e["checkpoint"] for e in record if e["kind"] == "resume"] == [previous.name]
    assert [e["checkpoint_step"] for e in record if e["kind"] == "guard"] == [10]
    assert not find_problems(newest)


@pytest.mark.nightly
def test_a_kill_in_the_middle_of_a_background_save_costs_that_checkpoint_only(new_run: Make) -> None:
    run_dir = new_run(**SHARDED, steps=400, save_every=5, eval_every=0, stats_every=400)
    supervisor = lifecycle.start(run_dir, ranks=2)
    saving = run_dir / "checkpoints"
    deadline = time.monotonic() + 60
    while not (list(saving.glob("step-*")) and list(saving.glob(".saving-*"))):
        assert time.monotonic() < deadline and lifecycle.is_alive(run_dir), (run_dir / directory.LOG).read_text()
    os.kill(supervisor, signal.SIGKILL)
    assert lifecycle.wait(run_dir, 10)
    steps = [int(path.name[5:]) for path in saving.glob("step-*")]
    assert not any(find_problems(saving / f"step-{step:08d}") for step in steps)
    lifecycle.resume(run_dir, ranks=2)
    assert lifecycle.wait(run_dir, 60) and directory.read_status(run_dir)["status"] == directory.DONE
    (resume,) = [e for e in events.read_events(run_dir) if e["kind"] == "resume"]
    assert resume["from_step"] == max(steps)
    assert not list(saving.glob(".saving-*"))
