"""Archived runs are found by pattern and unpacked once."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from nsa_lab.runs import resolve
from nsa_lab.workbook import evaluated_runs

RUNS = ("long-20260101T000000Z-aaaa", "long-20260102T000000Z-bbbb", "long_dense-20260101T000000Z-cccc")
FILES = {"events.jsonl": b"{}\n", "config.yaml": b"name: long\n"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout whose archive has three runs, with a fourth in outputs/."""
    archive = tmp_path / evaluated_runs.ARCHIVE
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:xz") as members:
        for run in RUNS:
            for name, content in {**FILES, "../outside": b"x"}.items():
                member = tarfile.TarInfo(f"{run}/{name}")
                member.size = len(content)
                members.addfile(member, io.BytesIO(content))
    place = evaluated_runs.ARCHIVE.as_posix()
    entries = {run: {"place": place} for run in RUNS} | {"long-20260103T000000Z-dddd": {"place": "outputs"}}
    archive.with_name("runs.json").write_text(json.dumps(entries))
    monkeypatch.setattr(resolve, "get_root", lambda: tmp_path)
    return tmp_path


def test_runs_are_found_by_pattern_or_beginning_and_unpacked(project: Path) -> None:
    folder = project / evaluated_runs.UNPACKED
    assert evaluated_runs.find_archived_runs("long-*") == [folder / RUNS[0], folder / RUNS[1]]
    assert sorted(path.name for path in folder.iterdir()) == sorted(RUNS[:2]), "only the runs that match"
    for run in RUNS[:2]:
        assert {path.name: path.read_bytes() for path in (folder / run).iterdir()} == FILES
    assert not list(project.rglob("outside"))
    assert evaluated_runs.find_archived_runs("long_dense") == [folder / RUNS[2]]
    assert evaluated_runs.find_archived_runs("other-*") == []


def test_unpacked_runs_are_not_read_from_the_archive_again(project: Path) -> None:
    first = evaluated_runs.find_archived_runs("long-*")
    (project / evaluated_runs.ARCHIVE).write_bytes(b"not an archive")
    assert evaluated_runs.find_archived_runs("long-*") == first


def test_interrupted_unpacking_is_repeated(project: Path) -> None:
    """The configuration is written last, so a directory without one is incomplete."""
    partial = project / evaluated_runs.UNPACKED / RUNS[0]
    partial.mkdir(parents=True)
    (partial / "events.jsonl").write_bytes(b"half")
    evaluated_runs.find_archived_runs(RUNS[0])
    assert (partial / "events.jsonl").read_bytes() == FILES["events.jsonl"]


def test_without_an_archive_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "get_root", lambda: tmp_path)
    assert evaluated_runs.find_archived_runs("*") == []
