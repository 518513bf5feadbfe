"""Start a detached trainer, find it again, attach to it, stop it.

A notebook is the supervisor, never the trainer: the trainer runs in a session of its own, writes to files, and does
not notice when the kernel that started it is killed.

Invariants
* The launcher takes the run's lock and the trainer inherits it: of two launchers at once exactly one starts a trainer.
* Nothing here imports torch, but to count the GPUs that several ranks want.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.runs import directory, older_variables, resolve
from nsa_lab.runs.atomic_io import warn_once
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.environment import collect_environment, set_openmp_wait_policy
from nsa_lab.runs.events import infer_status, read_events
from nsa_lab.runs.lock import lock_owner, sign_lock, take_lock
from nsa_lab.runs.ranks import check_ranks


def create_run(config: RunConfig, outputs: Path | None = None) -> Path:
    """A run directory for `config` under `outputs` (default: the project's); nothing trains in it yet.

    The directory appears whole, with config.yaml, environment.json and status.json, or not at all. Raises `DataError` if
    the configured data cannot be read.
    """
    from nsa_lab.data import check

    check(config.data, to_train=True)
    files = {
        directory.CONFIG: config.to_yaml(),
        directory.ENVIRONMENT: json.dumps({**collect_environment(), "config_hash": config.hash()}, indent=1),
    }
    return directory.create_run_dir(outputs or resolve.get_outputs_dir(), config.name, files)


def ensure(run: RunConfig | str | Path, outputs: Path | None = None, *, new: bool = False, ranks: int = 1) -> Path:
    """The directory of a run that is under way or finished, whatever it takes.

    A directory: attach if its trainer is alive, resume it if it is incomplete, leave it alone if it is DONE or HALTED.
    A configuration: the same with the latest run of that name and exactly that configuration which is neither DONE nor
    HALTED; if there is none, or with `new`, a new run is started. Running a notebook again is therefore always safe.
    """
    if not isinstance(run, RunConfig):
        run_dir = directory.check_run_dir(run)
        if not is_alive(run_dir) and get_state(run_dir) not in (directory.DONE, directory.HALTED):
            start(run_dir, ranks=ranks)
        return run_dir
    unfinished = None if new else find_unfinished(run, outputs)
    return ensure(unfinished or create_run(run, outputs), ranks=ranks)


def find_unfinished(config: RunConfig, outputs: Path | None = None) -> Path | None:
    """The latest run of this name and exactly this configuration that is neither DONE nor HALTED, or None."""
    runs = find_runs_of_config(config, outputs)
    return next((run_dir for run_dir, found in runs if found not in (directory.DONE, directory.HALTED)), None)


def find_runs_of_config(config: RunConfig, outputs: Path | None = None) -> Iterator[tuple[Path, str]]:
    """The runs of this name and exactly this configuration, the latest first, and the state of each."""
    for run_dir in list_runs_named(config.name, outputs):
        try:
            found = get_state(run_dir)
        except RunDirectoryError as error:
            # A copy of another run is not the one that was asked for, and stands in nobody's way.
            warn_once(str(error))
            continue
        if _read_config_hash(run_dir) == config.hash():
            yield run_dir, found


def list_runs_named(name: str, outputs: Path | None = None) -> list[Path]:
    """The directories of runs of this name, the latest first; those of a longer name that begins with it are among them."""
    root = outputs or resolve.get_outputs_dir()
    return sorted((p for p in root.glob(f"{name}-*") if (p / directory.CONFIG).is_file()), reverse=True)


def start(run_dir: str | Path, *, ranks: int = 1, gpu: str | None = None) -> int:
    """Start a detached trainer in the directory and return its pid; attach instead if one is alive.

    It goes on from the newest checkpoint. With `ranks` above 1 the process is a supervisor of that many trainers. `gpu` is
    the only one that it is to see, as CUDA_VISIBLE_DEVICES names it; by default it sees those that this process does.
    Raises `ConfigError` for ranks that cannot share a step, or lack a GPU.
    """
    folder = directory.check_run_dir(run_dir)
    check_ranks(RunConfig.from_yaml(folder / directory.CONFIG), ranks)
    if warning := older_variables.warning(os.environ):
        warn_once(warning)
    lock = take_lock(folder)
    if lock is None:
        return attach(folder)
    try:
        _record_gpu(folder, gpu)
        command = [sys.executable, "-m", "nsa_lab.train", str(folder), "--lock", str(lock)]
        with open(folder / directory.LOG, "ab") as log, _block_stop_signals():
            trainer = subprocess.Popen(
                command + (["--ranks", str(ranks)] if ranks > 1 else []),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock],
                env=_make_environment(gpu),
            )
        # A process that was quick has signed, and a supervisor has named its ranks, which must not be lost.
        if not os.fstat(lock).st_size:
            sign_lock(lock, trainer.pid)
        # Collects the exit status if the trainer ends before we do; it does not depend on us otherwise.
        threading.Thread(target=trainer.wait, name="trainer exit", daemon=True).start()
    finally:
        os.close(lock)
    return trainer.pid


def resume(run_dir: str | Path, *, ranks: int = 1) -> int:
    """Go on with a run that stopped, HALTED ones included; the trainer's pid. A run that is DONE is refused."""
    folder = directory.check_run_dir(run_dir)
    if get_state(folder) == directory.DONE:
        raise RunDirectoryError(f"{folder}: this run is DONE; there is nothing to resume. Create a new run to train again")
    return start(folder, ranks=ranks)


def attach(run_dir: str | Path, timeout_s: float = 10.0) -> int:
    """The pid of the trainer that is alive in the directory. Raises `RunDirectoryError` if there is none."""
    folder, deadline = directory.check_run_dir(run_dir), time.monotonic() + timeout_s
    while (owner := lock_owner(folder)) is not None:
        if "orphan" in owner:
            raise RunDirectoryError(
                f"{folder}: its supervisor is gone, and rank {owner['orphan']} of it, process {owner['pid']}, still lives. "
                f"It should end by itself within seconds; if it does not, end it (kill -9 {owner['pid']}), then resume"
            )
        if owner:
            return owner["pid"]
        # Another launcher holds the lock and has not signed it yet.
        if time.monotonic() > deadline:
            raise RunDirectoryError(
                f"{folder}: its lock is held and nobody signed it; look for a process that uses {directory.LOCK}"
            )
        time.sleep(0.05)
    raise RunDirectoryError(f"{folder}: no trainer is alive here; resume the run")


def is_alive(run_dir: str | Path) -> bool:
    """Whether a trainer works in the directory: its lock is held, by the very process that signed it."""
    return lock_owner(run_dir) is not None


def get_state(run_dir: str | Path) -> str:
    """RUNNING, DONE, HALTED, PREEMPTED, or DEAD: said to be running, and no trainer is alive."""
    status = directory.read_status(run_dir)
    if status and status.get("run") != Path(run_dir).resolve().name:
        raise RunDirectoryError(
            f"{run_dir}: its {directory.STATUS} belongs to run {status.get('run')!r}; was the folder "
            "renamed or copied? Rename it back, or remove the file"
        )
    said = (status or infer_status(read_events(run_dir))).get("status", directory.PREEMPTED)
    if is_alive(run_dir):
        return directory.RUNNING
    return "DEAD" if said == directory.RUNNING else said


def stop(run_dir: str | Path, timeout_s: float = 120.0) -> str:
    """Ask the trainer to save and exit, wait for it, and return the state it leaves. Without a trainer, just the state.

    Raises `TimeoutError` if it is still alive after `timeout_s`; ask again to make it exit at once.
    """
    folder = directory.check_run_dir(run_dir)
    if not is_alive(folder):
        return get_state(folder)
    request_stop(folder)
    if not wait(folder, timeout_s):
        raise TimeoutError(
            f"{folder}: the trainer was asked to stop and is alive after {timeout_s:g} s; a second request "
            "makes it exit at once, without saving"
        )
    return get_state(folder)


def request_stop(run_dir: str | Path) -> None:
    """Ask the trainer to save and exit, and wait for nothing. Raises `RunDirectoryError` if there is none."""
    os.kill(attach(run_dir), signal.SIGTERM)


def wait(run_dir: str | Path, timeout_s: float | None = None, poll_s: float = 0.05) -> bool:
    """Wait until no trainer is alive in the directory; False if one still is after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while is_alive(run_dir):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


@contextlib.contextmanager
def _block_stop_signals() -> Iterator[None]:
    """A process started inside this block holds stop requests back until its handlers stand, and then gets them.

    Importing torch takes seconds, and a request in that time would otherwise end the trainer without a word.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, directory.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _read_config_hash(run_dir: Path) -> str | None:
    try:
        return RunConfig.from_yaml(run_dir / directory.CONFIG).hash()
    except ConfigError:
        # Written by another version of this project: not the run that was asked for.
        return None


def _record_gpu(folder: Path, gpu: str | None) -> None:
    """Into the run's status, where whoever comes later finds which GPU its trainer has to itself."""
    status = directory.read_status(folder)
    if status.get("gpu") != gpu:
        directory.write_status(folder, run=folder.name, status=status.get("status", directory.PREEMPTED), gpu=gpu)


def _make_environment(gpu: str | None) -> dict[str, Any]:
    """Variables with which the trainer finds this very package, also where it is not installed."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    set_openmp_wait_policy(settings)
    return settings if gpu is None else {**settings, "CUDA_VISIBLE_DEVICES": gpu}
