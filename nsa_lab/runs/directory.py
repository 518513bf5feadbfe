"""Run directories: file names, run ids, creation, and `status.json`.

Invariants
* A run directory appears complete or not at all: it is built under a temporary name and then renamed.
* `status.json` is replaced atomically (overwritten in place if the disk is full). It contains the run id, so a status that
  was copied from another run is recognized.
* `digest` in `status.json` is the SHA-256 of the other fields (`atomic_io.compute_digest`).
* This module does not import torch: readers must not need it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa_lab.config import ConfigError, UsageError
from nsa_lab.config.errors import describe_os_error
from nsa_lab.runs.atomic_io import (
    UnwritableFile,
    compute_digest,
    is_disk_full,
    open_in_place,
    open_regular,
    overwrite_json,
    read_json,
    warn_once,
    write_json,
)

RUNNING, DONE, HALTED, PREEMPTED = "RUNNING", "DONE", "HALTED", "PREEMPTED"

# Signals that make a trainer save and exit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_DONE, EXIT_BUG, EXIT_USAGE, EXIT_HALTED, EXIT_STOPPED = 0, 1, 2, 3, 75

CONFIG, ENVIRONMENT, STATUS, EVENTS = "config.yaml", "environment.json", "status.json", "events.jsonl"
VERDICT = "verdict.json"
RECORDED = "RECORDED"
LOG, LOCK, STACKS = "trainer.log", "trainer.lock", "stacks.txt"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
# Files that a trainer appends to (`open_in_place`). Others are replaced, which does not follow a link.
APPENDED = (EVENTS, LOG, STACKS)
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


_TIME_FORMAT, _RUN_ID_TIME = "%Y%m%dT%H%M%SZ", re.compile(r"-(\d{8}T\d{6}Z)-[0-9a-f]{4}$")
_STATUS_TYPES = {"run": str, "status": str, "attempt": int, "step": int, "tokens": int}
# These are null until they are known.
_NULLABLE_STATUS_TYPES = {
    "steps": int,
    "exit_code": int,
    "pid": int,
    "reason": str,
    "gpu": str,
    "events_digest": str,
    "digest": str,
}
MAX_INT = 2**63 - 1


class RunDirectoryError(UsageError, RuntimeError):
    """Raised if a run directory is missing, invalid, of another run, or in use. The message states the remedy."""


NO_RIGHTS = "{run_dir}: this user cannot train here ({name}: {reason}); copy the run, or let its owner resume it"
MAX_PROBLEM = 300  # characters
# Errors that a damaged or foreign file can cause. One run must not hide the others.
READ_ERRORS = (
    *(RunDirectoryError, ConfigError, OSError, ValueError, TypeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)


def describe_read_error(error: BaseException) -> str:
    """Return why a run cannot be read, in one line of bounded length."""
    text = None
    if isinstance(error, OSError):
        text = describe_os_error(error) or (f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    text = text or " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_PROBLEM else f"{text[: MAX_PROBLEM - 3]}..."


def is_recorded(run_dir: Path) -> bool:
    """Return True for a recorded run: one that came with the repository or from its archive (tools/records.py)."""
    return (run_dir / RECORDED).is_file()


def make_run_id(name: str) -> str:
    """Return a new id, `<name>-<UTC time>-<4 hex digits>`."""
    return f"{name}-{datetime.now(UTC):{_TIME_FORMAT}}-{secrets.token_hex(2)}"


def is_run_id(name: str) -> bool:
    """Return whether a name ends as those of `make_run_id`."""
    return bool(_RUN_ID_TIME.search(name))


def get_creation_time(run_dir: Path) -> tuple[str, float]:
    """Return a sort key for the time at which a run was created: (time in its id, modification time of its config file).

    The time in the id survives copies and clones. If the folder name is not a run id, the modification time replaces it.
    """
    modified = (run_dir / CONFIG).lstat().st_mtime
    id_time = _RUN_ID_TIME.search(run_dir.name)
    return (id_time[1] if id_time else f"{datetime.fromtimestamp(modified, UTC):{_TIME_FORMAT}}"), modified


def create_run_dir(outputs: Path, name: str, files: dict[str, str]) -> Path:
    """Create a run directory under `outputs` with `files` (text by file name) and a status. Return its path.

    Nothing remains if writing fails. Raises `RunDirectoryError` if the directory cannot be created.
    """
    run_id = make_run_id(name)
    temporary = outputs / f".creating-{run_id}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{outputs}: cannot create a run directory ({error.strerror}); choose a writable folder"
        ) from None
    try:
        for file, text in files.items():
            (temporary / file).write_text(text, encoding="utf-8")
        write_status(temporary, run=run_id, status=PREEMPTED, reason="created, not started", attempt=0, step=0, tokens=0)
        temporary.rename(outputs / run_id)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return outputs / run_id


def check_run_dir(run_dir: str | Path) -> Path:
    """Return `run_dir` as an absolute path. Raises `RunDirectoryError` if it is not a run directory."""
    path = Path(run_dir).resolve()
    if not (path / CONFIG).is_file():
        if os.path.lexists(path / CONFIG):
            others = "a link to nothing" if (path / CONFIG).is_symlink() else "a FIFO, socket or device"
            found = "a folder" if (path / CONFIG).is_dir() else others
            raise RunDirectoryError(f"{path / CONFIG}: expected a file, got {found}; restore the file")
        raise RunDirectoryError(f"{path} is not a run directory: it has no {CONFIG}; pass a folder created by a run")
    return path


def check_checkpoint_folder(run_dir: Path) -> None:
    """Raise `RunDirectoryError` if `checkpoints` is not a folder. It may be a link to one, or missing."""
    checkpoints = run_dir / CHECKPOINTS
    if os.path.lexists(checkpoints) and not os.path.isdir(checkpoints):
        found = "a link to nothing or to no folder" if checkpoints.is_symlink() else "a file"
        raise RunDirectoryError(f"{checkpoints}: expected a folder, got {found}; move it away, or restore the folder")


def check_writable(run_dir: Path) -> None:
    """Raise `RunDirectoryError` unless this user can write a run's files and checkpoints.

    Checked before a trainer is started, whose errors only its log would have.
    """
    check_checkpoint_folder(run_dir)
    if (run_dir / STATUS).is_dir():
        raise RunDirectoryError(f"{run_dir / STATUS}: expected a file, got a folder; move it away")
    for name in APPENDED:
        try:
            os.close(open_in_place(run_dir / name, APPEND & ~os.O_CREAT))
        except FileNotFoundError:
            continue
        except UnwritableFile as error:
            raise RunDirectoryError(str(error)) from None
        except PermissionError:
            raise _make_rights_error(run_dir, name) from None
    for folder in (run_dir, run_dir / CHECKPOINTS):
        if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise _make_rights_error(run_dir, "the folder" if folder is run_dir else CHECKPOINTS)


def _make_rights_error(run_dir: Path, name: str) -> RunDirectoryError:
    return RunDirectoryError(NO_RIGHTS.format(run_dir=run_dir, name=name, reason="permission denied"))


# The record of a run. The checks also read what `record_digest` lists.
RECORD_FILES = (CONFIG, STATUS, EVENTS)


def compute_record_digest(run_dir: Path) -> str:
    """Return the SHA-256 of the names and contents of the files of a run's record, 64 hex digits.

    Raises OSError if one is not a regular file or cannot be read. A missing file counts as such.
    """
    digest = hashlib.sha256()
    for name in RECORD_FILES:
        digest.update(f"{name} {compute_file_digest(run_dir / name)}\n".encode())
    return digest.hexdigest()


def compute_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits, or "missing". Raises OSError if it is not a regular file."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except FileNotFoundError:
        return "missing"
    return digest.hexdigest()


def format_done_reason(steps: int) -> str:
    """Return the reason of every run that is DONE. Health checks compare it, also in records of other versions."""
    return f"all {steps} steps done"


def write_status(run_dir: Path, *, run: str, status: str, **fields: Any) -> None:
    """Replace `status.json`. Omitted fields keep their value from the previous status of the same run, but `digest`."""
    previous, path = read_status(run_dir), run_dir / STATUS
    unchanged = previous if previous.get("run") == run else {}
    value = {**unchanged, "run": run, "status": status, "updated": time.time(), **fields}
    value["digest"] = compute_digest(value)
    try:
        write_json(path, value)
    except OSError as error:
        if not is_disk_full(error) or not path.exists():
            raise
        # No space for a second file. A run that stops because of the full disk must still be able to record that.
        overwrite_json(path, value)


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """Return the status recorded in the directory; empty if the file is missing or damaged."""
    status = read_json(Path(run_dir) / STATUS, unique=True)
    known = {name: kind for name, kind in _STATUS_TYPES.items() if name in status}
    known |= {name: kind for name, kind in _NULLABLE_STATUS_TYPES.items() if status.get(name) is not None}
    invalid = [name for name, kind in known.items() if not _is_valid(status[name], kind)]
    if invalid:
        warn_once(f"{Path(run_dir) / STATUS}: damaged and ignored (invalid fields: {', '.join(invalid)})")
        return {}
    return status


def has_damaged_status(run_dir: Path) -> bool:
    """Return whether `status.json` exists, but `read_status` ignores it."""
    return os.path.lexists(run_dir / STATUS) and not read_status(run_dir)


def _is_valid(value: Any, kind: type) -> bool:
    """Return whether a value has a type. Integers are not booleans and have at most 64 bits."""
    return type(value) is kind and (kind is not int or abs(value) <= MAX_INT)
