"""Listing runs, finding the latest one, and error messages for unknown names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_run import write_run

from nsa_lab.cli import app
from nsa_lab.runs import directory
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.resolve import find_run, get_outputs_dir, list_own_run_dirs, list_run_dirs

SECOND = 1_700_000_000  # 14 November 2023, 22:13:20 UTC


def make_run(outputs: Path, name: str, modified: float) -> None:
    (outputs / name).mkdir()
    config = outputs / name / directory.CONFIG
    config.touch()
    os.utime(config, (modified, modified))


def test_runs_are_ordered_by_the_time_in_their_id(tmp_path: Path) -> None:
    """A clone writes all files at once, so the id decides. File times decide within a second and for other folder names."""
    make_run(tmp_path, "smoke-20240101T000000Z-00aa", SECOND + 1)
    make_run(tmp_path, "a_sweep.dense.s0-20231231T235959Z-ffff", SECOND + 9)
    make_run(tmp_path, "smoke-20240101T000000Z-ff00", SECOND)
    make_run(tmp_path, "by_hand", SECOND)
    make_run(tmp_path, "from_1700-20231114T221321Z-0000", SECOND + 5)
    make_run(tmp_path, "by_hand_too", SECOND + 2)
    assert [run.name for run in list_run_dirs(tmp_path)] == [
        "by_hand",
        "from_1700-20231114T221321Z-0000",
        "by_hand_too",
        "a_sweep.dense.s0-20231231T235959Z-ffff",
        "smoke-20240101T000000Z-ff00",
        "smoke-20240101T000000Z-00aa",
    ]
    assert find_run("latest", tmp_path).name == "smoke-20240101T000000Z-00aa"


@pytest.mark.parametrize(("runs", "suffix"), [(6, ""), (9, " and 3 more")])
def test_error_lists_the_last_runs_and_the_number_of_others(runs: int, suffix: str, tmp_path: Path) -> None:
    names = [f"smoke-20240101T00000{n}Z-00aa" for n in range(runs)]
    for n, name in enumerate(names):
        make_run(tmp_path, name, SECOND + n)
    last = ", ".join(names[-6:]) + suffix
    with pytest.raises(RunDirectoryError, match=f"no such run in .*; available: {last}$"):
        find_run("qqq", tmp_path)
    with pytest.raises(RunDirectoryError, match=f"matches {runs} runs; give one of: {last}$"):
        find_run("smoke", tmp_path)


def test_recorded_runs_are_never_the_latest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`latest` and `nsa-lab status` are about the user's runs; recorded ones are counted, and listed by --recorded."""
    own, recorded = write_run(tmp_path, name="own"), write_run(tmp_path, name="archived")
    (recorded / "RECORDED").touch()
    assert find_run("latest", tmp_path) == own and find_run("archived", tmp_path) == recorded
    assert list_run_dirs(tmp_path) != list_own_run_dirs(tmp_path) == [own]
    for arguments, listed in (([], own), (["--recorded"], recorded)):
        app(["status", "--outputs", str(tmp_path), *arguments], standalone_mode=False)
        printed = capsys.readouterr().out
        names = [line.split()[0] for line in printed.splitlines() if line.startswith(("own-", "archived-"))]
        assert names == [listed.name]
    (own / "RECORDED").touch()
    with pytest.raises(RunDirectoryError, match="no runs yet"):
        find_run("latest", tmp_path)


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RunDirectoryError, match=r"notes\.txt: expected a folder of run directories, got a file"):
        get_outputs_dir(tmp_path / "notes.txt")
