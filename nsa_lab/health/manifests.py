"""Is a checkpoint on disk what its manifest says? Asked by readers, who do not load the trainer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "MANIFEST.json"


def check_checkpoint(folder: Path, *, hashes: bool) -> str | None:
    """What is wrong with a checkpoint folder, or None: files present, sizes right, and with `hashes` the sha256 too."""
    if not folder.is_dir():
        return f"{folder.name} is gone"
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (FileNotFoundError, ValueError, KeyError) as error:
        return f"{folder.name}/{MANIFEST} cannot be read ({type(error).__name__})"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}/{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{folder.name}/{name} has {path.stat().st_size:,} bytes, its manifest says {entry['size']:,}"
        if hashes and _sha256(path) != entry["sha256"]:
            return f"{folder.name}/{name} does not match its sha256"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
