"""Who trains in a run directory.

One process does, or one with its ranks: each holds an exclusive lock on `trainer.lock`, by one open file that they share,
for as long as it lives. The kernel drops that lock when the last of them dies, however it dies. Only the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import LOCK

ANOTHER_TRAINER = "{folder}: another trainer works in this run ({owner}); attach to it, or stop it first"


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


def sign_lock(descriptor: int, pid: int, ranks: Sequence[int] = ()) -> None:
    """Write into a held lock which process it is held for, and which ranks of that one hold it too."""
    owner = _identify_process(pid) | {"host": socket.gethostname(), "ranks": [_identify_process(rank) for rank in ranks]}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def lock_owner(run_dir: str | Path) -> dict[str, Any] | None:
    """Who holds the run's lock: pid, started, host; `{}` if held but not signed yet; None if nobody alive does.

    Where the process that signed is gone and a rank of it lives, this is the rank, and `orphan` is its number.
    """
    path = Path(run_dir) / LOCK
    try:
        # A reader needs no right to write: a run may lie on a medium that nothing can be written to.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(descriptor, 1 << 16, 0)
    finally:
        os.close(descriptor)
    try:
        owner = json.loads(text)
        if owner["host"] != socket.gethostname() or _is_alive(owner):
            return owner
        orphans = [{**rank, "host": owner["host"], "orphan": n} for n, rank in enumerate(owner["ranks"]) if _is_alive(rank)]
    except (ValueError, KeyError, TypeError):
        # Held, and being signed at this very moment, or not by a trainer.
        return {}
    return orphans[0] if orphans else None


def _identify_process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": process_start(pid)}


def _is_alive(signature: dict[str, Any]) -> bool:
    return signature["started"] is not None and process_start(signature["pid"]) == signature["started"]
