"""Files that another process may be reading while they are written: it sees the old file or the new one, never a part.

What is found damaged all the same (a copy that broke off, a byte that fell over) is passed over with a sentence.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

logger = logging.getLogger("nsa_lab.runs")


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """A warning for whoever reads runs; those who look again every second are told once."""
    logger.warning("%s", text)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty where there is no file. A damaged one is said and counts as none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        warn_once(f"{path}: damaged, and read as if it were not there ({' '.join(str(error).split())[:120]})")
        return {}
    if not isinstance(found, dict):
        warn_once(f"{path}: damaged, and read as if it were not there (an object is wanted, and this is {found!r:.40})")
        return {}
    return found


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file by one that holds `data`, flushed to the disk before it gets the name."""
    # Two threads of one process may write at once: the trainer's, and the one that hears a second signal.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as JSON; what JSON cannot hold raises before anything is written."""
    write_text(path, json.dumps(value, indent=1))


def is_disk_full(error: BaseException) -> bool:
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
