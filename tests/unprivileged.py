"""Run commands as a user whom permissions stop: root without its capabilities to ignore them, else this user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

CAPABILITIES = "-dac_override,-dac_read_search,-fowner,-kill"
NOBODY = 65534


def run_cli(
    *arguments: object, cwd: Path, path: str | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run `nsa-lab` with these arguments and return its result. `path`: value of PATH."""
    return run_python("-m", "nsa_lab", *arguments, cwd=cwd, environment={"PATH": path} if path else {}, timeout=timeout)


def run_python(
    *arguments: object, cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    if not os.geteuid():
        if not (setpriv := shutil.which("setpriv")):
            pytest.skip("root cannot drop its capabilities: setpriv is not installed")
        command = [setpriv, "--bounding-set", CAPABILITIES, "--inh-caps", CAPABILITIES, *command]
    variables = {**os.environ, "COLUMNS": "300", "PYTHONPATH": str(Path(__file__).parents[1]), **(environment or {})}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=variables,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def make_private(path: Path) -> Path:
    """Make a file or folder unreadable to `run_cli`: it belongs to another user, or nobody may read it."""
    path.chmod(0o700 if path.is_dir() else 0o600)
    if os.geteuid():
        path.chmod(0)
    else:
        os.chown(path, NOBODY, NOBODY)
    return path
