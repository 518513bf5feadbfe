"""Checkpoints on disk: whole or absent, verified before use, never silently replaced by a fresh start.

Protocol of a save: temporary directory on the same filesystem, each file written and fsynced, MANIFEST.json (sizes and
sha256) last, directory fsynced, renamed, parent fsynced, `latest` replaced, old ones pruned.

Invariants
* A directory named `step-…` was complete when it got that name. What is later found damaged is moved to `quarantine/`.
* A pruned checkpoint loses its name first and its manifest next, so that a half-removed one cannot be mistaken for whole.
* If checkpoints were written and none is valid, loading raises `NoValidCheckpoint`.
* A save that fails leaves nothing behind that takes room.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_lab.runs.checkpoints import MANIFEST, entry_of, manifest_of, path_of, steps, verify
from nsa_lab.runs.files import is_full

LATEST, QUARANTINE = "latest", "quarantine"

Serialiser = Callable[[], bytes | memoryview]


class NoValidCheckpoint(RuntimeError):
    """The run wrote checkpoints and none can be trusted."""


class DiskFull(OSError):
    """A save found no room. The message says how many bytes it needed and how many there are."""


class Filesystem:
    """The calls that a save makes. Tests pass one that fails at the n-th call, or half-way through a write."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)


@dataclass(frozen=True)
class Saved:
    """What a save did. `size_bytes` counts every file."""

    path: Path
    size_bytes: int
    seconds: float
    pruned: list[str]


@dataclass(frozen=True)
class Quarantined:
    """A checkpoint that failed verification, where it was moved to, and what was wrong with it."""

    step: int
    path: Path
    problems: list[str]


class CheckpointStore:
    """The `checkpoints/` folder of one run.

    `keep_last` newest ones are kept, and every one whose step is a multiple of `keep_every` (0: none besides).
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, keep_every: int = 0, fs: Filesystem | None = None) -> None:
        self.folder = folder
        self._keep_last, self._keep_every = keep_last, keep_every
        self._fs = fs or Filesystem()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, step: int) -> Path:
        return path_of(self.folder, step)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have not been quarantined, ascending; they need not be valid."""
        return steps(self.folder)

    def was_used(self) -> bool:
        """Whether a save was ever completed here."""
        return bool(self.steps()) or (self.folder / LATEST).exists() or any(self.folder.glob(f"{QUARANTINE}/*"))

    def save(self, step: int, files: Mapping[str, Serialiser], facts: Mapping[str, Any]) -> Saved:
        """Write the files of `step`; `facts` (hashes of config and data) go into the manifest.

        A valid checkpoint of the same step is left as it is: it holds the same state. Raises `DiskFull`, or what else the
        filesystem raised, with the unfinished files removed.
        """
        begun = time.monotonic()
        target = self.path(step)
        self._clear_leftovers()
        if target.exists():
            if not verify(target):
                return Saved(target, _size(target), time.monotonic() - begun, [])
            self._quarantine(step)
        try:
            pruned = self._save_as(target, step, files, facts)
        except Exception as error:
            self._remove_unfinished(target, error)
            if not is_full(error):
                raise
            needed, free = sum(len(serialise()) for serialise in files.values()), shutil.disk_usage(self.folder).free
            raise DiskFull(f"the disk is full: {needed:,} bytes were needed, {free:,} are free") from error
        return Saved(target, _size(target), time.monotonic() - begun, pruned)

    def _save_as(self, target: Path, step: int, files: Mapping[str, Serialiser], facts: Mapping[str, Any]) -> list[str]:
        temporary = self._unfinished(target)
        self._fs.make_dir(temporary)
        entries = {name: self._write(temporary / name, serialise()) for name, serialise in files.items()}
        self._fs.write(temporary / MANIFEST, manifest_of(step, entries, facts).encode())
        self._fs.sync_dir(temporary)
        self._fs.rename(temporary, target)
        self._fs.sync_dir(self.folder)
        self._point_latest_at(target)
        return self._prune()

    def _unfinished(self, target: Path) -> Path:
        return self.folder / f".saving-{target.name}"

    def _remove_unfinished(self, target: Path, error: Exception) -> None:
        unfinished = self._unfinished(target)
        try:
            if unfinished.exists():
                self._fs.remove_tree(unfinished)
        except OSError as second:
            error.add_note(f"{unfinished} is left behind: {second}")

    def load_latest(self) -> tuple[Path | None, list[Quarantined]]:
        """The newest checkpoint whose every file matches its manifest, and those that had to be moved out of the way.

        None if no checkpoint was ever completed. Raises `NoValidCheckpoint` if there were some and none is valid.
        """
        moved: list[Quarantined] = []
        for step in reversed(self.steps()):
            problems = verify(self.path(step))
            if not problems:
                return self.path(step), moved
            moved.append(Quarantined(step, self._quarantine(step), problems))
        if self.was_used():
            raise NoValidCheckpoint(self._explain_none(moved))
        return None, moved

    def _write(self, path: Path, data: bytes | memoryview) -> dict[str, Any]:
        # Hashed from memory, so that what the disk makes of it can be held against it; beside the writing, which waits.
        with ThreadPoolExecutor(1) as beside:
            entry = beside.submit(entry_of, data)
            self._fs.write(path, data)
            return entry.result()

    def _point_latest_at(self, target: Path) -> None:
        temporary = self.folder / f".{LATEST}"
        self._fs.write(temporary, target.name.encode() + b"\n")
        self._fs.rename(temporary, self.folder / LATEST)
        self._fs.sync_dir(self.folder)

    def _prune(self) -> list[str]:
        saved = self.steps()
        permanent = {step for step in saved if self._keep_every and step % self._keep_every == 0}
        removed = [step for step in saved[: -self._keep_last] if step not in permanent]
        for step in removed:
            doomed = self.folder / f".removing-{self.path(step).name}"
            self._fs.rename(self.path(step), doomed)
            self._fs.unlink(doomed / MANIFEST)
            self._fs.remove_tree(doomed)
        return [self.path(step).name for step in removed]

    def _clear_leftovers(self) -> None:
        for leftover in [*self.folder.glob(".saving-*"), *self.folder.glob(".removing-*")]:
            self._fs.remove_tree(leftover)

    def _quarantine(self, step: int) -> Path:
        source = self.path(step)
        folder = self.folder / QUARANTINE
        folder.mkdir(exist_ok=True)
        target = next(path for n in range(10_000) if not (path := folder / f"{source.name}-{n}").exists())
        self._fs.rename(source, target)
        self._fs.sync_dir(self.folder)
        return target

    def _explain_none(self, moved: list[Quarantined]) -> str:
        found = "; ".join(f"step {q.step}: {', '.join(q.problems)}" for q in moved) or "the folder holds none"
        return (
            f"{self.folder}: checkpoints were written and none is valid ({found}). The run is not started over. "
            f"Look into {self.folder / QUARANTINE}, restore a step-… folder from a backup, or create a new run"
        )


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
