"""Files that other processes read are replaced atomically."""

from __future__ import annotations

import ast
import json
import os
import threading
from pathlib import Path

import pytest

from nsa_lab.runs.atomic_io import write_json, write_text

PACKAGE = Path(__file__).parents[2] / "nsa_lab"
# Nobody reads these yet: the first files of a run directory under its temporary name.
TEMPORARY = {"runs/directory.py"}
# `--json FILE` is the user's file, which is read after the command.
USER_FILES = "bench/"


def test_reader_sees_the_old_or_the_new_content(tmp_path: Path) -> None:
    path, contents, is_over = tmp_path / "status.json", set(), threading.Event()
    versions = ["a" * 200_000, "b" * 300_000]
    write_json(path, versions[0])

    def write() -> None:
        for turn in range(40):
            write_json(path, versions[turn % 2])
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_over.is_set():
        contents.add(json.loads(path.read_text(encoding="utf-8")))
    writer.join()
    assert contents <= set(versions)
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")

    def raise_disk_full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(TypeError):
        write_json(path, {"not": object()})
    assert path.read_text() == "old"


@pytest.mark.slow
def test_library_writes_no_file_in_place() -> None:
    """`Path.write_text` and `Path.write_bytes` truncate first, so a reader could see an empty or partial file."""
    files = []
    for source in PACKAGE.rglob("*.py"):
        file = source.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_method and node.func.attr in ("write_text", "write_bytes") and not file.startswith(USER_FILES):
                files.append(file)
    assert set(files) <= TEMPORARY, files
