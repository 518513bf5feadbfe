"""Where the project lies on this machine."""

from __future__ import annotations

import tomllib
from pathlib import Path


def find_project_root() -> Path | None:
    """The folder that relative paths of a configuration, `params/` and `outputs/` are looked for in.

    The nearest folder above the working directory, or above this package, whose pyproject.toml is this project's; None for
    an installed package that is used elsewhere.
    """
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if _is_this_project(folder / "pyproject.toml"):
                return folder
    return None


def _is_this_project(pyproject: Path) -> bool:
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        # A folder above ours without such a file, or with one that is not ours to judge.
        return False
    return str(project.get("name", "")).replace("-", "_").lower() == "nsa_lab"
