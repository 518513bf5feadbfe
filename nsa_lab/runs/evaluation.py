"""`evaluation.json` of a run: what `nsa_lab.evaluate` found, for all who show or judge it. Plain JSON, no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_lab.runs.files import read_json, write_json

EVALUATION = "evaluation.json"
UNFINISHED = "evaluation.unfinished.json"
VERSION = 1


class Unfinished:
    """What an evaluation has found so far, kept in the run: one that is broken off goes on where it was.

    `asked` says what is evaluated and how, as plain JSON: what was found for anything else is of no use, and is dropped.
    """

    def __init__(self, run_dir: Path, asked: dict[str, Any]) -> None:
        self._path, self._asked = run_dir / UNFINISHED, asked
        kept = read_json(self._path)
        self._found: dict[str, Any] = kept["found"] if kept.get("asked") == asked else {}
        self.earlier = frozenset(self._found)

    def find(self, name: str, make: Callable[[], Any]) -> Any:
        """The part of that name: as it was found before, or made and kept. Plain JSON."""
        if name not in self._found:
            self._found[name] = make()
            write_json(self._path, {"asked": self._asked, "found": self._found})
        return self._found[name]

    def done(self) -> None:
        """All of it stands in the evaluation now."""
        self._path.unlink(missing_ok=True)


def write_evaluation(run_dir: Path, found: dict[str, Any]) -> Path:
    """Replace the run's evaluation; the file's path."""
    write_json(run_dir / EVALUATION, found)
    return run_dir / EVALUATION


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """The run's evaluation; None if it has none, a damaged one, or one in a format of another version."""
    found = read_json(run_dir / EVALUATION)
    return found if found.get("v") == VERSION else None
