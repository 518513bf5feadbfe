"""Digest of the files that the checks of a run read in addition to its record: if it has changed, a verdict is out of date.

`directory.compute_record_digest` covers the record, with which recorded runs are published. This one covers what copies may
lack: environment.json, evaluations, checkpoints, and a trainer at work. Weights may have gigabytes, so checkpoints are
compared by name, size, mode and modification time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from nsa_lab.runs.checkpoint_files import get_checkpoint_dir
from nsa_lab.runs.directory import ENVIRONMENT, compute_file_digest
from nsa_lab.runs.evaluation import CONVERSION, EVALUATION, RULER
from nsa_lab.runs.lock import lock_owner

MAX_DEPTH = 2  # checkpoints/step-00005000/model.safetensors


def compute_surroundings_digest(run_dir: Path) -> str:
    """Return the SHA-256 of everything else that the checks of a run read, 64 hex digits."""
    lines = [f"trainer {lock_owner(run_dir) is not None}"]
    # Verdicts of runs without a conversion stay valid: earlier versions did not list this file.
    names = (ENVIRONMENT, EVALUATION, RULER, *((CONVERSION,) if os.path.lexists(run_dir / CONVERSION) else ()))
    for name in names:
        try:
            lines.append(f"{name} {compute_file_digest(run_dir / name)}")
        except OSError as error:
            lines.append(f"{name}: {error.errno}")
    lines += _describe_folder(get_checkpoint_dir(run_dir), MAX_DEPTH)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _describe_folder(folder: Path, depth: int) -> Iterator[str]:
    """Yield a line for the folder, and one for each entry, down to `depth` levels. Links are followed, as readers do."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        yield f"{folder.name}: {error.errno}"
        return
    yield f"{folder.name}: {len(entries)} entries"
    for entry in entries:
        try:
            info = entry.stat()
        except OSError as error:
            yield f"{entry.name} {error.errno}"
            continue
        if entry.is_dir():
            if depth > 1:
                yield from _describe_folder(folder / entry.name, depth - 1)
        else:
            yield f"{entry.name} {info.st_mode} {info.st_size} {info.st_mtime_ns}"
