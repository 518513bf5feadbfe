"""The run directory as a place: what lies in it by which name, what it is called, what its status says.

Invariants
* A run directory appears whole (built aside, then renamed) or not at all.
* `status.json` is replaced atomically (on a full disk, overwritten) and carries the run's own id, so a status copied from
  another run is recognised.
* Nothing here imports torch, which a reader must not need.
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa_lab.config import UsageError
from nsa_lab.runs.atomic_io import is_disk_full, overwrite_json, read_json, warn_once, write_json

RUNNING, DONE, HALTED, PREEMPTED = "RUNNING", "DONE", "HALTED", "PREEMPTED"

# Each asks a trainer to save and exit.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

EXIT_DONE, EXIT_BUG, EXIT_USAGE, EXIT_HALTED, EXIT_STOPPED = 0, 1, 2, 3, 75

CONFIG, ENVIRONMENT, STATUS, EVENTS = "config.yaml", "environment.json", "status.json", "events.jsonl"
VERDICT = "verdict.json"
LOG, LOCK, CHECKPOINTS, TENSORBOARD = "trainer.log", "trainer.lock", "checkpoints", "tensorboard"


_TIME_FORMAT, _RUN_ID_TIME = "%Y%m%dT%H%M%SZ", re.compile(r"-(\d{8}T\d{6}Z)-[0-9a-f]{4}$")
_STATUS_TYPES = {"run": str, "status": str, "attempt": int, "step": int, "tokens": int}


class RunDirectoryError(UsageError, RuntimeError):
    """A run directory is missing, foreign or in use; the message says what to do."""


def make_run_id(name: str) -> str:
    return f"{name}-{datetime.now(UTC):{_TIME_FORMAT}}-{secrets.token_hex(2)}"


def get_creation_time(run_dir: Path) -> tuple[str, float]:
    """When a run was made, to be ordered by: the second in its id, which copies and clones keep, and then the time of its
    configuration's file; of a folder with another name, that time alone."""
    changed = (run_dir / CONFIG).stat().st_mtime
    stamped = _RUN_ID_TIME.search(run_dir.name)
    return (stamped[1] if stamped else f"{datetime.fromtimestamp(changed, UTC):{_TIME_FORMAT}}"), changed


def create_run_dir(outputs: Path, name: str, files: dict[str, str]) -> Path:
    """A new directory under `outputs` holding `files` and a status; nothing is left behind if writing fails.

    Raises `RunDirectoryError` where no folder can be made.
    """
    run_id = make_run_id(name)
    building = outputs / f".creating-{run_id}"
    try:
        building.mkdir(parents=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{outputs}: no run can be made there ({error.strerror}); name a folder to write into"
        ) from None
    try:
        for file, text in files.items():
            (building / file).write_text(text, encoding="utf-8")
        write_status(building, run=run_id, status=PREEMPTED, reason="created, not started", attempt=0, step=0, tokens=0)
        building.rename(outputs / run_id)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return outputs / run_id


def check_run_dir(run_dir: str | Path) -> Path:
    """`run_dir` as an absolute path, or `RunDirectoryError` if it is not a run directory."""
    path = Path(run_dir).resolve()
    if not (path / CONFIG).is_file():
        raise RunDirectoryError(f"{path} is not a run directory: it has no {CONFIG}; name a folder that a run created")
    return path


def write_status(run_dir: Path, *, run: str, status: str, **fields: Any) -> None:
    """Replace `status.json`. Fields that are not given again are kept from the status of the same run."""
    earlier, path = read_status(run_dir), run_dir / STATUS
    kept = earlier if earlier.get("run") == run else {}
    value = {**kept, "run": run, "status": status, "updated": time.time(), **fields}
    try:
        write_json(path, value)
    except OSError as error:
        if not is_disk_full(error) or not path.exists():
            raise
        # There is no room for a second file; a run that stops for that very reason must still be able to say so.
        overwrite_json(path, value)


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """The last status written in the directory; empty when there is none, or a damaged one."""
    found = read_json(Path(run_dir) / STATUS)
    wrong = [name for name, kind in _STATUS_TYPES.items() if name in found and not isinstance(found[name], kind)]
    if wrong:
        warn_once(f"{Path(run_dir) / STATUS}: damaged, and read as if it were not there (see its {', '.join(wrong)})")
        return {}
    return found
