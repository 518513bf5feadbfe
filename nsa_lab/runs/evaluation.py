"""`evaluation.json` of a run: what `nsa_lab.evaluate` found, for all who show or judge it. Plain JSON, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from nsa_lab.runs.atomic_io import read_json, write_json

EVALUATION = "evaluation.json"
UNFINISHED = "evaluation.unfinished.json"
VERSION = 1
# Of the normal distribution: 95 % lie within so many deviations.
Z_95 = NormalDist().inv_cdf(0.975)


class PartialEvaluation:
    """What an evaluation has found so far, kept in the run: one that is broken off goes on where it was.

    `asked` says what is evaluated and how, as plain JSON: what was found for anything else is of no use, and is dropped.
    """

    def __init__(self, run_dir: Path, asked: dict[str, Any]) -> None:
        self._path, self._request = run_dir / UNFINISHED, asked
        kept = read_json(self._path)
        self._results: dict[str, Any] = kept["found"] if kept.get("asked") == asked else {}
        self.resumed_names = frozenset(self._results)

    def get_or_compute(self, name: str, make: Callable[[], Any]) -> Any:
        """The part of that name: as it was found before, or made and kept. Plain JSON."""
        if name not in self._results:
            self._results[name] = make()
            write_json(self._path, {"asked": self._request, "found": self._results})
        return self._results[name]

    def delete(self) -> None:
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


def get_depth_counts(cell: dict[str, Any]) -> tuple[int, int] | None:
    """Of a cell of `retrieval`: how many of the facts at its depth were found, and how many there are.

    None where a sequence has several questions and the evaluation, an earlier one, did not count the first one apart.
    """
    if "right_at_depth" in cell:
        return cell["right_at_depth"], cell["sequences"]
    return (cell["right"], cell["answers"]) if cell["answers"] == cell["sequences"] else None


def compute_wilson_interval(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of the share of right answers (Wilson 1927). Raises ValueError where none was asked."""
    if not 0 <= right <= asked or not asked:
        raise ValueError(f"right = {right} of {asked}: expected 0 <= right <= asked, and one asked at least")
    share, spread = right / asked, Z_95**2 / asked
    middle, half = share + spread / 2, Z_95 * math.sqrt((share * (1 - share) + spread / 4) / asked)
    # At 0 and at 1 the bound is that very number, but for rounding.
    low = (middle - half) / (1 + spread) if right else 0.0
    return low, (middle + half) / (1 + spread) if right < asked else 1.0
