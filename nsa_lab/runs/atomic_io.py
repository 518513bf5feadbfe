"""Read and atomically replace files that other processes may read meanwhile: they see the old or the new content.

Readers skip files that are damaged all the same (an interrupted copy, a flipped bit), with a warning.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from nsa_lab.config.errors import UsageError
from nsa_lab.runs.text_output import make_printable

logger = logging.getLogger("nsa_lab.runs")

MAX_FILE_BYTES = 1 << 27  # of a file that is read as a whole
BLOCK_BYTES = 1 << 16


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Log a warning, once per text, so that a reader that polls every second does not repeat it."""
    logger.warning("%s", make_printable(text))


class UnreadableFile(UsageError, OSError):
    """A file that is not read, because it is too large or of another kind. `strerror` is the message."""

    def __str__(self) -> str:
        return str(self.strerror)


class UnwritableFile(UsageError, OSError):
    """A file that is not written, because it is a link or of another kind. `strerror` is the message."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises `UnreadableFile` for a FIFO, whose reader would wait forever, or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFile(errno.EINVAL, f"{path}: expected a regular file; replace it")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file. Raises `UnreadableFile` if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(BLOCK_BYTES)
        if len(data) == BLOCK_BYTES <= max_bytes:  # few files; `read` reserves memory for its argument
            data += file.read(max_bytes + 1 - BLOCK_BYTES)
    if len(data) > max_bytes:
        raise UnreadableFile(errno.EFBIG, f"{path}: expected at most {max_bytes:,} bytes, got more; replace it")
    return data


def parse_json(data: bytes) -> Any:
    """Return what `json.loads` returns, in a third of its time. Raises ValueError or RecursionError as it does."""
    try:
        return from_json(data)
    except ValueError:
        return json.loads(data)  # accepts a few more texts, such as half of a surrogate pair


def parse_unique_json(data: bytes) -> Any:
    """Return the value of JSON text. Raises ValueError for an object with a key that occurs twice.

    `json.loads` takes the last of them, while another reader may take the first.
    """

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a key occurs twice")
        return value

    return json.loads(data, object_pairs_hook=make_object)


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing, or damaged, which is logged.

    `unique`: a file with a key that occurs twice is damaged. This takes several times as long.
    """
    try:
        value = (parse_unique_json if unique else parse_json)(read_bounded(path, max_bytes))
    except FileNotFoundError:
        return {}
    except OSError as error:
        warn_once(f"{path}: ignored ({error.strerror})")
        return {}
    except (ValueError, RecursionError) as error:
        warn_once(f"{path}: damaged and ignored ({' '.join(str(error).split())[:120]})")
        return {}
    if not isinstance(value, dict):
        warn_once(f"{path}: damaged and ignored (expected a JSON object, got {value!r:.40})")
        return {}
    return value


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to a temporary file, flush it to the disk, and rename it to `path`."""
    # Two threads of one process may write at once: the trainer's and the one that handles a second signal.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "wb", opener=open_without_following) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(source: Path, target: Path) -> None:
    """Rename `source` to `target`. An error about a folder at `target` names that, not `source`."""
    try:
        os.replace(source, target)
    except IsADirectoryError as error:
        raise IsADirectoryError(error.errno, error.strerror, str(target)) from None


def open_without_following(path: str, flags: int) -> int:
    """Open a file that is not a symbolic link, as `opener` of `open`: writing never changes a file elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_in_place(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of a run for writing in place. Return its descriptor.

    Raises `UnwritableFile` for a symbolic link, which could lead to a file outside of the run, and for any other kind of
    file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        # ENXIO: a FIFO that nobody reads, or a socket.
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        kind = "a symbolic link" if os.path.islink(path) else "another kind of file"
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        kind = "another kind of file"
    raise UnwritableFile(errno.EINVAL, f"{path}: expected a regular file of the run, got {kind}; move it away")


def check_output_file(path: Path) -> None:
    """Check that `path`, which a user gave for a result, can be written: a regular file or a new one in a folder.

    Call this before the work. Raises `UnwritableFile`. Replacing a FIFO, a device or a link would destroy it.
    """
    mode = path.lstat().st_mode if os.path.lexists(path) else None
    if mode is not None and not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO"}
        found = kinds.get(stat.S_IFMT(mode), "a device or socket")
        text = f"{path}: expected a regular file or a new path, got {found}; give another path"
        raise UnwritableFile(errno.EINVAL, text)
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise UnwritableFile(errno.ENOENT, f"{path}: expected a path in an existing folder; create {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UnwritableFile(errno.EACCES, f"{path}: permission denied for its folder; give a path in another folder")


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its content. A link is not followed. No effect if nothing is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def warn_of_remainder(path: Path, error: OSError) -> None:
    """Log that a temporary file or folder could not be removed, once. A file of another user, for example, is no error."""
    warn_once(f"{path}: could not be removed ({(error.strerror or str(error)).lower()}); remove it to free its space")


def add_number(path: Path, number: int) -> Path:
    """Return `path` with a number at the end of its name; unchanged for 0."""
    return path.with_name(f"{path.name}-{number}") if number else path


def find_free_number(path: Path) -> int:
    """Return the lowest number with which (`add_number`) nothing is at `path`."""
    return next(number for number in itertools.count() if not os.path.lexists(add_number(path, number)))


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically as `write_bytes`."""
    # A lone surrogate, from a damaged value or a file name that is not UTF-8, cannot be encoded. JSON reads the escape.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. Raises before anything is written if `value` cannot be serialized."""
    write_text(path, json.dumps(value, indent=1))


def compute_digest(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its `digest` field, 64 hex digits: the value of that field."""
    content = {key: entry for key, entry in value.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_disk_full(error: BaseException) -> bool:
    """Return True for the errors of a full disk or an exceeded quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def overwrite_json(path: Path, value: Any) -> None:
    """Overwrite the file in place, in the blocks that are allocated to it already. A last resort on a full disk.

    Not atomic: a reader may see a part of the new content, which also remains if the process is killed meanwhile.
    """
    data = json.dumps(value, indent=1).encode()
    with open(open_in_place(path, os.O_RDWR), "r+b", buffering=0) as file:
        file.write(data)
        file.truncate()
        os.fsync(file.fileno())
