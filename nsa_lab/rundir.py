"""The run directory as a place: where it lies, what it is called, who is writing in it.

Invariants
* A run directory appears whole (built aside, then renamed) or not at all.
* `status.json` is replaced atomically and carries the run's own id, so a status copied from another run is recognised.
* One process trains in a directory: it holds an exclusive lock on `trainer.lock` for as long as it lives, and the
  kernel drops that lock when the process dies, however it dies.
* Only the standard library: a reader must not need torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUNNING, DONE, HALTED, PREEMPTED = "RUNNING", "DONE", "HALTED", "PREEMPTED"

# Each asks a trainer to save and exit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_DONE, EXIT_BUG, EXIT_USAGE, EXIT_HALTED, EXIT_STOPPED = 0, 1, 2, 3, 75

CONFIG, ENVIRONMENT, STATUS, EVENTS = "config.yaml", "environment.json", "status.json", "events.jsonl"
VERDICT = "verdict.json"
LOG, LOCK, CHECKPOINTS, TENSORBOARD = "trainer.log", "trainer.lock", "checkpoints", "tensorboard"


class RunDirectoryError(RuntimeError):
    """A run directory is missing, foreign or in use; the message says what to do."""


def project_root(start: Path | None = None) -> Path:
    """The nearest parent of `start` (default: the working directory) that is this project, else `start` itself."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        project = folder / "pyproject.toml"
        if project.is_file() and "nsa-lab" in project.read_text(encoding="utf-8").replace("nsa_lab", "nsa-lab"):
            return folder
    return start


def outputs_root(start: Path | None = None) -> Path:
    """Where run directories are kept unless a caller says otherwise."""
    return project_root(start) / "outputs"


def new_run_id(name: str) -> str:
    return f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def create(outputs: Path, name: str, files: dict[str, str]) -> Path:
    """A new directory under `outputs` holding `files` and a status; nothing is left behind if writing fails."""
    outputs.mkdir(parents=True, exist_ok=True)
    run_id = new_run_id(name)
    building = outputs / f".creating-{run_id}"
    building.mkdir()
    try:
        for file, text in files.items():
            (building / file).write_text(text, encoding="utf-8")
        write_status(building, run=run_id, status=PREEMPTED, reason="created, not started", attempt=0, step=0, tokens=0)
        building.rename(outputs / run_id)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return outputs / run_id


def check(run_dir: str | Path) -> Path:
    """`run_dir` as an absolute path, or `RunDirectoryError` if it is not a run directory."""
    path = Path(run_dir).resolve()
    if not (path / CONFIG).is_file():
        raise RunDirectoryError(f"{path} is not a run directory: it has no {CONFIG}; name a folder that a run created")
    return path


def write_json_atomic(path: Path, value: Any) -> None:
    """Readers see the old file or the new one, never a part."""
    # Two threads of one process may write at once: the trainer's, and the one that hears a second signal.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_status(run_dir: Path, *, run: str, status: str, **fields: Any) -> None:
    """Replace `status.json`. Fields that are not given again are kept from the status of the same run."""
    earlier = read_status(run_dir)
    kept = earlier if earlier.get("run") == run else {}
    write_json_atomic(run_dir / STATUS, {**kept, "run": run, "status": status, "updated": time.time(), **fields})


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """The last status written in the directory; empty when there is none."""
    try:
        return json.loads((Path(run_dir) / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


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
