from pathlib import Path

import pytest

from nsa_lab.config import project_root
from nsa_lab.data.paths import cache_folder
from nsa_lab.runs import names


def test_the_project_above_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "nsa-lab"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(inner)
    assert project_root() == tmp_path
    assert names.outputs_folder() == tmp_path / "outputs"
    assert cache_folder() == tmp_path / ".cache" / "data"


def test_an_installed_package_uses_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nsa_lab.config.project.__file__", str(tmp_path / "site-packages" / "config.py"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert project_root() is None
    assert names.outputs_folder() == tmp_path / "outputs"
    assert cache_folder() == tmp_path / "home" / ".cache" / "nsa_lab" / "data"


def test_a_broken_pyproject_of_somebody_else_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("not toml [")
    monkeypatch.chdir(tmp_path)
    assert project_root() != tmp_path
