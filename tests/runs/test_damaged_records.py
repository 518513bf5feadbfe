"""Damaged files of a run: readers skip the damaged part with a warning, never crash, and still list other runs.

Reading needs no write permission.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_run
import pytest
from typer.testing import CliRunner

from nsa_lab import cli
from nsa_lab.runs import atomic_io, checkpoint_files, directory, events, lifecycle
from nsa_lab.runs.history import History
from nsa_lab.runs.live_view import RunView
from nsa_lab.runs.lock import lock_owner, sign_lock, take_lock
from nsa_lab.train.checkpoint import CheckpointStore


@pytest.fixture(autouse=True)
def _reset_warnings() -> None:
    atomic_io.warn_once.cache_clear()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return fake_run.write_run(tmp_path)


def run_cli(*arguments: object) -> str:
    """Run a command and return its output. A crash would be an exception here."""
    answer = CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "300"})
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer.output


def run_all_readers(run_dir: Path) -> None:
    history = History.read(run_dir)
    history.attempts()
    lifecycle.get_state(run_dir)
    view = RunView(run_dir)
    view.update(events.Tail(run_dir).read())
    assert view.format_numbers() and view.format_line()
    assert run_dir.name[:8] in run_cli("status", run_dir) + run_cli("status", "--outputs", run_dir.parent)
    assert run_cli("health", run_dir)


ENVELOPE = {"v": 1, "t": 5.0, "run": "x", "attempt": 1, "step": 7, "tokens": 9}
INVALID_LINES: dict[str, Any] = {
    "a list": [1, 2],
    "no kind": ENVELOPE,
    "a kind that is a mapping": ENVELOPE | {"kind": {"a": 1}},
    "no step": {"kind": "step", "attempt": 1, "t": 1.0},
    "no attempt": {"kind": "start", "step": 0, "t": 1.0},
    "no time": {"kind": "end", "attempt": 1, "step": 200, "status": "DONE"},
    "attempt is text": ENVELOPE | {"kind": "start", "attempt": "1"},
    "step is not an integer": ENVELOPE | {"kind": "step", "step": 1.5},
    "loss is text": ENVELOPE | {"kind": "step", "loss": "2.0"},
    "from_step is text": ENVELOPE | {"kind": "resume", "from_step": "3"},
    "phase is a number": ENVELOPE | {"kind": "heartbeat", "phase": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("line", [*INVALID_LINES, "no UTF-8", "deep", "cut"])
def test_invalid_line_is_skipped_with_a_warning(run_dir: Path, caplog: pytest.LogCaptureFixture, line: str) -> None:
    path = run_dir / directory.EVENTS
    lines = path.read_bytes().splitlines(keepends=True)
    special = {"no UTF-8": b'{"kind":"\xff"}', "deep": b"[" * 100_000, "cut": lines[40][:20]}
    invalid = special.get(line) or json.dumps(INVALID_LINES[line]).encode()
    expected = events.read_events(run_dir)
    path.write_bytes(b"".join([*lines[:30], invalid + b"\n", *lines[30:]]))
    with caplog.at_level(logging.WARNING, "nsa_lab.runs"):
        assert events.read_events(run_dir) == expected
        events.read_events(run_dir)
    (warning,) = caplog.messages
    assert "a line is not an event" in warning and str(path) in warning and len(warning.splitlines()) == 1
    run_all_readers(run_dir)


def test_incomplete_last_line_gives_no_warning(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(run_dir / directory.EVENTS, "ab") as file:
        file.write(b'{"v":1,"kind":"st')
    with caplog.at_level(logging.WARNING, "nsa_lab.runs"):
        events.read_events(run_dir)
    assert not caplog.messages


def test_readers_accept_events_without_their_usual_fields(run_dir: Path) -> None:
    with open(run_dir / directory.EVENTS, "a") as file:
        for kind in ("step", "eval", "heartbeat", "start", "resume", "guard", "stall", "error", "signal", "end"):
            file.write(json.dumps(ENVELOPE | {"kind": kind, "attempt": 2}) + "\n")
    history = History.read(run_dir)
    assert len(history.attempts()) == 3 and lifecycle.get_state(run_dir) == directory.DONE
    RunView(run_dir).update(history.events)
    assert run_cli("status", run_dir)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def other_json(path: Path) -> None:
    path.write_text("[1, 2]")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def repeat_key(path: Path) -> None:
    """Another reader may take the first value."""
    text = path.read_text()
    path.write_text(text.replace('"step":', '"step": 1, "step":') if '"step":' in text else "[]")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, not_text, other_json, empty, repeat_key])
@pytest.mark.parametrize("name", [directory.STATUS, directory.ENVIRONMENT, "evaluation.json"])
def test_damaged_file_is_ignored_with_a_warning(
    run_dir: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    (run_dir / "evaluation.json").write_text('{"v": 1, "step": 3}')
    damage(run_dir / name)
    with caplog.at_level(logging.WARNING, "nsa_lab.runs"):
        run_all_readers(run_dir)
        from nsa_lab.runs.evaluation import read_evaluation

        read_evaluation(run_dir)
    assert any(f"{run_dir / name}: damaged" in message for message in caplog.messages)
    assert lifecycle.get_state(run_dir) == directory.DONE, "the record says how the run ended"


@pytest.mark.slow
def test_status_with_invalid_types_is_damaged(run_dir: Path) -> None:
    status = directory.read_status(run_dir)
    for wrong in ({"step": "many"}, {"status": 3}, {"tokens": [1]}, {"run": None}):
        (run_dir / directory.STATUS).write_text(json.dumps(status | wrong))
        assert directory.read_status(run_dir) == {} and lifecycle.get_state(run_dir) == directory.DONE
        run_all_readers(run_dir)


@pytest.mark.parametrize(
    "files", [[], ["model.safetensors"], {"model.safetensors": 5}, {"../../x": {"size": 1, "sha256": "0"}}, None, 7]
)
def test_manifest_without_a_valid_file_list_is_damaged(run_dir: Path, files: Any) -> None:
    fake_run.write_checkpoint(run_dir, 100)
    path = fake_run.write_checkpoint(run_dir, 200)
    manifest = {"v": 1, "step": 200, "files": files}
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "digest": checkpoint_files.compute_digest(manifest)}))
    (problem,) = checkpoint_files.find_problems(path)
    assert "MANIFEST.json" in problem
    newest, moved = CheckpointStore(run_dir / directory.CHECKPOINTS).load_latest()
    assert newest.name == "step-00000100" and [m.step for m in moved] == [200]


def test_other_entries_named_like_checkpoints_are_ignored(run_dir: Path) -> None:
    folder = run_dir / directory.CHECKPOINTS
    fake_run.write_checkpoint(run_dir, 100)
    for name in ("step-00000300", "step-abc", "step-", "step-²", "step-٣"):
        (folder / name).write_text("a note")
    for name in ("step-7", "step-0000000000400", "step--0000001"):
        (folder / name).mkdir()
    before = sorted(path.name for path in folder.iterdir())
    store = CheckpointStore(folder, keep_last=1)
    assert store.list_steps() == [100]
    assert store.load_latest()[0].name == "step-00000100"
    assert sorted(path.name for path in folder.iterdir()) == before
    store.save(300, {"model.safetensors": lambda: fake_run.NO_WEIGHTS}, {})
    assert store.list_steps() == [300], "the file in the way is in quarantine"
    run_all_readers(run_dir)


def test_copied_run_does_not_hide_others(run_dir: Path) -> None:
    copy = run_dir.with_name("fake-20260101T000000Z-copy")
    shutil.copytree(run_dir, copy)
    output = run_cli("status", "--outputs", run_dir.parent)
    assert [run_dir.name, "DONE"] in [line.split()[:2] for line in output.splitlines()]
    assert [copy.name, "?"] in [line.split()[:2] for line in output.splitlines()]
    assert copy.name in output and "if the folder was renamed or copied" in output
    directory.write_status(run_dir, run=run_dir.name, status=directory.PREEMPTED)
    assert lifecycle.find_unfinished(fake_run.make_config(), run_dir.parent) == run_dir


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_lock_with_invalid_content_counts_as_held(run_dir: Path, text: bytes) -> None:
    lock = take_lock(run_dir)
    os.pwrite(lock, text, 0)
    assert lock_owner(run_dir) == {}
    os.close(lock)


@pytest.fixture
def read_only(run_dir: Path) -> Iterator[Path]:
    """Run directory on read-only storage: a read-only mount for root, file modes for other users."""
    (run_dir / directory.LOCK).write_text("")
    place = run_dir.parent
    if os.geteuid():
        modes = {path: path.stat().st_mode for path in (run_dir, *run_dir.iterdir())}
        for path in reversed(modes):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield run_dir
        for path, mode in modes.items():
            path.chmod(mode)
        return
    bound = subprocess.run(["mount", "--bind", place, place], capture_output=True, check=False)
    if bound.returncode:
        pytest.skip("root can neither mount here nor be denied writing")
    subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    yield run_dir
    subprocess.run(["umount", place], check=True)


@pytest.mark.slow
def test_reading_needs_no_write_permission(read_only: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(OSError):
        (read_only / "new").write_text("")
    run_all_readers(read_only)
    assert directory.DONE in run_cli("status", read_only)
    answer = CliRunner().invoke(cli.app, ["report", str(read_only)])
    assert isinstance(answer.exception, directory.RunDirectoryError) and "--page FILE" in str(answer.exception)
    page = tmp_path_factory.mktemp("elsewhere") / "page.html"
    assert str(page) in run_cli("report", read_only, "--page", page) and page.is_file()


def test_lock_owner_opens_the_lock_read_only(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = take_lock(run_dir)
    sign_lock(lock, os.getpid())
    open_flags = []
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: open_flags.append(flags) or os_open(path, flags, *rest))
    assert lifecycle.attach(run_dir) == os.getpid()
    assert open_flags and not any(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flags in open_flags)
    os.close(lock)


def test_files_are_read_up_to_a_bound(tmp_path: Path) -> None:
    path, block = tmp_path / "file", atomic_io.BLOCK_BYTES
    for size in (0, 1, block - 1, block, block + 1, 3 * block + 5):
        content = os.urandom(size)
        path.write_bytes(content)
        assert atomic_io.read_bounded(path) == atomic_io.read_bounded(path, size) == content
        for bound in (size - 1, size // 2):
            if 0 <= bound < size:
                with pytest.raises(atomic_io.UnreadableFile):
                    atomic_io.read_bounded(path, bound)


def test_a_run_without_steps_is_not_exported(run_dir: Path) -> None:
    for content in (None, b"\0" * 500):
        path = run_dir / directory.EVENTS
        path.unlink(missing_ok=True)
        if content:
            path.write_bytes(content)
        answer = CliRunner().invoke(cli.app, ["export", str(run_dir), "--csv"])
        assert isinstance(answer.exception, directory.RunDirectoryError) and not answer.stdout
