"""Where the cache of token shards is, and what a relative `data.path` means."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from nsa_lab.config import DataConfig, project_root


def cache_folder() -> Path:
    """Folder of the filled shards: inside the project, or the user's own cache for an installed package."""
    root = project_root()
    return root / ".cache" / "data" if root else Path.home() / ".cache" / "nsa_lab" / "data"


def candidates(path: str) -> list[Path]:
    """The places a configured path may mean, best first: as it stands if absolute, else below project and cwd."""
    given = Path(path).expanduser()
    if given.is_absolute():
        return [given]
    root = project_root()
    places = [root / given] if root else []
    return list(dict.fromkeys([*places, Path.cwd() / given]))


def settled(data: DataConfig) -> DataConfig:
    """The same text and tokenizer for a process that stands elsewhere: what the working directory alone has, absolute.

    A notebook is executed in the project's folder, and a run is resumed from anywhere.
    """
    given = {"path": data.path, "tokenizer": None if data.tokenizer == "byte" else data.tokenizer}
    return data.model_copy(update={key: _absolute(path) for key, path in given.items() if path})


def _absolute(path: str) -> str:
    *before, last = candidates(path)
    if Path.cwd() == project_root() or any(map(_stands_for_something, before)) or not _stands_for_something(last):
        return path
    return str(last)


def _stands_for_something(place: Path) -> bool:
    return os.path.exists(place) or bool(glob.glob(str(place), recursive=True))
