"""`evaluation.json`, `ruler.json` and `conversion.json` of a run: the results of `nsa_lab.evaluate`.

Plain JSON; does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import compute_digest, read_json, warn_once, write_json

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
    "first_value",
    "new_words",
    "new_sentences",
    "control_form",
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
CONVERSION = "conversion.json"
RULER, RULER_UNFINISHED = "ruler.json", "ruler.unfinished.json"
VERSION = 1
DIGEST = "digest"
# 0.975 quantile of the standard normal distribution.
Z_95 = NormalDist().inv_cdf(0.975)


class PartialEvaluation:
    """Results of an unfinished evaluation, stored in the run directory so that an interrupted evaluation can resume.

    `request`: the evaluated tasks and their settings, as plain JSON. Stored results of a different request are dropped.
    `file`: name of the file.
    """

    def __init__(self, run_dir: Path, request: dict[str, Any], file: str = UNFINISHED) -> None:
        self._path, self._request = run_dir / file, request
        stored = read_json(self._path)
        found = stored.get("found") if stored.get("asked") == request else None
        self._results: dict[str, Any] = found if isinstance(found, dict) else {}
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


def write_evaluation(run_dir: Path, evaluation: dict[str, Any], name: str = EVALUATION) -> dict[str, Any]:
    """Replace `evaluation.json`, `ruler.json` or `conversion.json` of a run.

    Return its content: `evaluation` with a digest of itself.
    """
    content = json.loads(json.dumps(evaluation))
    content[DIGEST] = compute_digest(content)
    write_json(run_dir / name, content)
    return content


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """Return the run's evaluation; None if it is missing, damaged, or of another run or format version.

    A file that is ignored is logged with the reason.
    """
    return _read_record(run_dir, EVALUATION)


def read_ruler(run_dir: Path) -> dict[str, Any] | None:
    """Return the run's results of RULER's tasks; None as in `read_evaluation`."""
    return _read_record(run_dir, RULER)


def read_conversion(run_dir: Path) -> dict[str, Any] | None:
    """Return the losses and the attention mass of a converted run; None as in `read_evaluation`."""
    return _read_record(run_dir, CONVERSION)


def _read_record(run_dir: Path, name: str) -> dict[str, Any] | None:
    path = run_dir / name
    record = read_json(path, unique=True)
    if not record:
        return None
    if problem := _find_problem(record, name) or _find_other_run(record, run_dir):
        warn_once(f"{path}: ignored ({problem}); restore the file, or run nsa-lab evaluate again")
        return None
    return record


def _find_problem(record: dict[str, Any], name: str) -> str | None:
    if record.get("v") != VERSION:
        return f"v: expected version {VERSION} of the format, got {record.get('v')!r:.40}"
    # Older versions wrote none.
    if DIGEST in record and record[DIGEST] != compute_digest(record):
        return f"{DIGEST}: does not match the file, which was changed after it was written"
    # Imported here, because every command imports this module for its names of tasks.
    from nsa_lab.runs.evaluation_schema import ConversionRecord, EvaluationRecord, RulerRecord, find_problem

    return find_problem(record, {CONVERSION: ConversionRecord, RULER: RulerRecord}.get(name, EvaluationRecord))


def _find_other_run(record: dict[str, Any], run_dir: Path) -> str | None:
    """Return whose record this is, if it is of another run than the folder's status. A packaged model has no status."""
    run = directory.read_status(run_dir).get("run", record["run"])
    return None if record["run"] == run else f"it is of another run: {record['run']!r:.100}"


def find_file_problem(run_dir: Path, name: str) -> str | None:
    """Return the problem of one of these files; None if it is valid, missing, or of a newer version."""
    if not (run_dir / name).exists():
        return None
    record = read_json(run_dir / name, unique=True)
    version = record.get("v")
    if type(version) is int and version > VERSION:
        return None
    if not record:
        return "expected a JSON object with results"
    return _find_problem(record, name) or _find_other_run(record, run_dir)


def get_depth_counts(cell: dict[str, Any]) -> tuple[int, int] | None:
    """Return (number of facts found, number of facts) at the depth of a cell of `retrieval`.

    None if a sequence has several answers and an older version of the evaluation did not count the first one separately.
    """
    if "right_at_depth" in cell:
        return cell["right_at_depth"], cell["sequences"]
    return (cell["right"], cell["answers"]) if cell["answers"] == cell["sequences"] else None


def compute_wilson_interval(n_correct: float, n_total: int) -> tuple[float, float]:
    """Return the 95% confidence interval of the proportion n_correct / n_total (Wilson 1927).

    n_correct: also the sum of `n_total` shares between 0 and 1, whose interval is at most as wide.

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
