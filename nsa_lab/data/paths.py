"""Where the project stands, where its cache is, and what a relative `data.path` means."""

from __future__ import annotations

import tomllib
from pathlib import Path


def project_root() -> Path | None:
    """Nearest folder above the working directory, or above this package, whose pyproject.toml names nsa_lab."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if _names_nsa_lab(folder / "pyproject.toml"):
                return folder
    return None


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


def _names_nsa_lab(pyproject: Path) -> bool:
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        # Somebody else's folder above ours: no file, or one that is not ours to judge.
        return False
    return str(project.get("name", "")).replace("-", "_").lower() == "nsa_lab"
