"""Where the cache of token shards is, and what a relative `data.path` means."""

from __future__ import annotations

from pathlib import Path

from nsa_lab.config import project_root


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
