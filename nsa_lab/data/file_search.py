"""Find the files that a configured path names: a file, a folder (searched recursively) or a pattern. One walk for all.

Invariants
* A folder is the pattern `folder/**/*`. Links to folders are followed.
* A folder is read once for each part of the pattern, whatever its names. A link back into a folder above it therefore ends.
* Every match that is not read is in `left_out` with the reason, as is every folder that could not be searched for matches.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import stat
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

DENIED, NO_TARGET, HIDDEN = "permission denied", "a link to nothing", "hidden"
TOO_LONG = os.strerror(errno.ENAMETOOLONG).lower()


@dataclass
class Matches:
    """Result of a search. `left_out`: (path, reason) pairs; `has_match`: whether anything at all matches."""

    files: list[Path] = field(default_factory=list)
    left_out: list[tuple[Path, str]] = field(default_factory=list)
    has_match: bool = False

    def list_denied(self) -> list[str]:
        """Return the paths that were left out because this user may not read them."""
        return [str(path) for path, reason in self.left_out if reason == DENIED]


def find_matches(path: Path) -> Matches:
    """Return the regular files at a path. A part of the path with `*`, `?` or `[` is a pattern unless it exists literally.

    As in `glob`, `**` matches any number of folders, and a hidden name matches only a pattern that starts with a dot.
    """
    base, parts = _split_pattern(path)
    search = _Search(parts or ["**", "*"])
    if not parts:
        search.add(base, {0, len(search.parts)}, ignore_match=True)
    elif os.path.lexists(base) or get_mode(base)[1]:
        search.folders.append((base, {0}))
    search.run()
    return search.matches


def _split_pattern(path: Path) -> tuple[Path, list[str]]:
    """Return the part of a path before its first pattern, and the names and patterns after it."""
    for index, part in enumerate(path.parts):
        base = Path(*path.parts[:index])
        if glob.has_magic(part) and not os.path.lexists(base / part):
            parts = list(path.parts[index:])
            return base, [*parts, "*"] if parts[-1] == "**" else parts
    return path, []


class _Search:
    """A search in progress. A position is the index of a part of the pattern; at `len(parts)` a path matches as a whole."""

    def __init__(self, parts: list[str]) -> None:
        self.parts, self.matches = parts, Matches()
        self.folders, self._links = deque[tuple[Path, set[int]]](), deque[tuple[Path, set[int]]]()
        # First name of each folder, and the positions at which its content was compared with the pattern.
        self._visited: dict[tuple[int, int], tuple[Path, set[int]]] = {}

    def run(self) -> None:
        # Links come after all other folders, so that a folder with several names has its own.
        while self.folders or self._links:
            path, positions = self.folders.popleft() if self.folders else self._links.popleft()
            try:
                self._read_folder(path, positions)
            except OSError as error:
                self.matches.left_out.append((path, _describe(error)))

    def add(self, path: Path, positions: set[int], *, ignore_match: bool = False) -> None:
        """Record a path that matches the parts before `positions`, or search it if it is a folder."""
        mode, problem = get_mode(path)
        is_match, is_folder = len(self.parts) in positions, mode is not None and stat.S_ISDIR(mode)
        if mode is None and (problem is None or (ignore_match and problem == TOO_LONG)):
            return  # removed meanwhile, or a text that is no path
        self.matches.has_match |= is_match
        if is_folder and (inner := positions - {len(self.parts)}):
            (self._links if path.is_symlink() and not ignore_match else self.folders).append((path, inner))
        elif problem:
            self.matches.left_out.append((path, problem))
        elif is_match and mode is not None and stat.S_ISREG(mode):
            self.matches.files.append(path)
        elif is_match:
            self.matches.left_out.append((path, "a folder" if is_folder else "not a regular file"))

    def _read_folder(self, folder: Path, positions: set[int]) -> None:
        status = folder.stat()
        first, seen = self._visited.setdefault((status.st_dev, status.st_ino), (folder, set()))
        for position in sorted(positions):
            # `**` also matches no folder.
            while self.parts[position] == "**":
                position += 1
                positions = positions | {position}
        if positions <= seen:
            self.matches.left_out.append((folder, f"the same folder as {first}"))
            return
        positions = positions - seen
        seen |= positions
        names: dict[str, set[int]] = {}
        patterns = {position for position in positions if glob.has_magic(self.parts[position])}
        for position in positions - patterns:
            # Not compared with the content: it may be `..`, and the folder may be searchable but not readable.
            names.setdefault(self.parts[position], set()).add(position + 1)
        for name in sorted(os.listdir(folder)) if patterns else ():
            if matched := self._match(name, patterns):
                names.setdefault(name, set()).update(matched)
            elif name in names:
                continue  # a hidden name that the pattern has
            elif (hidden := self._match(name, patterns, include_hidden=True)) and (
                len(self.parts) in hidden or os.path.isdir(folder / name)
            ):
                # Hidden folders (.git, .cache, .ipynb_checkpoints) and copies of editors are not training text.
                self.matches.left_out.append((folder / name, HIDDEN))
        for name, matched in names.items():
            self.add(folder / name, matched)

    def _match(self, name: str, positions: set[int], *, include_hidden: bool = False) -> set[int]:
        """Return the positions after a name in a folder at `positions`."""
        matched = set[int]()
        for position in positions:
            pattern = self.parts[position]
            if name.startswith(".") and not pattern.startswith(".") and not include_hidden:
                continue
            if pattern == "**":
                matched.add(position)
            elif fnmatch.fnmatchcase(name, pattern):
                matched.add(position + 1)
        return matched


def get_mode(path: Path) -> tuple[int | None, str | None]:
    """Return the mode of the file that a path leads to, or None and the reason; no reason if nothing is there."""
    try:
        return os.stat(path).st_mode, None
    except FileNotFoundError:
        return None, NO_TARGET if path.is_symlink() else None
    except OSError as error:
        return None, None if error.errno == errno.ENOTDIR else _describe(error)
    except ValueError:
        return None, None  # a zero byte


def _describe(error: OSError) -> str:
    return NO_TARGET if error.errno == errno.ELOOP else (error.strerror or "cannot be read").lower()
