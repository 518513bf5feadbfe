"""Detached trainers: started once, found again, stopped, resumed; a run directory appears complete or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.data import DataError
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.lifecycle import check_ranks
from nsa_lab.runs.lock import sign_lock, take_lock
from nsa_lab.train import launcher
from nsa_lab.train.build import select_device
from nsa_lab.train.distributed import World
from nsa_lab.train.preflight.startup_checks import check_startable

Tiny = Callable[..., RunConfig]

pytestmark = pytest.mark.timeout(120)

LONG = {"steps": 3000, "log_every": 1, "eval_every": 0, "save_every": 100}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread: several trainers of tiny models on one machine would only wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def wait_for_steps(run_dir: Path, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while sum(e["kind"] == "step" for e in events.read_events(run_dir)) < count:
        assert time.monotonic() < deadline, (run_dir / "trainer.log").read_text()
        time.sleep(0.02)


def test_a_new_run_has_three_files_and_a_status(make_tiny_config: Tiny, tmp_path: Path) -> None:
    run_dir = lifecycle.create_run(make_tiny_config(), tmp_path)
    assert {p.name for p in run_dir.iterdir()} == {"config.yaml", "environment.json", "status.json"}
    assert RunConfig.from_yaml(run_dir / "config.yaml") == make_tiny_config()
    assert json.loads((run_dir / "environment.json").read_text())["config_hash"] == make_tiny_config().hash()
    assert lifecycle.get_state(run_dir) == "PREEMPTED" and not lifecycle.is_alive(run_dir)
    name, stamp, suffix = run_dir.name.rsplit("-", 2)
    assert name == "tiny" and len(suffix) == 4 and stamp.endswith("Z")


def test_invalid_data_leaves_no_files(make_tiny_config: Tiny, tmp_path: Path) -> None:
    config = make_tiny_config(
        data={"source": "local", "path": str(tmp_path / "absent"), "max_tokens": None, "val_fraction": 0.3}
    )
    with pytest.raises(DataError):
        lifecycle.create_run(config, tmp_path / "outputs")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_ensure_starts_attaches_resumes_and_does_not_touch_a_finished_run(
    forked: None, make_tiny_config: Tiny, tmp_path: Path
) -> None:
    config = make_tiny_config(**LONG)
    run_dir = lifecycle.ensure(config, tmp_path)
    pid = lifecycle.attach(run_dir)
    assert lifecycle.is_alive(run_dir) and os.getsid(pid) == pid, "it leads a session of its own"
    assert lifecycle.ensure(config, tmp_path) == run_dir and lifecycle.ensure(run_dir) == run_dir
    assert lifecycle.attach(run_dir) == lifecycle.start(run_dir) == pid
    wait_for_steps(run_dir)
    os.kill(pid, signal.SIGKILL)
    assert lifecycle.wait(run_dir, 10) and lifecycle.get_state(run_dir) == "DEAD"
    assert lifecycle.ensure(config, tmp_path) == run_dir and lifecycle.attach(run_dir) != pid
    wait_for_steps(run_dir, 30)
    assert lifecycle.stop(run_dir) == "PREEMPTED" and not lifecycle.is_alive(run_dir)
    done = directory.read_status(run_dir)["step"]
    lifecycle.resume(run_dir)
    wait_for_steps(run_dir, done + 10)
    assert lifecycle.stop(run_dir) == "PREEMPTED"
    directory.write_status(run_dir, run=run_dir.name, status=directory.DONE)
    assert lifecycle.ensure(run_dir) == run_dir and not lifecycle.is_alive(run_dir)
    with pytest.raises(directory.RunDirectoryError, match="DONE"):
        lifecycle.resume(run_dir)
    assert lifecycle.find_unfinished(config, tmp_path) is None


def test_an_unfinished_run_is_found_by_its_configuration(make_tiny_config: Tiny, tmp_path: Path) -> None:
    first = lifecycle.create_run(make_tiny_config(), tmp_path)
    lifecycle.create_run(make_tiny_config(lr=1e-3), tmp_path)
    assert lifecycle.find_unfinished(make_tiny_config(), tmp_path) == first
    directory.write_status(first, run=first.name, status=directory.HALTED)
    assert lifecycle.find_unfinished(make_tiny_config(), tmp_path) is None, "a HALT belongs to its run and stops no other"


def test_a_status_of_another_run_is_ignored(make_tiny_config: Tiny, tmp_path: Path) -> None:
    run_dir = lifecycle.create_run(make_tiny_config(), tmp_path)
    directory.write_status(run_dir, run="an-older-run", status=directory.HALTED)
    with pytest.raises(directory.RunDirectoryError, match="an-older-run"):
        lifecycle.get_state(run_dir)


@pytest.mark.slow
def test_two_launchers_at_once_start_one_trainer(forked: None, make_tiny_config: Tiny, tmp_path: Path) -> None:
    run_dir, pids = lifecycle.create_run(make_tiny_config(**LONG), tmp_path), []
    threads = [threading.Thread(target=lambda: pids.append(lifecycle.start(run_dir))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 4 and len(set(pids)) == 1
    # Before its signal handlers are installed, a trainer just ends.
    os.kill(pids[0], signal.SIGKILL)
    assert lifecycle.wait(run_dir, 10)


def test_rank_processes_recorded_by_a_fast_supervisor_stay_recorded(
    make_tiny_config: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, pid = lifecycle.create_run(make_tiny_config(**LONG), tmp_path), os.getpid()

    def signs_at_once(command: list[str], pass_fds: list[int], **rest: object) -> types.SimpleNamespace:
        sign_lock(pass_fds[0], pid, [pid])
        return types.SimpleNamespace(pid=pid, wait=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", signs_at_once)
    assert lifecycle.start(run_dir, ranks=2) == pid
    assert [rank["pid"] for rank in json.loads((run_dir / directory.LOCK).read_text())["ranks"]] == [pid]


@pytest.mark.slow
def test_a_stop_request_before_the_trainer_is_ready_is_delivered_later(make_tiny_config: Tiny, tmp_path: Path) -> None:
    run_dir = lifecycle.create_run(make_tiny_config(**LONG), tmp_path)
    lifecycle.start(run_dir)
    # The process exists, but has not imported anything yet.
    assert lifecycle.stop(run_dir) == "PREEMPTED"
    status = directory.read_status(run_dir)
    assert status["exit_code"] == directory.EXIT_STOPPED and "SIGTERM" in status["reason"]


@pytest.mark.slow
def test_the_trainer_outlives_the_process_that_started_it(make_tiny_config: Tiny, tmp_path: Path) -> None:
    run_dir = lifecycle.create_run(make_tiny_config(**LONG), tmp_path)
    code = (
        f"import time; from nsa_lab.runs import lifecycle; lifecycle.start({str(run_dir)!r}); print('started', flush=True)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout.readline() == "started\n"
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    wait_for_steps(run_dir)
    assert lifecycle.stop(run_dir) == "PREEMPTED"


def test_a_lock_of_a_dead_process_has_no_owner(make_tiny_config: Tiny, tmp_path: Path) -> None:
    run_dir = lifecycle.create_run(make_tiny_config(), tmp_path)
    lock = take_lock(run_dir)
    sign_lock(lock, os.getpid())
    assert lifecycle.attach(run_dir) == os.getpid()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    sign_lock(lock, gone.pid)
    owner = json.loads((run_dir / directory.LOCK).read_text()) | {"started": "1"}
    (run_dir / directory.LOCK).write_text(json.dumps(owner))
    assert not lifecycle.is_alive(run_dir)
    os.close(lock)


def test_ranks_that_cannot_share_a_step_are_refused_before_any_is_started(
    make_tiny_config: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks would exhaust the memory before the first one reported the error."""
    run_dir = lifecycle.create_run(make_tiny_config(), tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    for start in (lambda: lifecycle.start(run_dir, ranks=1000), lambda: launcher.launch_ranks(run_dir, 1000, None)):
        with pytest.raises(ConfigError, match="1000 ranks cannot share evenly: 250 ranks would share each sequence"):
            start()
    assert lifecycle.get_state(run_dir) == "PREEMPTED"


def test_more_ranks_than_gpus_are_refused_before_any_is_started(
    make_tiny_config: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [make_tiny_config(runtime={"device": device}) for device in ("auto", "cuda")]
    run_dirs = [lifecycle.create_run(config, tmp_path) for config in configs]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", None)
    for config, run_dir in zip(configs, run_dirs, strict=True):
        for start in (
            lambda run_dir=run_dir: lifecycle.start(run_dir, ranks=4),
            lambda run_dir=run_dir: lifecycle.resume(run_dir, ranks=4),
            lambda run_dir=run_dir: launcher.launch_ranks(run_dir, 4, None),
            lambda config=config: check_startable(config, 4),
        ):
            with pytest.raises(
                ConfigError, match=r"^4 ranks need a GPU each, and torch finds 2; use at most 2, or runtime"
            ):
                start()
        check_ranks(config, 2)
    check_ranks(make_tiny_config(), 4)  # on the CPU, even if there is a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_ranks(make_tiny_config(runtime={"device": "auto"}), 4)


def test_a_rank_of_torchrun_without_a_gpu_says_so(make_tiny_config: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"^local rank 2 has no GPU: torch sees 2 here"):
        select_device(make_tiny_config(runtime={"device": "auto"}), World(2, 4, 2))


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    for call in (lifecycle.ensure, lifecycle.start, lifecycle.stop, lifecycle.resume, lifecycle.attach):
        with pytest.raises(directory.RunDirectoryError, match=r"config\.yaml"):
            call(tmp_path)
