"""Who trains in a run directory.

One process does: it holds an exclusive lock on `trainer.lock` for as long as it lives, and the kernel drops that lock when
the process dies, however it dies. Only the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import LOCK


def process_start(pid: int) -> str | None:
    """When a process of this host started, in a form that only equality is asked of; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def take_lock(run_dir: Path) -> int | None:
    """The run's lock as an open descriptor, or None while another process holds it."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A reader that asks who holds the lock holds it itself for an instant.
            time.sleep(0.01)
            continue
        os.ftruncate(descriptor, 0)
        return descriptor
    os.close(descriptor)
    return None


def sign_lock(descriptor: int, pid: int) -> None:
    """Write into a held lock which process it is held for."""
    owner = json.dumps({"pid": pid, "started": process_start(pid), "host": socket.gethostname()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner, 0)


def lock_owner(run_dir: str | Path) -> dict[str, Any] | None:
    """Who holds the run's lock: pid, started, host; `{}` if held but not signed yet; None if nobody alive does."""
    path = Path(run_dir) / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(descriptor, 4096, 0)
    finally:
        os.close(descriptor)
    owner = json.loads(text) if text else {}
    if owner and owner["host"] == socket.gethostname() and process_start(owner["pid"]) != owner["started"]:
        return None
    return owner
