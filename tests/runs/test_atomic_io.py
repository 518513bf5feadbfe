"""A file that another process reads is replaced whole, or left as it was."""

from __future__ import annotations

import ast
import json
import os
import threading
from pathlib import Path

import pytest

from nsa_lab.runs.atomic_io import write_json, write_text

PACKAGE = Path(__file__).parents[2] / "nsa_lab"
# Nobody can be reading these yet: a run directory that is built aside, and a folder's first files.
BUILT_ASIDE = {"runs/directory.py"}
# What `--json FILE` names is the user's own file, read when the command is over.
ASKED_FOR = "bench/"


def test_a_reader_sees_one_version_or_the_other(tmp_path: Path) -> None:
    path, seen, over = tmp_path / "status.json", set(), threading.Event()
    versions = ["a" * 200_000, "b" * 300_000]
    write_json(path, versions[0])

    def write() -> None:
        for turn in range(40):
            write_json(path, versions[turn % 2])
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        seen.add(json.loads(path.read_text(encoding="utf-8")))
    writer.join()
    assert seen <= set(versions)
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(TypeError):
        write_json(path, {"not": object()})
    assert path.read_text() == "old"


def test_nothing_else_writes_a_file_in_place() -> None:
    """`write_text` and `write_bytes` of a path truncate first; a reader then sees an empty or half a file."""
    places = []
    for source in PACKAGE.rglob("*.py"):
        place = source.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if named and node.func.attr in ("write_text", "write_bytes") and not place.startswith(ASKED_FOR):
                places.append(place)
    assert set(places) <= BUILT_ASIDE, places
