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

from nsa_lab.runs.atomic_io import is_disk_full
from nsa_lab.runs.checkpoint_files import (
    MANIFEST,
    find_problems,
    format_manifest,
    get_checkpoint_path,
    list_steps,
    make_manifest_entry,
)

LATEST, QUARANTINE = "latest", "quarantine"

Serializer = Callable[[], bytes | memoryview]


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
class SavedCheckpoint:
    """What a save did. `size_bytes` counts every file."""

    path: Path
    size_bytes: int
    seconds: float
    pruned: list[str]


@dataclass(frozen=True)
class QuarantinedCheckpoint:
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

    def get_path(self, step: int) -> Path:
        return get_checkpoint_path(self.folder, step)

    def list_steps(self) -> list[int]:
        """Steps of the checkpoints that have not been quarantined, ascending; they need not be valid."""
        return list_steps(self.folder)

    def has_been_used(self) -> bool:
        """Whether a save was ever completed here."""
        return bool(self.list_steps()) or (self.folder / LATEST).exists() or any(self.folder.glob(f"{QUARANTINE}/*"))

    def save(self, step: int, files: Mapping[str, Serializer], facts: Mapping[str, Any]) -> SavedCheckpoint:
        """Write the files of `step`; `facts` (hashes of config and data) go into the manifest.

        A valid checkpoint of the same step is left as it is: it holds the same state. Raises `DiskFull`, or what else the
        filesystem raised, with the unfinished files removed.
        """
        begun = time.monotonic()
        target = self.get_path(step)
        self._remove_leftovers()
        if target.exists():
            if not find_problems(target):
                return SavedCheckpoint(target, _get_size_bytes(target), time.monotonic() - begun, [])
            self._quarantine(step)
        try:
            pruned = self._write_checkpoint(target, step, files, facts)
        except Exception as error:
            self._remove_temporary(target, error)
            if not is_disk_full(error):
                raise
            needed, free = sum(len(serialise()) for serialise in files.values()), shutil.disk_usage(self.folder).free
            raise DiskFull(f"the disk is full: {needed:,} bytes were needed, {free:,} are free") from error
        return SavedCheckpoint(target, _get_size_bytes(target), time.monotonic() - begun, pruned)

    def _write_checkpoint(
        self, target: Path, step: int, files: Mapping[str, Serializer], facts: Mapping[str, Any]
    ) -> list[str]:
        temporary = self._get_temporary_path(target)
        self._fs.make_dir(temporary)
        entries = {name: self._write_file(temporary / name, serialise()) for name, serialise in files.items()}
        self._fs.write(temporary / MANIFEST, format_manifest(step, entries, facts).encode())
        self._fs.sync_dir(temporary)
        self._fs.rename(temporary, target)
        self._fs.sync_dir(self.folder)
        self._update_latest(target)
        return self._prune()

    def _get_temporary_path(self, target: Path) -> Path:
        return self.folder / f".saving-{target.name}"

    def _remove_temporary(self, target: Path, error: Exception) -> None:
        unfinished = self._get_temporary_path(target)
        try:
            if unfinished.exists():
                self._fs.remove_tree(unfinished)
        except OSError as second:
            error.add_note(f"{unfinished} is left behind: {second}")

    def load_latest(self) -> tuple[Path | None, list[QuarantinedCheckpoint]]:
        """The newest checkpoint whose every file matches its manifest, and those that had to be moved out of the way.

        None if no checkpoint was ever completed. Raises `NoValidCheckpoint` if there were some and none is valid.
        """
        moved: list[QuarantinedCheckpoint] = []
        for step in reversed(self.list_steps()):
            problems = find_problems(self.get_path(step))
            if not problems:
                return self.get_path(step), moved
            moved.append(QuarantinedCheckpoint(step, self._quarantine(step), problems))
        if self.has_been_used():
            raise NoValidCheckpoint(self._explain_no_valid(moved))
        return None, moved

    def _write_file(self, path: Path, data: bytes | memoryview) -> dict[str, Any]:
        # Hashed from memory, so that what the disk makes of it can be held against it; beside the writing, which waits.
        with ThreadPoolExecutor(1) as beside:
            entry = beside.submit(make_manifest_entry, data)
            self._fs.write(path, data)
            return entry.result()

    def _update_latest(self, target: Path) -> None:
        temporary = self.folder / f".{LATEST}"
        self._fs.write(temporary, target.name.encode() + b"\n")
        self._fs.rename(temporary, self.folder / LATEST)
        self._fs.sync_dir(self.folder)

    def _prune(self) -> list[str]:
        saved = self.list_steps()
        permanent = {step for step in saved if self._keep_every and step % self._keep_every == 0}
        removed = [step for step in saved[: -self._keep_last] if step not in permanent]
        for step in removed:
            doomed = self.folder / f".removing-{self.get_path(step).name}"
            self._fs.rename(self.get_path(step), doomed)
            self._fs.unlink(doomed / MANIFEST)
            self._fs.remove_tree(doomed)
        return [self.get_path(step).name for step in removed]

    def _remove_leftovers(self) -> None:
        for leftover in [*self.folder.glob(".saving-*"), *self.folder.glob(".removing-*")]:
            self._fs.remove_tree(leftover)

    def _quarantine(self, step: int) -> Path:
        source = self.get_path(step)
        folder = self.folder / QUARANTINE
        folder.mkdir(exist_ok=True)
        target = next(path for n in range(10_000) if not (path := folder / f"{source.name}-{n}").exists())
        self._fs.rename(source, target)
        self._fs.sync_dir(self.folder)
        return target

    def _explain_no_valid(self, moved: list[QuarantinedCheckpoint]) -> str:
        found = "; ".join(f"step {q.step}: {', '.join(q.problems)}" for q in moved) or "the folder holds none"
        return (
            f"{self.folder}: checkpoints were written and none is valid ({found}). The run is not started over. "
            f"Look into {self.folder / QUARANTINE}, restore a step-… folder from a backup, or create a new run"
        )


def _get_size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
