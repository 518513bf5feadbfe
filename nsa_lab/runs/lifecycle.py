"""Create a run, start a detached trainer in it, attach to the trainer, stop it.

The trainer never runs in the process of a notebook. It runs in a separate session and writes to files, so it survives the
notebook kernel that started it.

Invariants
* The launcher acquires the run's lock and the trainer inherits it. If two launchers compete, exactly one starts a trainer.
* torch is imported only to count the GPUs if there are several ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from nsa_lab.config.errors import has_working_dir
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.atomic_io import UnwritableFile, open_in_place, warn_once
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.environment import collect_environment, set_openmp_wait_policy
from nsa_lab.runs.lock import is_local, lock_owner, send_signal, sign_lock, take_lock


def create_run(config: RunConfig, outputs: Path | None = None) -> Path:
    """Create a run directory for `config` under `outputs` (default: the project's) without starting a trainer.

    The directory appears complete, with config.yaml, environment.json and status.json, or not at all. Raises `DataError` if
    the configured data cannot be read or is too short for one sequence.
    """
    check_text(config)
    files = {
        directory.CONFIG: config.to_yaml(),
        directory.ENVIRONMENT: json.dumps({**collect_environment(), "config_hash": config.hash()}, indent=1),
    }
    return directory.create_run_dir(outputs or resolve.get_outputs_dir(), config.name, files)


def ensure(run: RunConfig | str | Path, outputs: Path | None = None, *, new: bool = False, ranks: int = 1) -> Path:
    """Return the directory of a run that is in progress or finished, starting or resuming a trainer if necessary.

    `run` is a directory: attach if its trainer is alive, resume it if it is incomplete, do nothing if it is DONE or HALTED.
    `run` is a configuration: do the same with the latest run of the same name and configuration that is neither DONE nor
    HALTED. If there is none, or with `new`, start a new run. Executing a notebook again is therefore always safe. Of two
    calls at once for one configuration, one starts a run and the other attaches to it.
    """
    if not isinstance(run, RunConfig):
        run_dir = directory.check_run_dir(run)
        if not is_alive(run_dir) and get_state(run_dir) not in (directory.DONE, directory.HALTED):
            start(run_dir, ranks=ranks)
        return run_dir
    with hold_creation_lock(outputs or resolve.get_outputs_dir()):
        unfinished = None if new else find_unfinished(run, outputs)
        return ensure(unfinished or create_run(run, outputs), ranks=ranks)


@contextlib.contextmanager
def hold_creation_lock(outputs: Path) -> Iterator[None]:
    """Wait until no other process finds or starts a run in this folder."""
    try:
        outputs.mkdir(parents=True, exist_ok=True)
        lock = open_in_place(outputs / ".creation.lock", os.O_RDWR | os.O_CREAT)
    except UnwritableFile:
        raise
    except OSError:
        # No run can be created here, but a running one can be found. Otherwise `create_run` explains the error.
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def find_unfinished(config: RunConfig, outputs: Path | None = None) -> Path | None:
    """Return the latest run of this name and configuration that is neither DONE nor HALTED; None if there is none."""
    runs = find_runs_of_config(config, outputs)
    return next((run_dir for run_dir, state in runs if state not in (directory.DONE, directory.HALTED)), None)


def find_runs_of_config(config: RunConfig, outputs: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the runs of this name and configuration with their states, latest first."""
    for run_dir in list_runs_named(config.name, outputs):
        try:
            state = get_state(run_dir)
        except RunDirectoryError as error:
            # A renamed copy of another run: not the requested run, and it must not hide the others.
            warn_once(str(error))
            continue
        if _read_config_hash(run_dir) == config.hash():
            yield run_dir, state


def list_runs_named(name: str, outputs: Path | None = None) -> list[Path]:
    """Return the directories of runs whose name starts with `name` and a hyphen, latest first.

    They include runs with a longer name, such as `name-2`.
    """
    root = outputs or resolve.get_outputs_dir()
    found = [path for path in root.glob(f"{name}-*") if (path / directory.CONFIG).is_file()]
    return resolve.sort_by_creation(found)[::-1]


def start(run_dir: str | Path, *, ranks: int = 1, gpu: str | None = None) -> int:
    """Start a detached trainer in the directory and return its pid. If a trainer is alive, return its pid instead.

    Training resumes from the newest checkpoint. If `ranks` > 1, the process is a supervisor of that many trainers. `gpu`:
    the trainer's CUDA_VISIBLE_DEVICES; None: as in this process. Raises `ConfigError` if the ranks cannot share a step or
    there are fewer GPUs than ranks.
    """
    folder = directory.check_run_dir(run_dir)
    check_ranks(RunConfig.from_yaml(folder / directory.CONFIG), ranks)
    lock = take_lock(folder)
    if lock is None:
        return attach(folder)
    try:
        _record_gpu(folder, gpu)
        command = [sys.executable, "-m", "nsa_lab.train", str(folder), "--lock", str(lock)]
        with open(open_in_place(folder / directory.LOG, directory.APPEND), "ab") as log, _block_stop_signals():
            trainer = subprocess.Popen(
                command + (["--ranks", str(ranks)] if ranks > 1 else []),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # torch cannot be loaded in a folder that was deleted.
                cwd=None if has_working_dir() else "/",
                pass_fds=[lock],
                env=_make_environment(gpu),
            )
        # A fast process may have signed already, and a supervisor with its ranks: do not overwrite that.
        if not os.fstat(lock).st_size:
            sign_lock(lock, trainer.pid)
        # Collect the exit status if the trainer ends before this process. It does not depend on this process otherwise.
        threading.Thread(target=trainer.wait, name="trainer exit", daemon=True).start()
    finally:
        os.close(lock)
    return trainer.pid


def resume(run_dir: str | Path, *, ranks: int = 1) -> int:
    """Resume a stopped or HALTED run and return the trainer's pid. Raises `RunDirectoryError` if the run is DONE."""
    folder = directory.check_run_dir(run_dir)
    if get_state(folder) == directory.DONE:
        raise RunDirectoryError(f"{folder}: this run is DONE; there is nothing to resume. Create a new run to train again")
    return start(folder, ranks=ranks)


def attach(run_dir: str | Path, timeout_s: float = 10.0) -> int:
    """Return the pid of the live trainer of the directory, which may be on another host. Raises `RunDirectoryError` if
    there is none."""
    return _find_owner(directory.check_run_dir(run_dir), timeout_s)["pid"]


def _find_owner(folder: Path, timeout_s: float = 10.0) -> dict[str, Any]:
    """Return the process that holds the lock, as `lock_owner`. Raises `RunDirectoryError` if no trainer does."""
    deadline = time.monotonic() + timeout_s
    while (owner := lock_owner(folder)) is not None:
        if "orphan" in owner:
            raise RunDirectoryError(
                f"{folder}: the supervisor has exited, but its rank {owner['orphan']} (process {owner['pid']}) is alive. "
                f"It should exit within seconds; if it does not, kill it (kill -9 {owner['pid']}), then resume"
            )
        if owner:
            return owner
        # Another launcher holds the lock and has not signed it yet.
        if time.monotonic() > deadline:
            raise RunDirectoryError(
                f"{folder}: its lock is held by an unknown process; find the process that uses {directory.LOCK}"
            )
        time.sleep(0.05)
    raise RunDirectoryError(f"{folder}: no trainer is alive; resume the run")


def is_alive(run_dir: str | Path) -> bool:
    """Return True if a trainer is alive in the directory: its lock is held by the process that signed it."""
    return lock_owner(run_dir) is not None


def get_state(run_dir: str | Path, status: dict[str, Any] | None = None) -> str:
    """Return RUNNING, DONE, HALTED, PREEMPTED, or DEAD (recorded as RUNNING, but no trainer is alive).

    `status`: the result of `directory.read_status`; None: read it here.
    """
    status = directory.read_status(run_dir) if status is None else status
    if status and status.get("run") != Path(run_dir).resolve().name:
        raise RunDirectoryError(
            f"{run_dir}: its {directory.STATUS} belongs to run {status.get('run')!r}; if the folder was renamed or copied, "
            "rename it back or remove the file"
        )
    recorded = (status or _infer_status(run_dir)).get("status", directory.PREEMPTED)
    if is_alive(run_dir):
        return directory.RUNNING
    return "DEAD" if recorded == directory.RUNNING else recorded


def _infer_status(run_dir: str | Path) -> dict[str, Any]:
    # Imported here, because every command imports this module and numpy is slow to import.
    from nsa_lab.runs.events import infer_status, read_events

    return infer_status(read_events(run_dir))


def stop(run_dir: str | Path, timeout_s: float = 120.0) -> str:
    """Make the trainer save and exit, wait for it, and return the final state. Without a trainer, return the state.

    Raises `TimeoutError` if it is still alive after `timeout_s`. A second request makes it exit at once.
    """
    folder = directory.check_run_dir(run_dir)
    if not is_alive(folder):
        return get_state(folder)
    request_stop(folder)
    if not wait(folder, timeout_s):
        raise TimeoutError(
            f"{folder}: trainer still alive {timeout_s:g} s after the stop request; stop again to make it exit at once, "
            "without saving"
        )
    return get_state(folder)


def request_stop(run_dir: str | Path) -> None:
    """Send the trainer the signal to save and exit, without waiting.

    Raises `RunDirectoryError` if there is none on this host, or it is the process of another user.
    """
    folder = directory.check_run_dir(run_dir)
    owner = _find_owner(folder)
    trainer = f"process {owner['pid']} on host {owner['host']}"
    if not is_local(owner):
        raise RunDirectoryError(f"{folder}: its trainer is {trainer}; stop it there: nsa-lab stop {folder.name}")
    try:
        send_signal(owner, signal.SIGTERM)
    except PermissionError:
        raise RunDirectoryError(f"{folder}: its trainer, {trainer}, belongs to another user, who can stop it") from None


def wait(run_dir: str | Path, timeout_s: float | None = None, poll_s: float = 0.05) -> bool:
    """Wait until no trainer is alive in the directory. Return False if one is still alive after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while is_alive(run_dir):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


@contextlib.contextmanager
def _block_stop_signals() -> Iterator[None]:
    """Block the stop signals of a process started in this context until it has installed its handlers.

    Importing torch takes seconds. A stop request in that time would otherwise end the trainer without a record.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, directory.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _read_config_hash(run_dir: Path) -> str | None:
    try:
        return RunConfig.from_yaml(run_dir / directory.CONFIG).hash()
    except ConfigError:
        # Written by another version of this project: not the requested run.
        return None


def _record_gpu(folder: Path, gpu: str | None) -> None:
    """Record in the run's status which GPU its trainer uses, for later readers."""
    status = directory.read_status(folder)
    if status.get("gpu") != gpu:
        directory.write_status(folder, run=folder.name, status=status.get("status", directory.PREEMPTED), gpu=gpu)


def _make_environment(gpu: str | None) -> dict[str, Any]:
    """Return environment variables with which the trainer imports this package even if it is not installed."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    set_openmp_wait_policy(settings)
    return settings if gpu is None else {**settings, "CUDA_VISIBLE_DEVICES": gpu}


def check_text(config: RunConfig) -> str | None:
    """Raise `DataError` if the text cannot be read or tokenized, or is too short for one sequence. Needs no torch.

    Return a note on a text that is split by position, otherwise None.
    """
    from nsa_lab.data import check, describe_split

    identity = check(config.data, config.model.vocab_size, config.train.longest_stage.seq_len)
    return describe_split(identity, config.data.val_fraction)


def check_ranks(config: RunConfig, n_ranks: int) -> None:
    """Raise `ConfigError` if `n_ranks` ranks on this host cannot share every step, or would not have a GPU each."""
    config.check_ranks(n_ranks)
    if n_ranks == 1 or config.runtime.device == "cpu":
        return
    # Importing torch is slow. Only several ranks must be counted against the GPUs.
    import torch

    n_gpus = torch.cuda.device_count()
    # Without a GPU, ranks of device `auto` share the CPU; a device requested by name is refused elsewhere.
    if 0 < n_gpus < n_ranks:
        raise ConfigError(
            f"{n_ranks} ranks need a GPU each, and torch finds {n_gpus}; use at most {n_gpus}, or runtime.device: cpu. "
            "On several hosts, start them with torchrun"
        )
