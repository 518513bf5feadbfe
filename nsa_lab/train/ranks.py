"""Several ranks on this host without torchrun: one process each, one lock, one exit code.

The supervisor forwards stop requests, ends the other ranks when one fails, and returns what the first one to fail returned.
On several hosts, or with elastic restarts, use torchrun: `torchrun --nproc-per-node 8 -m nsa_lab.train <run directory>`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from nsa_lab.runs import directory
from nsa_lab.runs.lock import sign_lock, take_lock

# How long the others may take to leave on their own after one rank has ended.
GRACE_S = 20.0


def supervise(command: list[str], ranks: int) -> int:
    """Run `command` once per rank, with the environment that torchrun would give it; the exit code of the run.

    0 if all ranks end with 0, else the code of the first that did not.
    """
    port = _free_port()
    processes = [subprocess.Popen(command, env=_environment(rank, ranks, port)) for rank in range(ranks)]

    def forward(number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    # Blocked since the launcher made this process (nsa_lab.runs.launch).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, directory.STOP_SIGNALS)
    return _wait(processes)


def train(run_dir: str | Path, ranks: int, lock: int | None) -> int:
    """Train a run with that many ranks. Raises `RunDirectoryError` as `nsa_lab.train.run` does."""
    folder = directory.check(run_dir)
    lock = take_lock(folder) if lock is None else lock
    if lock is None:
        raise directory.RunDirectoryError(f"{folder}: another trainer works in this run; attach to it, or stop it first")
    os.set_inheritable(lock, False)
    sign_lock(lock, os.getpid())
    return supervise([sys.executable, "-m", "nsa_lab.train", str(folder), "--supervised"], ranks)


def _wait(processes: list[subprocess.Popen]) -> int:
    code, deadline = 0, None
    while any(process.poll() is None for process in processes):
        failed = [p.returncode for p in processes if p.poll() not in (None, 0)]
        if failed and deadline is None:
            code, deadline = failed[0], time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    code = code or next((p.returncode for p in processes if p.returncode), 0)
    return code if code >= 0 else directory.EXIT_BUG


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
