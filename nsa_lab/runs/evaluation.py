"""`evaluation.json` of a run, which holds the results of `nsa_lab.evaluate`. Plain JSON; does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from nsa_lab.runs.atomic_io import read_json, write_json

# Names of the retrieval tasks in `nsa_lab.evaluate`, for the command line, which does not import torch to check them.
TASK_NAMES = ("needle", "multi_key", "multi_query")
NEEDLE_FORM_NAMES = (
    "five_digits",
    "twelve_digits",
    "letters",
    "hex",
    "codes",
    "other_words",
    "more_words",
    "capitals",
    "updated",
)
RULER_NAMES = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
)
EVALUATION = "evaluation.json"
UNFINISHED = "evaluation.unfinished.json"
VERSION = 1
# 0.975 quantile of the standard normal distribution.
Z_95 = NormalDist().inv_cdf(0.975)


class PartialEvaluation:
    """Results of an unfinished evaluation, stored in the run directory so that an interrupted evaluation can resume.

    `request`: the evaluated tasks and their settings, as plain JSON. Stored results of a different request are dropped.
    """

    def __init__(self, run_dir: Path, request: dict[str, Any]) -> None:
        self._path, self._request = run_dir / UNFINISHED, request
        stored = read_json(self._path)
        self._results: dict[str, Any] = stored["found"] if stored.get("asked") == request else {}
        self.resumed_names = frozenset(self._results)

    def get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the stored result `name`, or compute and store it. Results are plain JSON."""
        if name not in self._results:
            self._results[name] = compute()
            write_json(self._path, {"asked": self._request, "found": self._results})
        return self._results[name]

    def delete(self) -> None:
        """Remove the file. Call this after all results are written to the evaluation."""
        self._path.unlink(missing_ok=True)


def write_evaluation(run_dir: Path, evaluation: dict[str, Any]) -> Path:
    """Replace the run's evaluation. Return the path of the file."""
    write_json(run_dir / EVALUATION, evaluation)
    return run_dir / EVALUATION


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """Return the run's evaluation; None if it is missing, damaged or of another format version."""
    evaluation = read_json(run_dir / EVALUATION)
    return evaluation if evaluation.get("v") == VERSION else None


def get_depth_counts(cell: dict[str, Any]) -> tuple[int, int] | None:
    """Return (number of facts found, number of facts) at the depth of a cell of `retrieval`.

    None if a sequence has several answers and none belongs to the depth (a task without depths, or an older version of the
    evaluation, which did not count the first one separately).
    """
    if cell.get("right_at_depth") is not None:
        return cell["right_at_depth"], cell["sequences"]
    return (cell["right"], cell["answers"]) if cell["answers"] == cell["sequences"] else None


def compute_wilson_interval(n_correct: int, n_total: int) -> tuple[float, float]:
    """Return the 95% confidence interval of the proportion n_correct / n_total (Wilson 1927).

    Raises ValueError unless 0 <= n_correct <= n_total and n_total > 0.
    """
    if not 0 <= n_correct <= n_total or not n_total:
        raise ValueError(
            f"n_correct = {n_correct}, n_total = {n_total}: expected 0 <= n_correct <= n_total and n_total > 0"
        )
    proportion, spread = n_correct / n_total, Z_95**2 / n_total
    center, half_width = proportion + spread / 2, Z_95 * math.sqrt((proportion * (1 - proportion) + spread / 4) / n_total)
    # The bounds at proportions 0 and 1 are exact; the formula would give them only up to rounding.
    low = (center - half_width) / (1 + spread) if n_correct else 0.0
    return low, (center + half_width) / (1 + spread) if n_correct < n_total else 1.0
