"""Rights that are missing and folders that are odd give one line with path, reason and remedy, never a traceback.

The commands run as a user whom permissions stop (`unprivileged.py`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fake_run
import pytest
import unprivileged

from nsa_lab.config.errors import describe_os_error
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.atomic_io import UnwritableFile, overwrite_json, write_text
from nsa_lab.runs.checkpoint_files import list_steps
from nsa_lab.runs.lock import take_lock
from nsa_lab.runs.model_files import NoCheckpoint, find_checkpoint
from nsa_lab.train.telemetry.event_log import EventLog

RUN_COMMANDS = (("resume",), ("status",), ("health",), ("stop",), ("follow",), ("report",), ("export", "--csv"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)


def assert_one_line(result: object, *texts: str) -> None:
    output = f"{getattr(result, 'stdout', '')}{getattr(result, 'stderr', '')}"
    assert "Traceback" not in output, output
    assert getattr(result, "returncode", None) == directory.EXIT_USAGE, output
    for text in texts:
        assert text in output, output


@pytest.mark.slow
def test_private_run_of_another_user(folder: Path) -> None:
    outputs = folder / "outputs"
    run_dir = fake_run.write_run(outputs)
    other = shutil.copytree(run_dir, outputs / "other-20260102T000000Z-abcd")
    unprivileged.make_private(run_dir)
    for command in RUN_COMMANDS[:3]:
        result = unprivileged.run_cli(command[0], run_dir, *command[1:], cwd=folder)
        assert_one_line(result, str(run_dir), "permission denied")
    result = unprivileged.run_cli("status", "--outputs", outputs, cwd=folder)
    assert result.returncode == 0 and "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    assert any(line.startswith(f"{run_dir.name}: ") and "permission denied" in line for line in lines), lines
    assert any(line.startswith(other.name) for line in lines)


@pytest.mark.slow
def test_run_whose_files_this_user_may_not_write_or_read(folder: Path) -> None:
    run_dir = fake_run.write_run(folder)
    status = json.loads((run_dir / directory.STATUS).read_text())
    (run_dir / directory.STATUS).write_text(json.dumps({**status, "status": "PREEMPTED"}))
    (run_dir / directory.LOCK).touch()
    unprivileged.make_private(run_dir / directory.LOCK)
    result = unprivileged.run_cli("resume", run_dir, cwd=folder)
    assert_one_line(result, "trainer.lock: permission denied")
    (run_dir / directory.LOCK).unlink()
    for name in (directory.LOG, directory.CHECKPOINTS):
        (run_dir / name).touch() if name == directory.LOG else (run_dir / name).mkdir(exist_ok=True)
        unprivileged.make_private(run_dir / name)
        assert_one_line(
            unprivileged.run_cli("resume", run_dir, cwd=folder), f"cannot train here ({name}: permission denied)"
        )
        (run_dir / name).unlink() if name == directory.LOG else (run_dir / name).rmdir()
    (run_dir / directory.LOCK).touch()
    if not os.geteuid():
        os.chown(run_dir, unprivileged.NOBODY, unprivileged.NOBODY)
    run_dir.chmod(0o555)
    result = unprivileged.run_cli("resume", run_dir, cwd=folder)
    assert_one_line(result, "cannot train here (the folder: permission denied)")
    if not os.geteuid():
        os.chown(run_dir, 0, 0)
    run_dir.chmod(0o755)
    for name in (directory.EVENTS, directory.CONFIG):
        (run_dir / directory.LOCK).unlink(missing_ok=True)
        unprivileged.make_private(run_dir / name)
        for command in RUN_COMMANDS[1:3]:
            result = unprivileged.run_cli(command[0], run_dir, *command[1:], cwd=folder)
            assert_one_line(result, name[:6], "ermission denied")


@pytest.mark.slow
def test_text_that_cannot_be_read(folder: Path) -> None:
    texts = folder / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.txt"):
        (texts / name).write_text("some text " * 2000)
    unprivileged.make_private(texts / "b.txt")
    for path in (texts, texts / "b.txt", f"{texts}/*.txt"):
        command = ("train", "ci", "--outputs", folder / "outputs", "-p", "data.source=local", "-p", f"data.path={path}")
        assert_one_line(unprivileged.run_cli(*command, cwd=folder), "permission denied", "b.txt")
    assert not list((folder / "outputs").glob("*/config.yaml"))


@pytest.mark.slow
def test_folder_on_path_that_cannot_be_searched(folder: Path) -> None:
    private = folder / "private"
    private.mkdir()
    unprivileged.make_private(private)
    code = (
        "from nsa_lab.runs.environment import collect_environment\n"
        "environment = collect_environment()\n"
        "print(environment['gpus'], environment['code']['source'])"
    )
    result = unprivileged.run_python("-c", code, cwd=folder, environment={"PATH": str(private)})
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_deleted_working_directory(folder: Path) -> None:
    code = (
        "import os, shutil, sys\n"
        "from nsa_lab.cli import main\n"
        "from nsa_lab.runs import lifecycle, resolve\n"
        "gone = os.path.abspath('gone')\n"
        "os.mkdir(gone); os.chdir(gone); shutil.rmtree(gone)\n"
        "assert resolve.get_root().is_dir()\n"
        "sys.argv = ['nsa-lab', *sys.argv[1:]]\n"
        "main()"
    )
    for command in (("status",), ("train", "ci", "--outputs", folder), ("health", "latest")):
        assert_one_line(unprivileged.run_python("-c", code, *command, cwd=folder), "the working directory was deleted")
    assert "Usage" in unprivileged.run_python("-c", code, "--help", cwd=folder).stdout


@pytest.mark.slow
def test_folder_without_write_permission(folder: Path) -> None:
    outputs = folder / "outputs"
    run_dir = fake_run.write_run(outputs)
    if not os.geteuid():
        os.chown(outputs, unprivileged.NOBODY, unprivileged.NOBODY)
    outputs.chmod(0o555)
    result = unprivileged.run_cli("train", "ci", "--outputs", outputs, cwd=folder)
    assert_one_line(result, "cannot create a run directory", "choose a writable folder")
    assert unprivileged.run_cli("health", run_dir, cwd=folder).returncode == 0


@pytest.mark.slow
def test_saves_continue_next_to_files_of_another_user(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    for name in (".saving-step-00000001", ".latest"):
        (checkpoints / name / "theirs").mkdir(parents=True)
        (checkpoints / name / "theirs" / "file").touch()
        unprivileged.make_private(checkpoints / name / "theirs")
    code = (
        "import sys\nfrom pathlib import Path\nfrom nsa_lab.train.checkpoint import CheckpointStore\n"
        "store = CheckpointStore(Path(sys.argv[1]), keep_last=1)\n"
        "for step in (1, 2):\n    store.save(step, {'model.safetensors': lambda: b'weights'}, {})"
    )
    result = unprivileged.run_python("-c", code, checkpoints, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert (checkpoints / "latest").read_text() == "step-00000002\n" and (checkpoints / "step-00000002").is_dir()
    assert result.stderr.count("could not be removed (permission denied)") == 2


def test_errors_of_the_system_that_a_user_can_fix_have_a_remedy() -> None:
    for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP):
        text = describe_os_error(OSError(number, os.strerror(number), "/a/b"))
        assert text and text.startswith(f"/a/b: {os.strerror(number).lower()}; ")
    assert describe_os_error(OSError(errno.ENOENT, "no", "/a/b")) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
        patch.setattr(tempfile, "tempdir", None)
        with pytest.raises(FileNotFoundError) as caught:
            tempfile.mkdtemp()
    assert "TMPDIR" in (describe_os_error(caught.value) or "")
    assert describe_os_error(OSError(errno.EACCES, "no")) is None and describe_os_error(OSError("text")) is None


def test_files_are_not_written_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "victim").write_text("mine")
    temporary = tmp_path / f".new.{os.getpid()}-{__import__('threading').get_ident()}"
    temporary.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        write_text(tmp_path / "new", "text")
    assert (tmp_path / "victim").read_text() == "mine" and not temporary.is_symlink()
    write_text(tmp_path / "new", "text")
    assert (tmp_path / "new").read_text() == "text"


def test_files_that_a_run_appends_to_are_no_links_and_no_other_kind(tmp_path: Path) -> None:
    """Regression: `resume` appended events to a file outside of the run."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run_dir = fake_run.write_run(tmp_path / "outputs")
    status = json.loads((run_dir / directory.STATUS).read_text())
    (run_dir / directory.STATUS).write_text(json.dumps({**status, "status": "PREEMPTED"}))
    for name in (*directory.APPENDED, directory.LOCK):
        path, saved = run_dir / name, tmp_path / "saved"
        if path.exists():
            path.rename(saved)
        for put in (lambda path=path: path.symlink_to(victim), lambda path=path: os.mkfifo(path), path.mkdir):
            put()
            with pytest.raises(
                directory.RunDirectoryError, match=f"{name}: expected a regular file of the run, got a.* move it away"
            ):
                lifecycle.resume(run_dir)
            path.rmdir() if path.is_dir() else path.unlink()
        if saved.exists():
            saved.rename(path)
    assert not lifecycle.is_alive(run_dir) and victim.read_text() == "mine"
    (run_dir / directory.STATUS).unlink()
    (run_dir / directory.STATUS).symlink_to(victim)
    directory.write_status(run_dir, run=run_dir.name, status="PREEMPTED")
    assert victim.read_text() == "mine" and not (run_dir / directory.STATUS).is_symlink()
    (run_dir / "link.json").symlink_to(victim)
    with pytest.raises(UnwritableFile):
        overwrite_json(run_dir / "link.json", {})
    (tmp_path / directory.EVENTS).symlink_to(victim)
    with pytest.raises(UnwritableFile):
        EventLog(tmp_path, "r", 1)


def test_checkpoints_that_are_no_folder_are_named_before_a_trainer_starts(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path / "outputs")
    checkpoints = run_dir / directory.CHECKPOINTS
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").touch()
    for put, found in (
        (checkpoints.touch, "a file"),
        (lambda: checkpoints.symlink_to(tmp_path / "file"), "a link to nothing or to no folder"),
        (lambda: checkpoints.symlink_to(tmp_path / "absent"), "a link to nothing or to no folder"),
    ):
        put()
        with pytest.raises(directory.RunDirectoryError, match=f"checkpoints: expected a folder, got {found}; move"):
            take_lock(run_dir)
        with pytest.raises(NoCheckpoint, match=f"checkpoints: expected a folder, got {found}; move"):
            find_checkpoint(run_dir)
        checkpoints.unlink()
    checkpoints.symlink_to(tmp_path / "elsewhere")
    status = run_dir / directory.STATUS
    content = status.read_text()
    status.unlink()
    status.mkdir()
    with pytest.raises(directory.RunDirectoryError, match=r"status\.json: expected a file, got a folder"):
        take_lock(run_dir)
    with pytest.raises(IsADirectoryError, match=r"/status\.json'$"):
        write_text(status, "text")
    status.rmdir()
    status.write_text(content)
    (run_dir / directory.CONFIG).rename(tmp_path / "config")
    (run_dir / directory.CONFIG).symlink_to("absent")
    with pytest.raises(directory.RunDirectoryError, match=r"config\.yaml: expected a file, got"):
        directory.check_run_dir(run_dir)
    lock = take_lock(run_dir)
    assert lock is not None, "a link to a folder is one"
    os.close(lock)


def test_a_checkpoint_folder_without_permission_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list_steps(tmp_path / "absent") == []

    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError):
        list_steps(tmp_path)
    with pytest.raises(NoCheckpoint, match="checkpoints: permission denied; let its owner"):
        find_checkpoint(fake_run.write_run(tmp_path))


def test_private_runs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run-20260102T000000Z-abcd", "another folder", "run-20260101T000000Z-abcd"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    names = [path.name for path in resolve.list_private_run_dirs(tmp_path)]
    assert names == ["run-20260101T000000Z-abcd", "run-20260102T000000Z-abcd"]
    with pytest.raises(directory.RunDirectoryError, match="permission denied; let its owner open"):
        resolve.find_run("run-20260101T000000Z-abcd", tmp_path)


def test_trainer_is_started_from_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = fake_run.write_run(tmp_path)
    commands: list[dict] = []

    class Process:
        pid = os.getpid()

        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(options)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(lifecycle.subprocess, "Popen", Process)
    lifecycle.start(run_dir)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    lifecycle.start(run_dir)
    assert [options["cwd"] for options in commands] == [None, "/"]
