"""Planted faults are caught: a handful here on every run, all of them by `make mutants` (about three minutes)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS
from mutants.run import ROOT, list_stale
from mutants.suites import SUITES

SCRIPT = Path(__file__).parent / "mutants" / "run.py"
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
    assert not list_stale() and len(MUTANTS) >= 110


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
