"""Listing runs, finding the latest one, and error messages for unknown names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import write_run
from typer.testing import CliRunner

from nsa_lab.cli import app
from nsa_lab.config import ConfigError, RunConfig, UsageError
from nsa_lab.runs import directory, resolve
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


def test_something_else_in_place_of_a_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a file, an empty text, a run or a preset in place of a preset, a sweep, a run, a model or a notebook."""
    outputs, run = tmp_path / "outputs", "own-20240101T000000Z-00aa"
    outputs.mkdir()
    make_run(outputs, run, SECOND)
    (tmp_path / "params" / "sweeps").mkdir(parents=True)
    for name in ("params/small.yaml", "params/sweeps/rates.yaml", "mine.yaml", "text.txt", "no_suffix"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(resolve, "get_root", lambda: tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = RunConfig()
    finders: dict[str, Callable[[str], Path]] = {
        "preset": resolve.find_params_file,
        "sweep": resolve.find_sweep_file,
        "run": lambda name: find_run(name, outputs),
        "runs": lambda name: resolve.find_runs(name, outputs)[0],
        "model": lambda name: resolve.find_model(name, outputs),
        "notebook": lambda name: resolve.find_notebook(name, config),
    }
    given = {"": "an empty text", " ": "an empty text", "outputs": "a folder", str(tmp_path): "a folder", "~": "a folder"}
    given |= {"text.txt": r"a \.txt file", "no_suffix": "a file without a suffix", "~/text.txt": r"a \.txt file"}
    for finder in finders.values():
        for name, description in given.items():
            with pytest.raises(UsageError, match=rf"expected .*, got {description}; ") as caught:
                finder(name)
            assert "\n" not in str(caught.value)
    for name, description in ((run, "the id of a run"), ("latest", "the id of a run"), (f"outputs/{run}", "the directory")):
        for kind in ("preset", "sweep"):
            with pytest.raises(ConfigError, match=f"got {description}") as caught:
                finders[kind](name)
            assert name == "latest" or f"give {outputs / run / directory.CONFIG}" in str(caught.value)
    for kind in ("run", "model"):
        with pytest.raises(RunDirectoryError, match=r"got the name of a preset; .*nsa-lab train small"):
            finders[kind]("small")
        with pytest.raises(RunDirectoryError, match=rf"got a \.yaml file; give its folder, outputs/{run}"):
            finders[kind](f"outputs/{run}/config.yaml")
        assert finders[kind](f"~/outputs/{run}") == outputs / run
    with pytest.raises(ConfigError, match=r"did you mean mine\.yaml"):
        finders["preset"]("mine")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.yaml: expected a configuration file, got a folder"):
        resolve.load_config("folder.yaml", [])
    assert finders["preset"]("~/mine.yaml") == tmp_path / "mine.yaml"
    monkeypatch.chdir(outputs / run)
    with pytest.raises(RunDirectoryError, match="got an empty text"):  # not the working directory
        finders["model"]("")


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


def test_a_folder_that_cannot_be_listed_has_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the default folder may be missing: it has no runs yet."""
    with pytest.raises(RunDirectoryError, match=r"--outputs .*absent: expected a folder of run directories, got nothing"):
        resolve.get_readable_outputs_dir(tmp_path / "absent")
    assert get_outputs_dir(tmp_path / "absent") == tmp_path / "absent"  # a new run creates it
    monkeypatch.setattr(resolve, "get_root", lambda: tmp_path)
    assert resolve.get_readable_outputs_dir() == tmp_path / "outputs"
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 0 and "no runs in" in result.output
    for options in ([], ["--json"]):
        failed = CliRunner().invoke(app, ["status", "--outputs", str(tmp_path / "absent"), *options])
        assert isinstance(failed.exception, RunDirectoryError)
    (tmp_path / "outputs").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    for outputs in (None, tmp_path / "outputs"):
        with pytest.raises(RunDirectoryError, match="permission denied"):
            resolve.get_readable_outputs_dir(outputs)


def test_a_run_whose_config_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "copy" / directory.CONFIG).mkdir(parents=True)
    for run in (str(tmp_path / "copy"), "copy"):
        with pytest.raises(RunDirectoryError, match=r"copy/config\.yaml: expected a file, got a folder"):
            directory.check_run_dir(find_run(run, tmp_path))


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RunDirectoryError, match=r"notes\.txt: expected a folder of run directories, got a file"):
        get_outputs_dir(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "fifo")
    for get in (get_outputs_dir, resolve.get_readable_outputs_dir):
        with pytest.raises(RunDirectoryError, match="fifo: expected a folder of run directories, got a FIFO"):
            get(tmp_path / "fifo")
    with pytest.raises(RunDirectoryError, match="null: expected a folder of run directories, got a device"):
        get_outputs_dir(Path("/dev/null"))
