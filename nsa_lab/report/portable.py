"""Takes the folders of this machine out of an executed notebook, so that it can be shared: project, Python, home.

What lies in the project is named from there, as a reader of the repository would; pictures are left alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from nsa_lab.runs import names
from nsa_lab.runs.files import write_text

CELL_FILE = re.compile(r"/[\w./-]*/ipykernel_\d+/\d+\.py")
END = r"(?![\w.-])"


def make_portable(notebook: Path) -> None:
    """Rewrite the executed notebook in place, if that changes anything."""
    before = nbformat.read(notebook, as_version=4)
    after = portable(before)
    if after != before:
        write_text(notebook, nbformat.writes(after) + "\n")


def portable(notebook: NotebookNode) -> NotebookNode:
    """A copy in which sources, text outputs and metadata name no folder of this machine."""
    copy = nbformat.from_dict(_walk(notebook, _folders()))
    assert isinstance(copy, NotebookNode), "from_dict gives a node for a mapping"
    return copy


def _folders() -> list[tuple[str, str]]:
    """Folders and what stands for each, the longest first."""
    found = {str(Path.home()): "~", sys.prefix: "<python>", sys.base_prefix: "<python>", str(names.root()): ""}
    return sorted(
        ((folder, name) for folder, name in found.items() if len(Path(folder).parts) > 1), key=lambda pair: -len(pair[0])
    )


def _walk(value: Any, folders: list[tuple[str, str]]) -> Any:
    if isinstance(value, dict):
        return {key: inner if key.startswith("image/") else _walk(inner, folders) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, folders) for inner in value]
    return _shorten(value, folders) if isinstance(value, str) else value


def _shorten(text: str, folders: list[tuple[str, str]]) -> str:
    text = CELL_FILE.sub("<cell>", text)
    for folder, name in folders:
        text = re.sub(rf"{re.escape(folder)}(?:/|{END})", lambda found, name=name: _stand_in(found[0], name), text)
    return text


def _stand_in(found: str, name: str) -> str:
    if found.endswith("/"):
        return f"{name}/" if name else ""
    return name or "."
