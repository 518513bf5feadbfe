"""The lock that allows one trainer per run directory. Standard library only.

The trainer, and each of its ranks if there are several, holds an exclusive lock on `trainer.lock` through one shared open
file for as long as it lives. The kernel releases the lock when the last of these processes exits, however it exits.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_lab.runs.atomic_io import UnwritableFile, open_in_place
from nsa_lab.runs.directory import LOCK, NO_RIGHTS, RunDirectoryError, check_writable

MAX_SIGNATURE = 1 << 16  # bytes
ANOTHER_TRAINER = "{folder}: another trainer is using this run ({owner}); attach to it or stop it first"


def process_start(pid: int) -> str | None:
    """Return the start time of a process on this host, in a form to test for equality; None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    process = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return process.stdout.strip() or None


def take_lock(run_dir: Path) -> int | None:
    """Acquire the run's lock. Return its open descriptor; None if another process holds it.

    Raises `RunDirectoryError` if this user may not write to the run, or one of its files is a link or of another kind.
    """
    try:
        # The file is emptied, so it must not be a link to another one.
        descriptor = open_in_place(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except UnwritableFile as error:
        raise RunDirectoryError(str(error)) from None
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise RunDirectoryError(NO_RIGHTS.format(run_dir=run_dir, name=LOCK, reason=reason)) from None
    try:
        check_writable(run_dir)
    except RunDirectoryError:
        os.close(descriptor)
        raise
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `lock_owner` briefly takes a shared lock; retry.
            time.sleep(0.01)
            continue
        if not _is_lock_file(descriptor):
            os.close(descriptor)
            raise RunDirectoryError(f"{run_dir / LOCK}: expected the lock of a trainer, got another file; move it away")
        os.ftruncate(descriptor, 0)
        return descriptor
    os.close(descriptor)
    return None


def _is_lock_file(descriptor: int) -> bool:
    """Return whether an open file is empty or was written by `sign_lock`; a hard link can lead to any other file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    text = os.pread(descriptor, MAX_SIGNATURE + 1, 0)
    # After a power failure, the content may be missing.
    return len(text) <= MAX_SIGNATURE and (not text.strip(b"\0") or (text.startswith(b"{") and b'"pid"' in text))


def sign_lock(descriptor: int, pid: int, ranks: Sequence[int] = ()) -> None:
    """Write the owner into a lock that this process holds: the process `pid` and its `ranks` (process ids)."""
    owner = _identify_process(pid) | {"host": socket.gethostname(), "ranks": [_identify_process(rank) for rank in ranks]}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def lock_owner(run_dir: str | Path) -> dict[str, Any] | None:
    """Return the owner of the run's lock: pid, started, host. `{}` if it has not signed yet; None if no process holds it.

    If the owner has exited and one of its ranks lives, return that rank, with its number as `orphan`. The owner may be a
    process of another host (`is_local`). A pid of at most 1 is none: a signal to it would reach other processes.
    """
    path = Path(run_dir) / LOCK
    try:
        # Read-only, so that readers need no write permission: a run may be on read-only storage.
        # Not blocking: another program may have put a FIFO here.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(descriptor, MAX_SIGNATURE, 0)
    finally:
        os.close(descriptor)
    try:
        owner = json.loads(text)
        _check_signature(owner)
        if not is_local(owner) or _is_alive(owner):
            return owner
        orphans = [{**rank, "host": owner["host"], "orphan": n} for n, rank in enumerate(owner["ranks"]) if _is_alive(rank)]
    except (ValueError, KeyError, TypeError, RecursionError):
        # Held by a trainer that is signing it right now, or by another program.
        return {}
    return orphans[0] if orphans else None


def is_local(owner: dict[str, Any]) -> bool:
    """Return whether the owner of a lock is a process of this host."""
    return owner["host"] == socket.gethostname()


def send_signal(owner: dict[str, Any], number: signal.Signals) -> bool:
    """Send a signal to the process that signed a lock on this host. Return False if that process has ended.

    Raises PermissionError if it is the process of another user.
    """
    try:
        # A descriptor of the process, so that its pid cannot be given to another process meanwhile.
        descriptor = os.pidfd_open(owner["pid"]) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return False
    try:
        if not _is_alive(owner):
            return False
        if descriptor is None:
            os.kill(owner["pid"], number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def _identify_process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": process_start(pid)}


def _check_signature(signature: dict[str, Any]) -> None:
    """Raise ValueError unless this identifies a process: a pid above 1, and a start time unless it had ended already."""
    pid, started = signature["pid"], signature["started"]
    if type(pid) is not int or not 1 < pid < 1 << 31 or not isinstance(started, str | None):
        raise ValueError(f"not a process: {signature!r:.80}")


def _is_alive(signature: dict[str, Any]) -> bool:
    _check_signature(signature)
    return signature["started"] is not None and process_start(signature["pid"]) == signature["started"]
