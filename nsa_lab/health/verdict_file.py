"""`verdict.json` of a run: the results of all checks, a summary, and the digests of the record that was examined and of
what else the checks read (`record_digest`).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_lab.health import Health, examine
from nsa_lab.health.summary_sentence import describe_outcome, describe_purpose
from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import read_json, warn_once, write_text
from nsa_lab.runs.history import History, collect_facts, compute_median_speeds
from nsa_lab.runs.record_digest import compute_surroundings_digest

MAX_BYTES = 1 << 24


def to_record(history: History, health: Health) -> dict[str, Any]:
    """Return the content of `verdict.json` without its digests. Non-finite numbers are null.

    `description`: purpose of the run, from its configuration. `summary`: a sentence. `facts`: the numbers of the run's line
    in `nsa-lab status`.
    """
    facts = collect_facts(history)
    return {
        "run": health.run,
        "description": describe_purpose(history.config),
        "summary": describe_outcome(history, health.verdicts),
        "state": health.state,
        "ok": health.ok,
        "level": health.level,
        "headline": health.headline,
        **({"trial": health.trial_reason} if health.trial_reason else {}),
        "facts": {
            "step": facts.step,
            "steps": facts.steps,
            "validation_bpb": _to_json(facts.last_validation_bpb),
            "tokens_per_s": compute_median_speeds(history),
        },
        "verdicts": [{key: _to_json(value) for key, value in asdict(verdict).items()} for verdict in health.verdicts],
    }


def _to_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_verdict(run: str | Path | History, health: Health | None = None) -> Path:
    """Write the results of `examine` to `verdict.json` in the run directory. Return its path.

    `health`: the results, if they are known. They are computed again while a trainer writes to the record.
    """
    if isinstance(run, History) and run.is_alive:
        run, health = run.run_dir, None
    run_dir = run.run_dir if isinstance(run, History) else directory.check_run_dir(run)
    # Before the record is read: a digest of a later record would make these results look current.
    digests = {"digest": directory.compute_record_digest(run_dir), "surroundings": compute_surroundings_digest(run_dir)}
    history = History.read(run)
    record = {**to_record(history, health or examine(history)), **digests}
    write_text(run_dir / directory.VERDICT, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return run_dir / directory.VERDICT


def read_verdict(run: str | Path | History) -> dict[str, Any] | None:
    """Return the content of `verdict.json`; None if it is missing or damaged, or if the checks would read anything new.

    The verdict of a recorded run holds for every copy of its record, with checkpoints or without. One of an older version,
    which has no digest of the surroundings, is out of date.
    Raises OSError if the record cannot be read.
    """
    run_dir = run.run_dir if isinstance(run, History) else Path(run)
    path = run_dir / directory.VERDICT
    record = read_json(path, MAX_BYTES)
    if "digest" not in record:
        # Missing, or of an older version, whose verdicts have no digest.
        return None
    if problem := find_problem(record):
        warn_once(f"{path}: damaged and ignored ({problem})")
        return None
    if not directory.is_recorded(run_dir) and record.get("surroundings") != compute_surroundings_digest(run_dir):
        return None
    return record if record["digest"] == directory.compute_record_digest(run_dir) else None


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run", "description", "summary", "state", "level", "headline", "digest"), (str,)),
    "ok": (bool,),
    "facts": (dict,),
    "verdicts": (list,),
}
_FACT_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "steps": (int,),
    "validation_bpb": (int, float, type(None)),
    "tokens_per_s": (list,),
}
_VERDICT_TYPES: dict[str, tuple[type, ...]] = {"name": (str,), "level": (str,), "text": (str,), "ok": (bool, type(None))}


def find_problem(record: dict[str, Any]) -> str | None:
    """Return which entry of a `verdict.json` has a wrong type; None if all are valid."""
    if problem := _find_wrong_type(record, _TYPES, "") or _find_wrong_type(record["facts"], _FACT_TYPES, "facts."):
        return problem
    parts = [
        ({"tokens_per_s": speed}, {"tokens_per_s": (int, float)}, "facts.") for speed in record["facts"]["tokens_per_s"]
    ]
    parts += [(verdict, _VERDICT_TYPES, "verdicts.") for verdict in record["verdicts"]]
    return next((problem for part in parts if (problem := _find_wrong_type(*part))), None)


def _find_wrong_type(record: Any, types: dict[str, tuple[type, ...]], prefix: str) -> str | None:
    if not isinstance(record, dict):
        return f"{prefix.rstrip('.')}: expected a mapping, got {record!r:.40}"
    for name, allowed in types.items():
        value = record.get(name)
        if type(value) not in allowed or (isinstance(value, int) and abs(value) > directory.MAX_INT):
            return f"{prefix}{name}: unexpected value {value!r:.40}"
    return None
