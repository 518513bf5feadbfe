"""Checkpoints on disk: complete or absent, verified before use, never silently replaced by a new run.

Protocol of a save: create a temporary directory on the same filesystem; write and fsync each file; write MANIFEST.json
(sizes and sha256) last; fsync the directory; rename it; fsync the parent; replace `latest`; prune old checkpoints. With
sharded weights, all ranks write into the temporary directory, and rank 0 does the rest.

Invariants
* A directory named `step-…` was complete when it got that name. If it is found damaged later, it is moved to
  `quarantine/`.
* Pruning first renames a checkpoint and then deletes its manifest, so a half-removed one cannot pass for a complete one.
* If checkpoints were written and none is valid, loading raises `NoValidCheckpoint`.
* A failed save leaves no files that take disk space.
* A leftover that cannot be removed (a file of another user) is logged once and does not stop a save. A temporary name that
  is in use gets a number.
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

from nsa_lab.runs.atomic_io import (
    add_number,
    find_free_number,
    is_disk_full,
    open_without_following,
    remove_path,
    replace_file,
    warn_of_remainder,
)
from nsa_lab.runs.checkpoint_files import (
    MANIFEST,
    find_problems,
    format_manifest,
    get_checkpoint_path,
    list_steps,
    make_manifest_entry,
)
from nsa_lab.runs.directory import RunDirectoryError

LATEST, QUARANTINE = "latest", "quarantine"

Serializer = Callable[[], bytes | memoryview]


class NoValidCheckpoint(RuntimeError):
    """The run wrote checkpoints, but none is valid."""


class DiskFull(OSError):
    """The disk is full. The message has the number of bytes needed and the number that is free."""


class Filesystem:
    """The filesystem calls of a save. Tests pass one that fails at the n-th call or in the middle of a write."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        with open(path, "wb", opener=open_without_following) as file:
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
        replace_file(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        remove_path(path)


@dataclass(frozen=True)
class StartedSave:
    """A save in progress. `folder`: its temporary directory, with this number; `start_time`: of `time.monotonic`."""

    step: int
    folder: Path
    start_time: float
    number: int = 0


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of a save. `size_bytes`: all files together; `pruned`: names of the checkpoints that were deleted."""

    path: Path
    size_bytes: int
    seconds: float
    pruned: list[str]


@dataclass(frozen=True)
class QuarantinedCheckpoint:
    """A checkpoint that failed verification: its step, its new path, and the problems found."""

    step: int
    path: Path
    problems: list[str]


class CheckpointStore:
    """The `checkpoints/` folder of one run.

    Pruning keeps the newest `keep_last` checkpoints and those whose step is a multiple of `keep_every` (0: none).
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, keep_every: int = 0, fs: Filesystem | None = None) -> None:
        self.folder = folder
        self._keep_last, self._keep_every = keep_last, keep_every
        self._fs = fs or Filesystem()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RunDirectoryError(f"{folder}: expected a folder, got a file; move it away") from None

    def get_path(self, step: int) -> Path:
        return get_checkpoint_path(self.folder, step)

    def get_temporary_path(self, step: int, number: int = 0) -> Path:
        """Return the temporary directory of a save of `step`. `number`: above 0 if lower ones are in use."""
        return add_number(self.folder / f".saving-{self.get_path(step).name}", number)

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints that are not quarantined, ascending. They may be invalid."""
        return list_steps(self.folder)

    def has_been_used(self) -> bool:
        """Return whether a save was ever completed here."""
        return bool(self.list_steps()) or (self.folder / LATEST).exists() or any(self.folder.glob(f"{QUARANTINE}/*"))

    def save(self, step: int, files: Mapping[str, Serializer], facts: Mapping[str, Any]) -> SavedCheckpoint:
        """Write the files of `step`. `facts` (hashes of configuration and data) go into the manifest.

        A valid checkpoint of the same step is left unchanged: it has the same state. Raises `DiskFull` or another error
        of the filesystem; the temporary files are removed first.
        """
        try:
            started = self.begin(step)
            return started if isinstance(started, SavedCheckpoint) else self.complete(started, files, facts)
        except Exception as error:
            if not is_disk_full(error):
                raise
            raise self.make_disk_full_error(sum(len(serialize()) for serialize in files.values())) from error

    def begin(self, step: int) -> StartedSave | SavedCheckpoint:
        """Create the temporary directory of a save, or return the valid checkpoint that `step` has already.

        Raises errors of the filesystem.
        """
        start_time = time.monotonic()
        target = self.get_path(step)
        self._remove_leftovers()
        if os.path.lexists(target):
            if not find_problems(target):
                return SavedCheckpoint(target, _get_size_bytes(target), time.monotonic() - start_time, [])
            self._quarantine(step)
        number = find_free_number(self.get_temporary_path(step))
        started = StartedSave(step, self.get_temporary_path(step, number), start_time, number)
        try:
            self._fs.make_dir(started.folder)
        except Exception as error:
            self.abandon(started, error)
            raise
        return started

    def complete(
        self,
        started: StartedSave,
        files: Mapping[str, Serializer],
        facts: Mapping[str, Any],
        written: Mapping[str, dict[str, Any]] | None = None,
    ) -> SavedCheckpoint:
        """Write `files` and the manifest, and give the checkpoint its name.

        `written`: manifest entries of files that are in the temporary directory already. Raises errors of the filesystem;
        the temporary directory is removed first.
        """
        target = self.get_path(started.step)
        try:
            new = {name: self._write_file(started.folder / name, serialize()) for name, serialize in files.items()}
            manifest = format_manifest(started.step, {**(written or {}), **new}, facts)
            self._fs.write(started.folder / MANIFEST, manifest.encode())
            self._fs.sync_dir(started.folder)
            self._fs.rename(started.folder, target)
            self._fs.sync_dir(self.folder)
            self._update_latest(target)
            pruned = self._prune(started.step)
        except Exception as error:
            self.abandon(started, error)
            raise
        return SavedCheckpoint(target, _get_size_bytes(target), time.monotonic() - started.start_time, pruned)

    def abandon(self, started: StartedSave, error: BaseException) -> None:
        """Remove the temporary directory of a save that failed with `error`."""
        try:
            if started.folder.exists():
                self._fs.remove_tree(started.folder)
        except OSError as cleanup_error:
            error.add_note(f"{started.folder} could not be removed: {cleanup_error}")

    def make_disk_full_error(self, needed_bytes: int) -> DiskFull:
        """Return an error with the sizes of a checkpoint and of the free space."""
        free = shutil.disk_usage(self.folder).free
        return DiskFull(f"the disk is full: a checkpoint needs {needed_bytes:,} bytes, {free:,} are free")

    def load_latest(
        self, find_content_problems: Callable[[Path], list[str]] = lambda path: []
    ) -> tuple[Path | None, list[QuarantinedCheckpoint]]:
        """Return the newest checkpoint whose files all match its manifest, and the newer ones that were quarantined.

        `find_content_problems`: returns problems of files that match their manifest. None if no
        checkpoint was ever completed. Raises `NoValidCheckpoint` if there were some and none is valid.
        """
        quarantined: list[QuarantinedCheckpoint] = []
        for step in reversed(self.list_steps()):
            path = self.get_path(step)
            problems = find_problems(path) or find_content_problems(path)
            if not problems:
                return self.get_path(step), quarantined
            quarantined.append(QuarantinedCheckpoint(step, self._quarantine(step), problems))
        if self.has_been_used():
            raise NoValidCheckpoint(self._explain_no_valid(quarantined))
        return None, quarantined

    def _write_file(self, path: Path, data: bytes | memoryview) -> dict[str, Any]:
        # Hash the bytes in memory, so that the manifest detects errors of the disk; in a thread, while the write waits
        # for I/O.
        with ThreadPoolExecutor(1) as pool:
            entry = pool.submit(make_manifest_entry, data)
            self._fs.write(path, data)
            return entry.result()

    def _update_latest(self, target: Path) -> None:
        temporary = _make_free_path(self.folder / f".{LATEST}")
        self._fs.write(temporary, target.name.encode() + b"\n")
        self._fs.rename(temporary, self.folder / LATEST)
        self._fs.sync_dir(self.folder)

    def _prune(self, saved_step: int) -> list[str]:
        steps = self.list_steps()
        permanent = {step for step in steps if self._keep_every and step % self._keep_every == 0}
        # Folders of later steps may be there, for example copied ones.
        permanent.add(saved_step)
        removed = [step for step in steps[: -self._keep_last] if step not in permanent]
        return [self.get_path(step).name for step in removed if self._remove_checkpoint(self.get_path(step))]

    def _remove_checkpoint(self, path: Path) -> bool:
        """Remove a checkpoint. Return False, with a warning, if this is not possible: the new checkpoint is complete."""
        renamed = _make_free_path(self.folder / f".removing-{path.name}")
        try:
            self._fs.rename(path, renamed)
            self._fs.unlink(renamed / MANIFEST)
            self._fs.remove_tree(renamed)
        except OSError as error:
            warn_of_remainder(renamed if renamed.exists() else path, error)
        return not path.exists()

    def _remove_leftovers(self) -> None:
        # Also files and links: whatever has the name of a temporary file would block every save.
        leftovers = (
            leftover for pattern in (".saving-*", ".removing-*", f".{LATEST}*") for leftover in self.folder.glob(pattern)
        )
        for leftover in leftovers:
            try:
                self._fs.remove_tree(leftover)
            except OSError as error:
                warn_of_remainder(leftover, error)

    def _quarantine(self, step: int) -> Path:
        source = self.get_path(step)
        folder = self.folder / QUARANTINE
        folder.mkdir(exist_ok=True)
        target = next(path for n in range(10_000) if not (path := folder / f"{source.name}-{n}").exists())
        self._fs.rename(source, target)
        self._fs.sync_dir(self.folder)
        return target

    def _explain_no_valid(self, quarantined: list[QuarantinedCheckpoint]) -> str:
        problems = (
            "; ".join(f"step {checkpoint.step}: {', '.join(checkpoint.problems)}" for checkpoint in quarantined)
            or "the folder has none"
        )
        return (
            f"{self.folder}: checkpoints were written, but none is valid ({problems}). The run is not started over. "
            f"Look into {self.folder / QUARANTINE}, restore a step-… folder from a backup, or create a new run"
        )


def _get_size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _make_free_path(path: Path) -> Path:
    return add_number(path, find_free_number(path))
