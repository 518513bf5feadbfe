"""Every planted fault is caught: `tests/mutants.py` as it is run by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_mutant_survives() -> None:
    script = Path(__file__).with_name("mutants.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if "caught by" not in line and "passes" not in line]
    assert done.returncode == 0, "\n".join([*lines, done.stderr])
