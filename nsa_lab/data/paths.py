"""Where the cache of token shards is, and what a relative `data.path` means."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from nsa_lab.config import DataConfig, find_project_root


def get_cache_folder() -> Path:
    """Folder of the filled shards: inside the project, or the user's own cache for an installed package."""
    root = find_project_root()
    return root / ".cache" / "data" if root else Path.home() / ".cache" / "nsa_lab" / "data"


def list_candidate_paths(path: str) -> list[Path]:
    """The places a configured path may mean, best first: as it stands if absolute, else below project and cwd."""
    given = Path(path).expanduser()
    if given.is_absolute():
        return [given]
    root = find_project_root()
    places = [root / given] if root else []
    return list(dict.fromkeys([*places, Path.cwd() / given]))


def make_paths_absolute(data: DataConfig) -> DataConfig:
    """The same text and tokenizer for a process that stands elsewhere: what the working directory alone has, absolute.

    A notebook is executed in the project's folder, and a run is resumed from anywhere.
    """
    given = {"path": data.path, "tokenizer": None if data.tokenizer == "byte" else data.tokenizer}
    return data.model_copy(update={key: _make_absolute(path) for key, path in given.items() if path})


def _make_absolute(path: str) -> str:
    *before, last = list_candidate_paths(path)
    if Path.cwd() == find_project_root() or any(map(_matches_a_file, before)) or not _matches_a_file(last):
        return path
    return str(last)


def _matches_a_file(place: Path) -> bool:
    return os.path.exists(place) or bool(glob.glob(str(place), recursive=True))
