"""A full disk ends a run with an error message and a status, whichever file was being written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.tensorboard
from fake_run import assert_unchanged
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.train import checkpoint
from nsa_lab.train.attempt import run
from nsa_lab.train.telemetry import event_log
from nsa_lab.train.telemetry.event_log import EventLog

MB = 1 << 20


def config(**train: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "name": "full",
            "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 4, "d_v": 4},
            "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {"source": "synthetic", "max_tokens": 50_000, "val_fraction": 0.2},
            "train": {"steps": 8, "seq_len": 32, "batch_size": 2, "log_every": 1, "save_every": 2, "eval_every": 4} | train,
        }
    )


class FullDisk:
    """Allows `room` writes of any kind, then raises ENOSPC for every write."""

    def __init__(self, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.refused = room, 0
        at_once = {name: getattr(os, name) for name in dir(os)}
        monkeypatch.setattr(event_log, "os", types.SimpleNamespace(**at_once | {"write": self._limited(os.write)}))
        for place, name in (
            (checkpoint.Filesystem, "write"),
            (directory, "write_json"),
            (torch.utils.tensorboard.SummaryWriter, "add_scalar"),
        ):
            monkeypatch.setattr(place, name, self._limited(getattr(place, name)))

    def _limited(self, write: Any) -> Any:
        def limited(*arguments: Any, **options: Any) -> Any:
            if self.room <= 0:
                self.refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= 1
            return write(*arguments, **options)

        return limited


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_partly_written_event_is_truncated_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path, "r", 1)
    log.append("heartbeat", n=1)
    left = [7]

    def write(descriptor: int, data: bytes) -> int:
        """Write a few bytes at first, as a nearly full disk does, then none."""
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, left[0] = os.write(descriptor, data[: left[0]]), 0
        return taken

    with monkeypatch.context() as full:
        full.setattr(event_log, "os", types.SimpleNamespace(**{n: getattr(os, n) for n in dir(os)} | {"write": write}))
        log.append("heartbeat", n=2)
        log.append("heartbeat", n=3)
        whole = (tmp_path / "events.jsonl").read_bytes()
        assert whole.endswith(b"}\n") and whole.count(b"\n") == 1
    log.append("heartbeat", n=4)
    log.append("heartbeat", n=5)
    log.close()
    first, lost, *others = events.read_events(tmp_path)
    assert first["n"] == 1 and [event.get("n") for event in others] == [4, 5], "what is missing is said once"
    assert lost["where"] == "events" and lost["message"].startswith("the 2 events before this one could not be written")


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path, "r", 1)
    pieces = {n: getattr(os, n) for n in dir(os)} | {"write": lambda descriptor, data: os.write(descriptor, data[:5])}
    monkeypatch.setattr(event_log, "os", types.SimpleNamespace(**pieces))
    log.append("heartbeat", n=1)
    log.append("heartbeat", n=2)
    log.close()
    assert [e["n"] for e in events.read_events(tmp_path)] == [1, 2]


# The run makes about 70 writes; the first ones are made by preflight.
@pytest.mark.slow
@looped
@pytest.mark.parametrize("room", [1, *(pytest.param(room, marks=pytest.mark.nightly) for room in (12, 33, 48)), 25, 60])
def test_the_run_halts_with_a_message_whichever_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    run_dir = lifecycle.create_run(config(), tmp_path)
    disk = FullDisk(room, monkeypatch)
    assert run(run_dir) == directory.EXIT_HALTED
    assert disk.refused > 2
    message = directory.read_status(run_dir)
    assert (
        message["status"] == lifecycle.get_state(run_dir) == directory.HALTED
        and message["exit_code"] == directory.EXIT_HALTED
    )
    assert "the disk is full: " in message["reason"] and " a checkpoint needs " in message["reason"]
    assert not [*run_dir.glob("checkpoints/.saving-*"), *run_dir.glob(".status*")]
    assert_unchanged(run_dir)


@pytest.mark.slow
def test_a_temporarily_full_disk_costs_events_that_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full during one save and the events around it; then there is space, and the run continues."""
    run_dir = lifecycle.create_run(config(), tmp_path)
    disk = FullDisk(10**9, monkeypatch)
    saves = 0
    write = checkpoint.CheckpointStore.save

    def save(*arguments: Any) -> Any:
        nonlocal saves
        saves += 1
        # The first save is part of preflight.
        if saves == 2:
            disk.room = 1
        try:
            return write(*arguments)
        finally:
            disk.room = disk.room or 10**9

    monkeypatch.setattr(checkpoint.CheckpointStore, "save", save)
    assert run(run_dir) == 0
    record = events.read_events(run_dir)
    assert [e["step"] for e in record if e["kind"] == "checkpoint"] == [4, 6, 8]
    failed = next(e for e in record if e["kind"] == "error")
    assert_unchanged(run_dir)
    assert failed["where"] == "save" and not failed["fatal"] and failed["message"].startswith("the disk is full: ")
    assert directory.read_status(run_dir)["status"] == directory.DONE


@pytest.mark.slow
def test_a_removed_checkpoint_folder_is_created_again_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = lifecycle.create_run(config(), tmp_path)
    write = checkpoint.CheckpointStore.save

    def save(store: checkpoint.CheckpointStore, step: int, *rest: Any) -> Any:
        saved = write(store, step, *rest)
        if step == 2:
            shutil.rmtree(store.folder)
        return saved

    monkeypatch.setattr(checkpoint.CheckpointStore, "save", save)
    assert run(run_dir) == 0
    record = events.read_events(run_dir)
    (guard,) = [e for e in record if e["kind"] == "guard"]
    assert guard["rule"] == "checkpoints" and guard["step"] == 4 and "was removed during training" in guard["text"]
    assert [e["step"] for e in record if e["kind"] == "checkpoint"] == [2, 4, 6, 8]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 30 MB file system; mounting it needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    created = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "none", folder], capture_output=True, check=False)
    if created.returncode:
        pytest.skip("a file system of 30 MB can be mounted by root only")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 4096])
def test_a_run_on_a_30_mb_disk_halts_and_resumes(small_disk: Path, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Another program fills the disk completely. The run saves its state, and resumes when there is space."""
    run_dir, other = lifecycle.create_run(config(), small_disk), small_disk / "other"
    write = checkpoint.CheckpointStore.save

    def save(store: checkpoint.CheckpointStore, step: int, *rest: Any) -> Any:
        if step == 4 and not other.exists():
            with open(other, "wb", buffering=0) as file:
                left = shutil.disk_usage(small_disk).free - spare
                while left > 0:
                    left -= file.write(b"\0" * min(left, MB))
        return write(store, step, *rest)

    with monkeypatch.context() as filled:
        filled.setattr(checkpoint.CheckpointStore, "save", save)
        assert run(run_dir) == directory.EXIT_HALTED
    message = directory.read_status(run_dir)
    assert lifecycle.get_state(run_dir) == directory.HALTED
    # Meanwhile the run's events use the remaining space.
    free = re.search(r"the disk is full: a checkpoint needs [\d,]+ bytes, ([\d,]+) are free", message["reason"])
    assert free and int(free[1].replace(",", "")) <= spare, message["reason"]
    assert not [*run_dir.glob("checkpoints/.saving-*"), *run_dir.glob(".status*")]
    other.unlink()
    assert run(run_dir) == 0
    record = events.read_events(run_dir)
    assert [e["from_step"] for e in record if e["kind"] == "resume"] == [2]
    assert [e["step"] for e in events.get_step_events(record)] == list(range(1, 9))
    assert_unchanged(run_dir)
