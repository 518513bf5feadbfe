"""Files that another process may be reading while they are written: it sees the old file or the new one, never a part."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace the file by one that holds `text` in UTF-8, flushed to the disk before it gets the name."""
    # Two threads of one process may write at once: the trainer's, and the one that hears a second signal.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as JSON; what JSON cannot hold raises before anything is written."""
    write_text(path, json.dumps(value, indent=1))


def is_full(error: BaseException) -> bool:
    """Whether this is what a disk, or a quota on one, says when it has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def overwrite_json(path: Path, value: Any) -> None:
    """Write `value` over what the file holds, in the blocks that it has already: the last resort on a full disk.

    A reader may see a part of it, and so does everyone if the process is killed right now.
    """
    data = json.dumps(value, indent=1).encode()
    with open(path, "r+b", buffering=0) as file:
        file.write(data)
        file.truncate()
        os.fsync(file.fileno())
