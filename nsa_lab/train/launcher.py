"""Several ranks on this host without torchrun: one process each, one lock, one exit code.

The supervisor forwards stop requests, ends the other ranks when one fails, and returns what the first one to fail returned.
On several hosts, or with elastic restarts, use torchrun: `torchrun --nproc-per-node 8 -m nsa_lab.train <run directory>`.

Invariants
* Every rank holds the run's lock, by a descriptor that it inherits: no other trainer starts while one of them lives.
* A rank ends when its supervisor does, however that ends. The kernel sees to it on Linux; a pipe that only the supervisor
  holds open does everywhere, once a thread of the rank reads it. It is killed rather than asked to save: what is left is
  what a killed trainer leaves, from which every run can go on (tests/crash).
* Nothing here imports torch, but to count GPUs where a person starts it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory
from nsa_lab.runs.lock import ANOTHER_TRAINER, lock_owner, sign_lock, take_lock
from nsa_lab.runs.ranks import check_ranks
from nsa_lab.train.telemetry.crash_record import write_crash_record

# How long the others may take to leave on their own after one rank has ended.
EXIT_GRACE_S = 20.0

PR_SET_PDEATHSIG = 1


def launch_ranks(run_dir: str | Path, n_ranks: int, lock: int | None) -> int:
    """Train a run with that many ranks. Raises `RunDirectoryError` as `nsa_lab.train.run` does.

    `ConfigError`, before one is started, for ranks that cannot share a step or lack a GPU.
    """
    folder = directory.check_run_dir(run_dir)
    if lock is None:
        # A launcher has asked before it took the lock, and a supervisor that never loads torch stays small.
        check_ranks(RunConfig.from_yaml(folder / directory.CONFIG), n_ranks)
        lock = take_lock(folder)
    if lock is None:
        raise directory.RunDirectoryError(ANOTHER_TRAINER.format(folder=folder, owner=lock_owner(folder)))
    os.set_inheritable(lock, False)
    sign_lock(lock, os.getpid())
    return supervise([sys.executable, "-m", "nsa_lab.train", str(folder)], folder, n_ranks, lock)


def supervise(command: Sequence[str], folder: Path, n_ranks: int, lock: int) -> int:
    """Run `command` once per rank of the run in `folder`, whose lock is held; the exit code of the run.

    Each rank has the environment that torchrun would give it, and an option `--supervised` for `live_and_die_with`.
    0 if all ranks end with 0, else the code of the first that did not. A rank that was killed is named, with its signal,
    in the record and in the status of the run.
    """
    reading, writing = os.pipe()
    # A rank holds requests back until its handlers stand, and so does this process; importing torch takes seconds.
    signal.pthread_sigmask(signal.SIG_BLOCK, directory.STOP_SIGNALS)
    try:
        bond, port = f"{lock}:{os.getpid()}:{reading}", _find_free_port()
        processes = [
            subprocess.Popen(
                [*command, "--supervised", bond],
                env=_make_environment(rank, n_ranks, port),
                pass_fds=[lock, reading],
                # A terminal's Ctrl-C reaches this process alone, which forwards it: a second request would not save.
                process_group=0,
            )
            for rank in range(n_ranks)
        ]
        sign_lock(lock, os.getpid(), [process.pid for process in processes])

        def forward(number: int, frame: object) -> None:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, directory.STOP_SIGNALS)
        failed = _wait_for_ranks(processes)
    finally:
        os.close(reading)
        os.close(writing)
    if failed is None:
        return directory.EXIT_DONE
    rank, code = failed
    if code >= 0:
        return code
    write_crash_record(
        folder,
        where=f"rank {rank}",
        kind=signal.Signals(-code).name,
        reason=f"rank {rank} was killed (signal {-code}); the other ranks ended with it, and the newest checkpoint stands",
        exit_code=directory.EXIT_BUG,
    )
    return directory.EXIT_BUG


def bind_to_supervisor(handle: str) -> int:
    """Bind this process, a rank, to the supervisor whose option `bond` is; the descriptor of the lock that it holds now.

    From here on it is killed when its supervisor ends.
    """
    lock, supervisor, pipe = map(int, handle.split(":"))
    for descriptor in (lock, pipe):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_kill_when_supervisor_ends, args=(pipe,), name="supervisor", daemon=True).start()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != supervisor:
            # It ended before the kernel was told, and will not end again.
            _kill_self()
    return lock


def _kill_when_supervisor_ends(pipe: int) -> None:
    # Nothing is ever written: this returns when the last writer, the supervisor, is gone.
    os.read(pipe, 1)
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_ranks(processes: list[subprocess.Popen]) -> tuple[int, int] | None:
    """Wait for all; rank and return code of the first that failed, None if none did.

    The other ranks of one that dies fail as well, by an error of the library that they talk through. A rank that a signal
    ended is named before those, and an abort, which that library may end by, after a kill.
    """
    first, deadline = None, None
    while True:
        alive = [process for process in processes if process.poll() is None]
        failed = [(rank, p.returncode) for rank, p in enumerate(processes) if p.returncode not in (None, 0)]
        if failed and first is None:
            first, deadline = min(failed, key=_get_failure_priority), time.monotonic() + EXIT_GRACE_S
        if not alive:
            return first
        if deadline is not None and time.monotonic() > deadline:
            for process in alive:
                process.kill()
        time.sleep(0.05)


def _get_failure_priority(failed: tuple[int, int]) -> tuple[int, int]:
    rank, code = failed
    return (0 if code < 0 and code != -signal.SIGABRT else 1 if code < 0 else 2), rank


def _make_environment(rank: int, n_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
