"""A run whose newest checkpoint is damaged resumes from the previous one and records it."""

from __future__ import annotations

import errno
import json
import math
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import looped
from safetensors.torch import load_file, save_file

from nsa_lab import load_model
from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.checkpoint_files import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    find_problems,
    format_manifest,
    read_manifest_entry,
)
from nsa_lab.runs.model_files import NoCheckpoint
from nsa_lab.train import checkpoint_content
from nsa_lab.train.attempt import run
from nsa_lab.train.checkpoint import CheckpointStore, Filesystem
from nsa_lab.train.checkpoint_convert import convert_checkpoint
from nsa_lab.train.muon import is_muon_weight


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


@pytest.mark.slow
def test_with_no_valid_checkpoint_left_the_run_halts_and_is_not_started_over(finished_run: Path) -> None:
    for path in finished_run.glob("checkpoints/step-*/model.safetensors"):
        path.write_bytes(b"")
    assert run(finished_run) == directory.EXIT_HALTED
    assert "not started over" in directory.read_status(finished_run)["reason"]
    shutil.rmtree(finished_run / "checkpoints")
    assert run(finished_run) == directory.EXIT_HALTED, "the record remembers that there were checkpoints"


def sign(folder: Path) -> None:
    """Write a manifest that agrees with the files as they are."""
    manifest = json.loads((folder / MANIFEST).read_text())
    facts = {name: value for name, value in manifest.items() if name not in ("v", "step", "files", "digest")}
    files = {path.name: read_manifest_entry(path) for path in folder.iterdir() if path.name != MANIFEST}
    (folder / MANIFEST).write_text(format_manifest(manifest["step"], files, facts))


def edit_state(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = json.loads((folder / STATE).read_text())
        (folder / STATE).write_text(json.dumps({**state, **changes}))

    return edit


def repeat_step(name: str, step: int) -> Callable[[Path], None]:
    """Return an edit that puts another value of a key before its own. Most readers take the last one."""

    def edit(folder: Path) -> None:
        (folder / name).write_text((folder / name).read_text().replace("{", f'{{"step": {step}, ', 1))

    return edit


def write(name: str, data: bytes) -> Callable[[Path], None]:
    def write_file(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write_file


def truncate(name: str, fraction: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * fraction)])

    return cut


def edit_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return an edit of the header of the weights, of the same length."""

    def edit(folder: Path) -> None:
        data = (folder / MODEL).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        (folder / MODEL).write_bytes(
            data[:8] + json.dumps(header).replace(" ", "").encode().ljust(size)[:size] + data[8 + size :]
        )

    return edit


def lie_about_shape(header: dict[str, Any]) -> None:
    next(entry for entry in header.values() if "shape" in entry)["shape"] = [10**6, 10**6]


def lie_about_type(header: dict[str, Any]) -> None:
    for entry in header.values():
        if "dtype" in entry:
            entry["dtype"] = "I32"


def lie_about_offsets(header: dict[str, Any]) -> None:
    entry = next(entry for entry in header.values() if "shape" in entry)
    entry["data_offsets"] = [0, 10**12]


def set_weight(value: float) -> Callable[[Path], None]:
    """Return an edit of the last weight of the last tensor."""

    def edit(folder: Path) -> None:
        data = (folder / MODEL).read_bytes()
        (folder / MODEL).write_bytes(data[:-4] + struct.pack("<f", value))

    return edit


def set_moment(kind: str, value: float) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = torch.load(folder / OPTIMIZER, weights_only=True)
        next(iter(content["moments"].values()))[kind].view(-1)[0] = value
        torch.save(content, folder / OPTIMIZER)

    return edit


def edit_moments(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return an edit of all moments and of those of the first weight."""

    def edit(folder: Path) -> None:
        content = torch.load(folder / OPTIMIZER, weights_only=True)
        change(content["moments"], next(iter(content["moments"].values())))
        torch.save(content, folder / OPTIMIZER)

    return edit


def use_muon(every: dict[str, Any], _: object) -> None:
    """Replace the moments of the matrices by those of Muon."""
    for name in filter(is_muon_weight, every):
        every[name] = {"momentum_buffer": every[name]["exp_avg"]}


def edit_trajectory(folder: Path, **changes: Any) -> None:
    trajectory = json.loads((folder / STATE).read_text())["trajectory"]
    edit_state(trajectory={**trajectory, **{f"train.{key}": value for key, value in changes.items()}})(folder)


def shorten_run(folder: Path) -> None:
    edit_trajectory(folder, steps=5)


def spoil_probe(folder: Path) -> None:
    save_file({"logits": load_file(folder / "probe.safetensors")["logits"] * math.nan}, folder / "probe.safetensors")


def save_optimizer(content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / OPTIMIZER)


# Signed by whoever wrote them: every file matches its digest.
SIGNED: dict[str, tuple[Callable[[Path], None], str]] = {
    "state of {}": (write(STATE, b"{}"), STATE),
    "state that is a list": (write(STATE, b"[1]"), STATE),
    "state of another step": (edit_state(step=4), STATE),
    "step that is a text": (edit_state(step="6"), STATE),
    "state of two steps": (repeat_step(STATE, 5), STATE),
    "guard without losses": (edit_state(guard={}), STATE),
    "losses that are texts": (edit_state(guard={"losses": ["x"]}), STATE),
    "code of nothing": (edit_state(code={}), STATE),
    "empty optimizer": (write(OPTIMIZER, b""), OPTIMIZER),
    "truncated optimizer": (truncate(OPTIMIZER, 0.5), OPTIMIZER),
    "almost whole optimizer": (truncate(OPTIMIZER, 0.99), OPTIMIZER),
    "optimizer without rng": (save_optimizer({"moments": {}}), "rng: expected a mapping"),
    "optimizer that is a tensor": (save_optimizer(torch.zeros(3)), OPTIMIZER),
    "no weights": (write(MODEL, b""), MODEL),
    "header of 10^18 bytes": (write(MODEL, (10**18).to_bytes(8, "little") + b"{}"), MODEL),
    "header that is no JSON": (write(MODEL, (4).to_bytes(8, "little") + b"nope"), MODEL),
    "shape that lies": (edit_header(lie_about_shape), MODEL),
    "type that lies": (edit_header(lie_about_type), MODEL),
    "offsets that lie": (edit_header(lie_about_offsets), MODEL),
    "weight of -NaN": (set_weight(-math.nan), "are NaN or infinite"),
    "weight of infinity": (set_weight(-math.inf), "1 of "),
    "moment of NaN": (set_moment("exp_avg", math.nan), "exp_avg: 1 of "),
    "second moment of infinity": (set_moment("exp_avg_sq", math.inf), "exp_avg_sq: 1 of "),
    "negative second moment": (set_moment("exp_avg_sq", -1.0), "are negative"),
    "negative count of steps": (set_moment("step", -6.0), "step: 1 of 1 values are negative"),
    "more steps than were trained": (set_moment("step", 7.0), "step: expected 6 steps, got 7"),
    "fewer steps of one weight": (set_moment("step", 1.0), "step: expected 6 steps, got 1"),
    "half a step": (edit_moments(lambda every, _: [own["step"].fill_(5.5) for own in every.values()]), "6 steps, got 5.5"),
    "a run of fewer steps": (shorten_run, "step: expected at most the 5 steps of the run, got 6"),
    "moments of Muon": (edit_moments(use_muon), "expected exp_avg, exp_avg_sq, step, got momentum_buffer"),
    "no moments": (edit_moments(lambda every, _: every.clear()), "trained weights, got none of "),
    "no moments of one weight": (
        edit_moments(lambda every, _: every.popitem()),
        "trained weights, got none of 1, for example",
    ),
    "no second moment": (edit_moments(lambda _, first: first.pop("exp_avg_sq")), "step, got exp_avg, step"),
    "one moment for all weights": (
        edit_moments(lambda _, first: first.update(exp_avg=torch.zeros(()))),
        "exp_avg: expected a moment of shape [",
    ),
    "half precision": (edit_moments(lambda _, first: first.update(exp_avg=first["exp_avg"].half())), "got torch.float16"),
    "probe of NaN": (spoil_probe, "logits: 8,192 of 8,192 values are NaN or infinite"),
    "truncated weights": (truncate(MODEL, 0.7), MODEL),
    "probe of nothing": (write("probe.safetensors", b""), "probe.safetensors"),
}


@looped
@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "name"), SIGNED.values(), ids=SIGNED)
def test_signed_but_bad_files_cost_one_checkpoint(
    trained_run: Path, tmp_path: Path, spoil: Callable[[Path], None], name: str
) -> None:
    copy = Path(tempfile.mkdtemp(dir=tmp_path)) / "checkpoints"
    store = CheckpointStore(shutil.copytree(trained_run / "checkpoints", copy))
    spoil(store.get_path(6))
    sign(store.get_path(6))
    problems = find_problems(store.get_path(6))
    assert all("is of step" in problem for problem in problems), "every file matches its digest"
    path, quarantined = store.load_latest(checkpoint_content.find_problems)
    assert path == store.get_path(4)
    assert [(checkpoint.step, name in checkpoint.problems[0]) for checkpoint in quarantined] == [(6, True)]


@pytest.mark.slow
def test_frozen_weights_need_no_moments(trained_run: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(trained_run, tmp_path / "run") / "checkpoints/step-00000006"
    edit_moments(lambda every, _: every.clear())(checkpoint)
    assert checkpoint_content.find_problems(checkpoint)
    edit_trajectory(checkpoint, trainable="indexer")
    assert not checkpoint_content.find_problems(checkpoint), "the model has no indexer"


@pytest.mark.slow
def test_moments_are_those_of_the_optimizer(trained_run: Path, tmp_path: Path) -> None:
    """Muon has AdamW's moments of vectors and embeddings only."""
    checkpoint = shutil.copytree(trained_run, tmp_path / "run") / "checkpoints/step-00000006"
    edit_trajectory(checkpoint, optimizer="muon")
    (problem,) = checkpoint_content.find_problems(checkpoint)
    assert "weight: expected momentum_buffer, got exp_avg, exp_avg_sq, step" in problem
    edit_moments(use_muon)(checkpoint)
    assert not checkpoint_content.find_problems(checkpoint)


@pytest.mark.slow
def test_checkpoint_after_the_last_step_of_its_run_is_not_loaded(finished_run: Path) -> None:
    newest = finished_run / "checkpoints/step-00000008"
    shutil.copytree(finished_run / "checkpoints/step-00000006", newest)
    edit_state(step=8)(newest)
    manifest = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(json.dumps({**manifest, "step": 8}))
    sign(newest)
    with pytest.raises(NoCheckpoint, match=r"step-00000008: expected a checkpoint of step 0 to 6, .*, got 8; use another"):
        load_model(finished_run)
    expected = weights(finished_run, 6)
    assert run(finished_run) == 0 and weights(finished_run, 6) == expected
    (guard,) = [event for event in events.read_events(finished_run) if event["kind"] == "guard"]
    assert guard["action"] == "quarantined" and guard["checkpoint_step"] == 8


@pytest.mark.slow
def test_sharded_values_that_training_never_has_are_found(trained_run: Path, tmp_path: Path) -> None:
    source = trained_run / "checkpoints/step-00000006"
    assert checkpoint_content.find_problems(convert_checkpoint(source, tmp_path / "whole", "sharded")) == []
    for number, (spoil, words) in enumerate(
        (
            (set_weight(math.nan), "weights."),
            (set_moment("exp_avg", math.inf), "moments."),
            (edit_moments(lambda every, _: every.popitem()), "moments: expected those of "),
            (set_moment("step", 5.0), "moments."),
            (edit_moments(use_muon), "moments of "),
        )
    ):
        run_dir = shutil.copytree(trained_run, tmp_path / f"copy {number}")
        spoil(run_dir / "checkpoints/step-00000006")
        sign(run_dir / "checkpoints/step-00000006")
        sharded = convert_checkpoint(run_dir / "checkpoints/step-00000006", tmp_path / f"sharded {number}", "sharded")
        (problem,) = checkpoint_content.find_problems(sharded)
        reasons = ("values are NaN or infinite", "got none of 1,", ".step: expected 6 steps, got 5", "got momentum_buffer")
        assert problem.startswith(words) and any(reason in problem for reason in reasons)


@pytest.mark.slow
def test_run_with_a_signed_but_bad_checkpoint_resumes_from_the_one_before(finished_run: Path) -> None:
    expected = weights(finished_run, 6)
    for spoil in (edit_state(guard=7), truncate(OPTIMIZER, 0.3), set_weight(-math.nan), set_moment("exp_avg", math.inf)):
        folder = finished_run / "checkpoints/step-00000006"
        spoil(folder)
        sign(folder)
        assert run(finished_run) == 0
        assert weights(finished_run, 6) == expected
    guards = [event for event in events.read_events(finished_run) if event["kind"] == "guard"]
    assert [guard["action"] for guard in guards] == ["quarantined"] * 4


def test_odd_files_among_the_checkpoints_block_no_save(trained_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained_run / "checkpoints", tmp_path / "checkpoints")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (folder / ".saving-step-00000008").write_text("left over")
    (folder / ".saving-step-00000007").symlink_to(victim)
    (folder / ".removing-step-00000001").mkdir()
    (folder / ".latest").symlink_to(victim / "file")
    store = CheckpointStore(folder)
    saved = store.save(8, {MODEL: lambda: b"weights"}, {})
    assert saved.path == store.get_path(8) and (folder / "latest").read_text() == "step-00000008\n"
    assert (victim / "file").read_text() == "mine"
    assert not list(folder.glob(".*"))


def test_files_that_cannot_be_removed_block_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of another user that contains something, for example."""
    folder = tmp_path / "checkpoints"
    for name in (".saving-step-00000001", ".saving-step-00000002", ".removing-step-00000001", ".latest"):
        (folder / name / "theirs").mkdir(parents=True)
    remove = Filesystem.remove_tree

    def remove_own(self: Filesystem, path: Path) -> None:
        if (path / "theirs").exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove(self, path)

    monkeypatch.setattr(Filesystem, "remove_tree", remove_own)
    store = CheckpointStore(folder, keep_last=1)
    for step in (1, 2, 3, 4):
        saved = store.save(step, {MODEL: lambda: b"weights"}, {})
        assert store.list_steps() == [step] and saved.pruned == ([f"step-{step - 1:08d}"] if step > 1 else [])
        assert (folder / "latest").read_text() == f"step-{step:08d}\n"
        if step == 2:
            (saved.path / "theirs").mkdir()
    assert len(list(folder.glob(".*"))) == 5
    assert caplog.text.count("/.saving-step-00000001: could not be removed (permission denied)") == 1
    assert caplog.text.count("/.removing-step-00000002: could not be removed (permission denied)") == 1


def test_later_and_broken_entries_do_not_cost_the_new_checkpoint(tmp_path: Path) -> None:
    """Regression: next to a folder of a later step, a save pruned the checkpoint that it had just written."""
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.get_path(9).mkdir()
    store.get_path(2).symlink_to("absent")
    for step in (1, 2, 3):
        saved = store.save(step, {MODEL: lambda: b"weights"}, {})
        assert saved.path.is_dir() and not saved.path.is_symlink() and store.list_steps() == [step, 9]
    path, quarantined = store.load_latest()
    assert path == store.get_path(3) and [checkpoint.step for checkpoint in quarantined] == [9]
    (store.folder / "latest").unlink()
    (store.folder / "latest").mkdir()
    with pytest.raises(IsADirectoryError, match=r"/latest'$"):
        store.save(4, {MODEL: lambda: b"weights"}, {})


def test_checkpoints_that_are_a_file_stop_the_run_with_a_line(finished_run: Path) -> None:
    shutil.rmtree(finished_run / "checkpoints")
    (finished_run / "checkpoints").write_text("")
    with pytest.raises(directory.RunDirectoryError, match="checkpoints: expected a folder, got a file; move it away"):
        run(finished_run)
    with pytest.raises(directory.RunDirectoryError, match="checkpoints: expected a folder, got a file; move it away"):
        CheckpointStore(finished_run / "checkpoints")


@pytest.mark.slow
def test_many_files_of_a_manifest_start_few_threads(trained_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained_run / "checkpoints" / "step-00000006", tmp_path / "step-00000006")
    entry = read_manifest_entry(folder / STATE)
    real = {path.name: read_manifest_entry(path) for path in folder.iterdir() if path.name != MANIFEST}
    for name in (f"part-{n}" for n in range(2000)):
        shutil.copyfile(folder / STATE, folder / name)
        real[name] = entry
    (folder / MANIFEST).write_text(format_manifest(6, real))
    most, start = [0], threading.Thread.start

    def count(thread: threading.Thread) -> None:
        start(thread)
        most[0] = max(most[0], threading.active_count())

    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", count)
        assert find_problems(folder) == []
        assert most[0] <= before + 8
        missing = {**real, **{f"missing-{n}": entry for n in range(95_000)}}
        (folder / MANIFEST).write_text(format_manifest(6, missing))
        problems = find_problems(folder)
        assert problems[0] == "missing-0 is missing" and problems[-1] == "94990 further files"
        assert most[0] <= before + 8
        (folder / MANIFEST).write_text(format_manifest(6, {**missing, **{f"more-{n}": entry for n in range(10_000)}}))
        assert find_problems(folder) in (
            ["MANIFEST.json has no valid list of files with size and sha256"],
            ["MANIFEST.json cannot be read (OSError)"],
        )


def test_manifest_without_weights_is_not_whole(trained_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained_run / "checkpoints" / "step-00000006", tmp_path / "step-00000006")
    for files in ({}, {STATE: read_manifest_entry(folder / STATE)}):
        (folder / MANIFEST).write_text(format_manifest(6, files))
        assert find_problems(folder) == ["MANIFEST.json lists no weights (model.safetensors or .metadata)"]


def test_manifest_with_a_key_twice_is_damaged(trained_run: Path, tmp_path: Path) -> None:
    """The digest covers one of the two values, and another reader may use the other."""
    folder = shutil.copytree(trained_run / "checkpoints" / "step-00000006", tmp_path / "step-00000006")
    assert find_problems(folder) == []
    repeat_step(MANIFEST, 5)(folder)
    assert find_problems(folder) == ["MANIFEST.json cannot be read (ValueError)"]


@pytest.mark.parametrize("how", ["removed", "left in the folder"])
def test_manifest_without_a_file_that_is_read_is_not_whole(trained_run: Path, tmp_path: Path, how: str) -> None:
    """A file that no digest covers could be of any run; without its state, a checkpoint cannot be resumed."""
    store = CheckpointStore(shutil.copytree(trained_run / "checkpoints", tmp_path / "checkpoints"))
    folder = store.get_path(6)
    every = {path.name: read_manifest_entry(path) for path in folder.iterdir() if path.name != MANIFEST}
    (folder / "notes.txt").write_text("a file of somebody else")
    for name in every.keys() - {MODEL, *([] if how == "left in the folder" else [OPTIMIZER, "probe.safetensors"])}:
        if how == "removed":
            (folder / name).unlink()
        (folder / MANIFEST).write_text(format_manifest(6, {key: value for key, value in every.items() if key != name}))
        (problem,) = find_problems(folder)
        assert problem.startswith(f"MANIFEST.json does not list {name}")
    path, quarantined = store.load_latest()
    assert path == store.get_path(4) and [checkpoint.step for checkpoint in quarantined] == [6]


def test_truncated_shard_leaves_the_stacks_in_the_log(tmp_path: Path) -> None:
    """SIGBUS ends the process. `faulthandler`, enabled by the trainer's command, writes where."""
    code = f"""
import sys
from pathlib import Path
import numpy as np
import nsa_lab.train
import nsa_lab.train.__main__ as command
path = Path({str(tmp_path / "shard")!r})
path.write_bytes(bytes(1 << 20))
def read_shard(*_, **__):
    shard = np.memmap(path, mode="r")
    path.write_bytes(b"")
    return int(shard[1 << 19])
nsa_lab.train.run = read_shard
sys.argv = ["train", "."]
command.main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == -signal.SIGBUS, result
    assert "Bus error" in result.stderr and "read_shard" in result.stderr
