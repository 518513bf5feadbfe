"""Remove machine-specific folders (project, Python, home) from an executed notebook, so that it can be shared.

Paths in the project become relative to its root, as a reader of the repository would write them. Pictures are not changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from nsa_lab.runs import resolve
from nsa_lab.runs.atomic_io import write_text

CELL_FILE = re.compile(r"/[\w./-]*/ipykernel_\d+/\d+\.py")
PATH_END = r"(?![\w.-])"


def strip_paths_in_place(notebook: Path) -> None:
    """Strip the notebook file in place. Do not write it if nothing changes."""
    original = nbformat.read(notebook, as_version=4)
    stripped = strip_paths(original)
    if stripped != original:
        write_text(notebook, nbformat.writes(stripped) + "\n")


def strip_paths(notebook: NotebookNode) -> NotebookNode:
    """Return a copy whose sources, text outputs and metadata contain no folder of this machine."""
    copy = nbformat.from_dict(_strip_value(notebook, _list_replacements()))
    assert isinstance(copy, NotebookNode), "from_dict returns a NotebookNode for a mapping"
    return copy


def _list_replacements() -> list[tuple[str, str]]:
    """Return (folder, replacement) pairs, the longest folder first."""
    replacements = {str(Path.home()): "~", sys.prefix: "<python>", sys.base_prefix: "<python>", str(resolve.get_root()): ""}
    return sorted(
        ((folder, name) for folder, name in replacements.items() if len(Path(folder).parts) > 1),
        key=lambda pair: -len(pair[0]),
    )


def _strip_value(value: Any, replacements: list[tuple[str, str]]) -> Any:
    if isinstance(value, dict):
        return {
            key: inner if key.startswith("image/") else _strip_value(inner, replacements) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_strip_value(inner, replacements) for inner in value]
    return _strip_text(value, replacements) if isinstance(value, str) else value


def _strip_text(text: str, replacements: list[tuple[str, str]]) -> str:
    text = CELL_FILE.sub("<cell>", text)
    for folder, name in replacements:
        text = re.sub(
            rf"{re.escape(folder)}(?:/|{PATH_END})", lambda match, name=name: _get_replacement(match[0], name), text
        )
    return text


def _get_replacement(match: str, name: str) -> str:
    if match.endswith("/"):
        return f"{name}/" if name else ""
    return name or "."
