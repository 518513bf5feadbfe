from pathlib import Path

import pytest

from nsa_lab.config import DataConfig, find_project_root
from nsa_lab.data import DataError
from nsa_lab.data.paths import get_cache_folder, make_paths_absolute
from nsa_lab.data.sources.local import find_files
from nsa_lab.runs import resolve


def test_the_project_above_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "nsa-lab"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(inner)
    assert find_project_root() == tmp_path
    assert resolve.get_outputs_dir() == tmp_path / "outputs"
    assert get_cache_folder() == tmp_path / ".cache" / "data"


def test_an_installed_package_uses_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nsa_lab.config.project.__file__", str(tmp_path / "site-packages" / "config.py"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert find_project_root() is None
    assert resolve.get_outputs_dir() == tmp_path / "outputs"
    assert get_cache_folder() == tmp_path / "home" / ".cache" / "nsa_lab" / "data"


def test_a_home_folder_that_is_unknown_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_lab.data.paths.find_project_root", lambda: None)
    with pytest.raises(DataError, match="~no_such_user"):
        find_files("~no_such_user/texts")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 123456)
    with pytest.raises(DataError, match="set the variable HOME"):
        get_cache_folder()


def test_an_invalid_pyproject_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("not toml [")
    monkeypatch.chdir(tmp_path)
    assert find_project_root() != tmp_path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a project with a text, and the working directory outside of it with another text."""
    project, here = tmp_path / "project", tmp_path / "here"
    for folder, text in ((project, "theirs.txt"), (here, "mine.txt"), (project, "both.txt"), (here, "both.txt")):
        folder.mkdir(exist_ok=True)
        (folder / text).write_text("text")
    monkeypatch.setattr("nsa_lab.data.paths.find_project_root", lambda: project)
    monkeypatch.chdir(here)
    return project, here


def test_a_path_found_only_in_the_working_directory_becomes_absolute(elsewhere: tuple[Path, Path]) -> None:
    """Regression: `nsa-lab run NAME -p data.path=mine.txt` outside of the project resolved the path below the project."""

    def make_absolute(path: str) -> str | None:
        return make_paths_absolute(DataConfig(source="local", path=path, tokenizer="tokens.json")).path

    _, here = elsewhere
    assert make_absolute("mine.txt") == str(here / "mine.txt") and make_absolute("m*.txt") == str(here / "m*.txt")
    for path in ("theirs.txt", "both.txt", "nowhere.txt", str(here / "mine.txt"), "x" * 300):
        assert make_absolute(path) == path, (
            "paths of the project have precedence, and missing paths stay unchanged for the error message"
        )
    (here / "tokens.json").write_text("{}")
    data = make_paths_absolute(DataConfig(tokenizer="tokens.json"))
    assert (data.path, data.tokenizer) == (None, str(here / "tokens.json"))
    (here / "byte").write_text("")
    assert make_paths_absolute(DataConfig()) == DataConfig()


def test_paths_stay_relative_inside_the_project_and_are_absolute_without_one(
    elsewhere: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, here = elsewhere
    monkeypatch.setattr("nsa_lab.data.paths.find_project_root", lambda: None)
    assert make_paths_absolute(DataConfig(source="local", path="mine.txt")).path == str(here / "mine.txt")
    monkeypatch.setattr("nsa_lab.data.paths.find_project_root", lambda: project)
    monkeypatch.chdir(project)
    assert make_paths_absolute(DataConfig(source="local", path="theirs.txt")).path == "theirs.txt"
