"""Planted faults are caught: a handful here on every run, all of them by `make mutants` (about three minutes)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT, SUITES, source

SCRIPT = Path(__file__).with_name("mutants.py")
HANDFUL = (
    "torch: eq. 9 read",
    "torch: backward without delta",
    "reference: window of w + 1",
    "band kernel: window of w + 1",
    "gates start at zero",
    "unknown keys ignored",
    "health: a loss that rises",
    "events: a step",
)


def test_every_mutant_still_applies() -> None:
    stale = [m.name for m in MUTANTS if source(m.module).read_text(encoding="utf-8").count(m.old) != 1]
    assert not stale and len(MUTANTS) >= 110


def test_the_readme_counts_them() -> None:
    assert f"`make mutants` plants {len(MUTANTS)} faults" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_test_that_a_mutant_is_held_to_exists() -> None:
    """A case that was renamed would leave its mutants to nobody."""
    named = sorted({name for names in SUITES.values() for name in names if "::" in name})
    command = [sys.executable, "-m", "pytest", "-p", "no:nbval", "--collect-only", "-q", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_mutant_of_a_handful_survives() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *HANDFUL], capture_output=True, text=True, timeout=500)
    caught = [line for line in done.stdout.splitlines() if "caught by" in line]
    assert done.returncode == 0 and len(caught) >= len(HANDFUL), done.stdout + done.stderr
