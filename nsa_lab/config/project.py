"""Location of the project folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

from nsa_lab.config.errors import has_working_dir


def find_project_root() -> Path | None:
    """Return the folder that contains `params/` and `outputs/`, and that relative paths of a configuration start from.

    It is the nearest folder above the working directory, or above this package, with the pyproject.toml of this project.
    Return None for an installed package that is used elsewhere.
    """
    starts = [Path.cwd()] if has_working_dir() else []
    for start in (*starts, Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if _is_this_project(folder / "pyproject.toml"):
                return folder
    return None


def _is_this_project(pyproject: Path) -> bool:
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        # No such file in this folder, or an unreadable one of another project.
        return False
    return str(project.get("name", "")).replace("-", "_").lower() == "nsa_lab"
