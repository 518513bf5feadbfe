"""Location of the token shard cache, and resolution of relative paths in the configuration."""

from __future__ import annotations

import os
from pathlib import Path

from nsa_lab.config import DataConfig, find_project_root
from nsa_lab.config.errors import has_working_dir
from nsa_lab.data.errors import DataError
from nsa_lab.data.file_search import find_matches


def get_cache_folder() -> Path:
    """Return the folder of the built shards: inside the project, or in the user's cache for an installed package.

    Raises `DataError` if there is neither.
    """
    root = find_project_root()
    if root:
        return root / ".cache" / "data"
    try:
        return Path.home() / ".cache" / "nsa_lab" / "data"
    except RuntimeError:
        raise DataError("the token cache needs a home folder, and this user has none; set the variable HOME") from None


def list_candidate_paths(path: str) -> list[Path]:
    """Return the possible locations of a configured path, best first.

    A relative path is tried below the project root, then below the working directory.
    """
    configured = Path(os.path.expanduser(path))  # unlike Path.expanduser, leaves the name of an unknown user as it is
    if configured.is_absolute():
        return [configured]
    root = find_project_root()
    folders = ([root] if root else []) + ([Path.cwd()] if has_working_dir() or not root else [])
    return list(dict.fromkeys(folder / configured for folder in folders))


def make_paths_absolute(data: DataConfig) -> DataConfig:
    """Return the same configuration with absolute paths for text and tokenizer that only the working directory resolves.

    A notebook runs in the project folder, and a run may be resumed from any folder.
    """
    paths = {"path": data.path, "tokenizer": None if data.tokenizer == "byte" else data.tokenizer}
    return data.model_copy(update={key: _make_absolute(path) for key, path in paths.items() if path})


def _make_absolute(path: str) -> str:
    *preferred, last = list_candidate_paths(path)
    if (
        not has_working_dir()
        or Path.cwd() == find_project_root()
        or any(map(_matches_a_file, preferred))
        or not _matches_a_file(last)
    ):
        return path
    return str(last)


def _matches_a_file(path: Path) -> bool:
    return os.path.exists(path) or find_matches(path).has_match
