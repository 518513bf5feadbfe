"""A stop request reaches only the trainer that signed the lock; of two callers at once, one starts a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_run
import pytest

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, lifecycle, lock
from nsa_lab.workbook import notebook


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that would have been sent, as (pid or descriptor, number). None is."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: sent.append((descriptor, number)))
    return sent


def hold_lock(run_dir: Path, **signature: Any) -> int:
    descriptor = lock.take_lock(run_dir)
    assert descriptor is not None
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "ranks": [], **signature}).encode(), 0)
    return descriptor


def test_stop_sends_no_signal_to_a_process_of_another_host(tmp_path: Path, signals: list[tuple[int, int]]) -> None:
    run_dir, pid = fake_run.write_run(tmp_path), os.getpid()
    for started in (lock.process_start(pid), "1"):
        descriptor = hold_lock(run_dir, pid=pid, started=started, host="another-host")
        with pytest.raises(directory.RunDirectoryError, match=f"process {pid} on host another-host; stop it there"):
            lifecycle.stop(run_dir, 1.0)
        os.close(descriptor)
    assert not signals


@pytest.mark.parametrize("pid", [0, 1, -1, -2, True, 1.5, "1", None, 2**40], ids=str)
def test_stop_sends_no_signal_to_a_pid_that_is_no_trainer(
    pid: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(lifecycle._find_owner, "__defaults__", (0.1,))
    run_dir = fake_run.write_run(tmp_path)
    started = lock.process_start(1)
    for signature in ({"pid": pid, "started": started}, {"pid": pid, "started": started, "host": "another-host"}):
        descriptor = hold_lock(run_dir, **signature)
        with pytest.raises(directory.RunDirectoryError, match="held by an unknown process"):
            lifecycle.stop(run_dir, 1.0)
        os.close(descriptor)
    assert not signals


def test_stop_sends_no_signal_to_a_process_that_has_the_pid_of_an_earlier_trainer(
    tmp_path: Path, signals: list[tuple[int, int]]
) -> None:
    run_dir, pid = fake_run.write_run(tmp_path), os.getpid()
    descriptor = hold_lock(run_dir, pid=pid, started="1")
    assert lifecycle.stop(run_dir, 1.0) == directory.DONE and not signals
    owner = {"pid": pid, "started": "1"}
    assert not lock.send_signal(owner, signal.SIGTERM) and not signals
    os.close(descriptor)


def test_stop_signals_the_trainer_that_signed_the_lock(tmp_path: Path, victim: subprocess.Popen) -> None:
    run_dir = fake_run.write_run(tmp_path)
    descriptor = hold_lock(run_dir, pid=victim.pid, started=lock.process_start(victim.pid))
    lifecycle.request_stop(run_dir)
    assert victim.wait(10) == -signal.SIGTERM
    os.close(descriptor)


def test_stop_of_another_users_trainer_names_the_reason(
    tmp_path: Path, victim: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    run_dir = fake_run.write_run(tmp_path)
    descriptor = hold_lock(run_dir, pid=victim.pid, started=lock.process_start(victim.pid))
    with pytest.raises(directory.RunDirectoryError, match="belongs to another user"):
        lifecycle.request_stop(run_dir)
    os.close(descriptor)


@pytest.mark.parametrize(
    "call",
    [
        lambda config, outputs: lifecycle.ensure(config, outputs),
        lambda config, outputs: notebook.start_run(config, outputs=str(outputs)),
    ],
    ids=["ensure", "notebook"],
)
def test_two_callers_at_once_share_one_run(
    call: Callable[[RunConfig, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four threads would create a run if it looked for one before another has created it."""
    config = fake_run.make_config()
    real_create, locks = lifecycle.create_run, list[int]()

    def create_slowly(config: RunConfig, outputs: Path | None = None) -> Path:
        time.sleep(0.2)
        return real_create(config, outputs)

    def start(run_dir: str | Path, **_: Any) -> int:
        descriptor = lock.take_lock(Path(run_dir))
        assert descriptor is not None, "a second trainer"
        lock.sign_lock(descriptor, os.getpid())
        locks.append(descriptor)
        return os.getpid()

    monkeypatch.setattr(lifecycle, "create_run", create_slowly)
    monkeypatch.setattr(lifecycle, "check_text", lambda config: None)
    monkeypatch.setattr(lifecycle, "start", start)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(call(config, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for descriptor in locks:
        os.close(descriptor)
    assert len(results) == 4 and len(set(results)) == 1 and len(locks) == 1


def test_lock_that_leads_to_another_file_is_not_emptied(tmp_path: Path) -> None:
    from nsa_lab.runs.directory import LOCK, RunDirectoryError
    from nsa_lab.runs.lock import take_lock

    other = tmp_path / "other.txt"
    other.write_text("not a lock")
    for put in (lambda path: path.symlink_to(other), lambda path: path.hardlink_to(other), os.mkfifo):
        path = tmp_path / LOCK
        put(path)
        with pytest.raises(RunDirectoryError):
            take_lock(tmp_path)
        assert other.read_text() == "not a lock"
        path.unlink()
    for content in (b"", bytes(40), b'{"pid": 7, "started": "1"}'):
        (tmp_path / LOCK).write_bytes(content)
        descriptor = take_lock(tmp_path)
        assert descriptor is not None
        os.close(descriptor)
