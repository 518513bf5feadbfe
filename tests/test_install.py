"""What `make` shows while it installs: one line where pip says hundreds, and pip's own last lines where it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = """#!/bin/sh
case "$*" in
  *"-r requirements.lock"*)
    for n in 1 2 3 4 5 6 7 8 9; do echo "Collecting package-$n==1 (from -r requirements.lock (line $n))"; done
    echo "ERROR: No matching distribution found for package-9" >&2
    exit {code};;
esac
"""


@pytest.fixture
def install(tmp_path: Path):
    """install(pip's exit code) -> what make printed while it installed with that pip, and how it ended."""

    def make(code: int) -> subprocess.CompletedProcess[str]:
        for name in ("Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PIP.replace("{code}", str(code)))
        python.chmod(0o755)
        # Called by make itself, the tests hand on what makes another make tell its folder.
        own = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}
        return subprocess.run(["make", ".venv/.ready"], cwd=tmp_path, capture_output=True, text=True, check=False, env=own)

    return make


def test_pip_is_quiet_while_it_succeeds(install, tmp_path: Path) -> None:
    done = install(0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [done.stdout.strip()] and done.stdout.startswith("==> installing into .venv")
    assert (tmp_path / ".venv" / ".ready").exists()
    assert "Collecting package-9" in (tmp_path / ".cache" / "install.log").read_text()


def test_what_pip_said_is_shown_where_it_fails(install, tmp_path: Path) -> None:
    done = install(1)
    assert done.returncode != 0
    assert "No matching distribution found for package-9" in done.stderr and ".cache/install.log has all" in done.stderr
    assert not (tmp_path / ".venv" / ".ready").exists(), "the next make tries again"
