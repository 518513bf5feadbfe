"""Launch several ranks on this host without torchrun: one process each, one lock, one exit code.

The supervisor forwards stop requests, ends the other ranks if one fails, and returns the exit code of the first that
failed. For several hosts, or for restarts after a failure, use torchrun with a c10d rendezvous, which can meet again (a
static one, `--master-port` alone, cannot): docs/howto/multiple_gpus.md.

Invariants
* Every rank holds the run's lock through an inherited descriptor, so no other trainer starts while a rank lives.
* A rank ends when its supervisor ends, for any reason. On Linux the kernel ensures it (PR_SET_PDEATHSIG). On any system,
  a thread of the rank reads a pipe that only the supervisor holds open. The rank is killed without a save; the run can
  resume as after any kill (tests/crash).
* The ranks meet in a file and talk over the loopback interface: nothing listens to the network.
* This module does not import torch, except to count GPUs when a user launches a run.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory
from nsa_lab.runs.events import read_events
from nsa_lab.runs.lifecycle import check_ranks
from nsa_lab.runs.lock import ANOTHER_TRAINER, lock_owner, sign_lock, take_lock
from nsa_lab.train.telemetry.event_log import EventLog

logger = logging.getLogger("nsa_lab.train")

# Seconds that the other ranks have to exit after one rank has ended.
EXIT_GRACE_S = 20.0

PR_SET_PDEATHSIG = 1


def launch_ranks(run_dir: str | Path, n_ranks: int, lock: int | None) -> int:
    """Train a run with `n_ranks` ranks. Raises `RunDirectoryError` as `nsa_lab.train.run` does.

    Raises `ConfigError`, before any rank is started, if the ranks cannot share a step or a GPU is missing for one.
    """
    folder = directory.check_run_dir(run_dir)
    if lock is None:
        # With a lock, the launcher has checked already; the supervisor then never imports torch and stays small.
        check_ranks(RunConfig.from_yaml(folder / directory.CONFIG), n_ranks)
        lock = take_lock(folder)
    if lock is None:
        raise directory.RunDirectoryError(ANOTHER_TRAINER.format(folder=folder, owner=lock_owner(folder)))
    os.set_inheritable(lock, False)
    sign_lock(lock, os.getpid())
    return supervise([sys.executable, "-m", "nsa_lab.train", str(folder)], folder, n_ranks, lock)


def supervise(command: Sequence[str], folder: Path, n_ranks: int, lock: int) -> int:
    """Run `command` once per rank of the run in `folder`, whose lock is held. Return the exit code of the run.

    Each rank gets the environment variables that torchrun would set, without an address, and an option `--supervised` for
    `bind_to_supervisor`. The exit code is 0 if all ranks exit with 0, else the code of the first rank that failed. If a
    rank was killed, its number and signal are recorded in the events and in the status of the run.
    """
    read_end, write_end = os.pipe()
    store_dir = tempfile.TemporaryDirectory(prefix="nsa-lab-ranks-")
    # Stop signals stay blocked here and in the ranks until handlers are installed; importing torch takes seconds.
    signal.pthread_sigmask(signal.SIG_BLOCK, directory.STOP_SIGNALS)
    try:
        handle = f"{lock}:{os.getpid()}:{read_end}:{store_dir.name}"
        processes = [
            subprocess.Popen(
                [*command, "--supervised", handle],
                env=_make_environment(rank, n_ranks),
                pass_fds=[lock, read_end],
                # Ctrl-C in a terminal then reaches only this process, which forwards it. A second signal would end a rank
                # without a save.
                process_group=0,
            )
            for rank in range(n_ranks)
        ]
        sign_lock(lock, os.getpid(), [process.pid for process in processes])

        def forward(signal_number: int, frame: object) -> None:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal_number)

        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signal_number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, directory.STOP_SIGNALS)
        failure = wait_for_ranks(processes)
    finally:
        os.close(read_end)
        os.close(write_end)
        store_dir.cleanup()
    if failure is None:
        return directory.EXIT_DONE
    rank, code = failure
    if code >= 0:
        return code
    write_crash_record(
        folder,
        where=f"rank {rank}",
        kind=signal.Signals(-code).name,
        reason=f"rank {rank} was killed (signal {-code}); the other ranks ended too; the newest checkpoint is unchanged",
        exit_code=directory.EXIT_BUG,
    )
    return directory.EXIT_BUG


def write_crash_record(folder: Path, *, where: str, kind: str, reason: str, exit_code: int) -> None:
    """Append an `error` and a `halt` event at the last recorded step and set the status HALTED, all with `reason`.

    The error has `cause` set: errors that other ranks recorded before it are its consequences.
    """
    events = read_events(folder)
    last_event = max(events, key=lambda event: (event["attempt"], event["step"]), default=None)
    log = EventLog(folder, folder.name, last_event["attempt"] if last_event else 1)
    if last_event:
        log.step, log.tokens = last_event["step"], last_event.get("tokens") or 0
    log.append("error", where=where, type=kind, message=reason, fatal=True, cause=True)
    log.append("halt", status=directory.HALTED, exit_code=exit_code, reason=reason)
    digest = log.append_digest()
    log.close()
    fields: dict[str, Any] = {"attempt": log.attempt, "pid": os.getpid(), "step": log.step, "tokens": log.tokens}
    fields |= {} if digest is None else {"events_digest": digest}
    directory.write_status(folder, run=folder.name, status=directory.HALTED, exit_code=exit_code, reason=reason, **fields)
    logger.error("%s", reason)


def bind_to_supervisor(handle: str) -> tuple[int, Path]:
    """Bind this rank to the supervisor of `handle`, the value of `--supervised`.

    Return the descriptor of the run's lock and the file in which the ranks meet. From now on this process is killed when
    its supervisor ends.
    """
    *numbers, store_dir = handle.split(":", 3)
    lock, supervisor, pipe = map(int, numbers)
    for descriptor in (lock, pipe):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_kill_when_supervisor_ends, args=(pipe,), name="supervisor", daemon=True).start()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != supervisor:
            # The supervisor ended before prctl was called, so no signal will arrive.
            _kill_self()
    return lock, Path(store_dir) / "store"


def _kill_when_supervisor_ends(pipe: int) -> None:
    # Nothing is ever written. The read returns when the supervisor, the last writer, is gone.
    os.read(pipe, 1)
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ranks(processes: list[subprocess.Popen]) -> tuple[int, int] | None:
    """Wait for all ranks. Return rank and return code of the first that failed, None if none did.

    If one rank dies, the others fail too, with an error of the communication library. A rank that was ended by a signal
    is therefore reported before those; SIGABRT, which that library may raise, comes after other signals.
    """
    first_failure, deadline = None, None
    while True:
        alive = [process for process in processes if process.poll() is None]
        failures = [
            (rank, process.returncode) for rank, process in enumerate(processes) if process.returncode not in (None, 0)
        ]
        if failures and first_failure is None:
            first_failure, deadline = min(failures, key=_get_failure_priority), time.monotonic() + EXIT_GRACE_S
        if not alive:
            return first_failure
        if deadline is not None and time.monotonic() > deadline:
            for process in alive:
                process.kill()
        time.sleep(0.05)


def _get_failure_priority(failure: tuple[int, int]) -> tuple[int, int]:
    rank, code = failure
    return (0 if code < 0 and code != -signal.SIGABRT else 1 if code < 0 else 2), rank


def _make_environment(rank: int, n_ranks: int) -> dict[str, str]:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
    }
