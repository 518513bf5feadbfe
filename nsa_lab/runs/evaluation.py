"""`evaluation.json` of a run: what `nsa_lab.evaluate` found, for all who show or judge it. Plain JSON, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_lab.runs.files import read_json, write_json

EVALUATION = "evaluation.json"
VERSION = 1


def write_evaluation(run_dir: Path, found: dict[str, Any]) -> Path:
    """Replace the run's evaluation; the file's path."""
    write_json(run_dir / EVALUATION, found)
    return run_dir / EVALUATION


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """The run's evaluation; None if it has none, a damaged one, or one in a format of another version."""
    found = read_json(run_dir / EVALUATION)
    return found if found.get("v") == VERSION else None
