"""Find recorded runs of a checkout by pattern. Most of them are in an archive, from which they are unpacked once."""

from __future__ import annotations

import json
import tarfile
from fnmatch import fnmatch
from pathlib import Path

from nsa_lab.runs import resolve
from nsa_lab.runs.atomic_io import write_bytes

# Relative to the project. tools/records.py writes both files.
ARCHIVE = Path("docs", "science", "records", "runs.tar.xz")
UNPACKED = Path(".cache", "records")


def find_archived_runs(pattern: str) -> list[Path]:
    """Return the directories of archived runs whose id matches `pattern`, or begins with it, ordered by id.

    Runs that were not needed before are unpacked into `.cache/records`. The list is empty outside a checkout.
    """
    archive, folder = resolve.get_root() / ARCHIVE, resolve.get_root() / UNPACKED
    manifest = archive.with_suffix("").with_suffix(".json")
    if not (archive.is_file() and manifest.is_file()):
        return []
    entries = json.loads(manifest.read_text(encoding="utf-8"))
    archived = [run for run, entry in entries.items() if entry["place"] == ARCHIVE.as_posix()]
    runs = sorted(run for run in archived if fnmatch(run, pattern) or run.startswith(pattern))
    if missing := {run for run in runs if not (folder / run / "config.yaml").is_file()}:
        _unpack(archive, missing, folder)
    return [folder / run for run in runs]


def _unpack(archive: Path, runs: set[str], folder: Path) -> None:
    files: dict[str, bytes] = {}
    with tarfile.open(archive) as members:
        for member in members:
            run, _, name = member.name.partition("/")
            content = members.extractfile(member)
            if run in runs and content is not None and "/" not in name:
                files[member.name] = content.read()
    # The configuration comes last: a run directory that has one is complete.
    for path in sorted(files, key=lambda path: path.endswith("/config.yaml")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / path, files[path])
