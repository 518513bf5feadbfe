"""`verdict.json` is out of date as soon as anything has changed that the checks of a run read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_evaluation import make_evaluation
from fake_run import write_checkpoint, write_run

from nsa_lab.health import examine
from nsa_lab.health.verdict_file import read_verdict, write_verdict
from nsa_lab.runs import directory, lock
from nsa_lab.runs.evaluation import EVALUATION, RULER

_recorded: list[set[Path]] = []


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _recorded and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _recorded[-1].add(Path(os.fsdecode(arguments[0])))


@pytest.fixture(scope="module")
def record_opens() -> Iterator[Callable[[Callable[[], object]], set[Path]]]:
    """`record_opens(call)`: the paths that `call()` opens or lists. An audit hook cannot be removed, only idle."""
    sys.addaudithook(_note_open)

    def record(call: Callable[[], object]) -> set[Path]:
        _recorded.append(set())
        try:
            call()
        finally:
            paths = _recorded.pop()
        return paths

    yield record


def write_saved_run(folder: Path) -> Path:
    run_dir = write_run(folder)
    for step in (100, 200):
        write_checkpoint(run_dir, step)
    (run_dir / directory.LOCK).touch()
    (run_dir / EVALUATION).write_text(json.dumps(make_evaluation(0, run=run_dir.name, config_hash=None)))
    (run_dir / RULER).write_text("{}\n")
    return run_dir


def test_every_file_that_the_checks_read_is_part_of_the_digests(tmp_path: Path, record_opens: Callable) -> None:
    """Each file is changed, once by a byte and once in its last byte, and each folder gets a file; then it is restored."""
    run_dir = write_saved_run(tmp_path)
    paths = {path for path in record_opens(lambda: examine(run_dir)) if path.is_relative_to(run_dir)}
    files, folders = sorted(filter(Path.is_file, paths)), sorted(filter(Path.is_dir, paths))
    found = {path.name for path in files}
    assert {
        directory.CONFIG,
        directory.EVENTS,
        directory.ENVIRONMENT,
        "MANIFEST.json",
        "model.safetensors",
        EVALUATION,
        RULER,
    } <= found
    assert run_dir / directory.CHECKPOINTS in folders
    record = json.loads(write_verdict(run_dir).read_text(encoding="utf-8"))
    for path in files:
        if path.name == directory.LOCK:  # only its owner counts
            continue
        content, times = path.read_bytes(), path.stat()
        for changed in (content + b"\n", content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(changed)
            assert read_verdict(run_dir) is None, path
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            assert read_verdict(run_dir) == record, path
        hidden = path.rename(tmp_path / "hidden")
        assert read_verdict(run_dir) is None, path
        hidden.rename(path)
    for folder in folders:
        (folder / "new").touch()
        assert read_verdict(run_dir) is None, folder
        (folder / "new").unlink()
    assert read_verdict(run_dir) == record


def test_a_verdict_is_out_of_date_once_the_trainer_was_killed(tmp_path: Path) -> None:
    """A killed trainer changes no file: only its lock is free."""
    run_dir = write_run(tmp_path, status={"status": directory.RUNNING})
    descriptor = lock.take_lock(run_dir)
    assert descriptor is not None
    lock.sign_lock(descriptor, os.getpid())
    record = json.loads(write_verdict(run_dir).read_text(encoding="utf-8"))
    assert record["ok"] is True and read_verdict(run_dir) == record
    os.close(descriptor)
    assert read_verdict(run_dir) is None and not examine(run_dir).ok


def test_the_verdict_of_a_recorded_run_needs_no_digest_of_the_surroundings(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    path = write_verdict(run_dir)
    record = json.loads(path.read_text(encoding="utf-8"))
    record.pop("surroundings")
    path.write_text(json.dumps(record))
    assert read_verdict(run_dir) is None
    (run_dir / directory.RECORDED).touch()
    assert read_verdict(run_dir) == record
    path.write_text(json.dumps({**record, "surroundings": "of the machine that trained it"}))
    assert read_verdict(run_dir) is not None
