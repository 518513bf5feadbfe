"""Checkpoints as files: where they lie, which there are, and whether one is whole.

The trainer, which writes them, and all who read them ask here, so that what one of them refuses every other refuses too.
Only the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nsa_lab.runs.directory import CHECKPOINTS

MANIFEST = "MANIFEST.json"
PREFIX = "step-"


def folder_of(run_dir: str | Path) -> Path:
    """The folder that a run keeps its checkpoints in; it need not exist."""
    return Path(run_dir) / CHECKPOINTS


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies in a run's `checkpoints/` folder."""
    return folder / f"{PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The optimiser step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's `checkpoints/` folder, ascending; they need not be whole (see `verify`)."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    return sorted(int(name) for name in names if name.isdigit())


def digest(manifest: Mapping[str, Any]) -> str:
    """What a manifest says of itself under `digest`: the sha256 of all that it says besides."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(checkpoint: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, file by file; empty if its manifest is its own and every file is as that says.

    Sizes are always compared; without `hashes` the files are not read, which for a model of gigabytes takes a while.
    """
    if not checkpoint.is_dir():
        return [f"{checkpoint.name} is gone"]
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        claimed = manifest.pop("digest")
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return [f"{MANIFEST} cannot be read ({type(error).__name__})"]
    if claimed != digest(manifest):
        return [f"{MANIFEST} does not match its own digest"]
    files = manifest["files"].items()
    with ThreadPoolExecutor(max(len(files), 1)) as readers:
        found = readers.map(lambda item: _problem(checkpoint / item[0], item[1], hashes), files)
        return [problem for problem in found if problem]


def _problem(path: Path, entry: Mapping[str, Any], hashes: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != entry["size"]:
        return f"{path.name} has {size} bytes, its manifest says {entry['size']}"
    if not hashes:
        return None
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == entry["sha256"] else f"{path.name} does not match its sha256"
