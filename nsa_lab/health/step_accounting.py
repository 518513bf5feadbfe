"""Checks that each step is recorded exactly once and that all due checkpoints exist.

The steps that must be logged are computed here again, independently of the trainer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.config.errors import shorten
from nsa_lab.health.completeness_checks import require_known_settings
from nsa_lab.health.due_steps import DueSteps, count_tokens
from nsa_lab.health.record_checks import COMPLETED_KINDS
from nsa_lab.health.recovered_problems import format_recovered, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict, join_lines, list_names
from nsa_lab.runs import directory
from nsa_lab.runs.attempts import Attempt, shorten_middle
from nsa_lab.runs.checkpoint_files import (
    WEIGHT_FILES,
    find_problems,
    get_checkpoint_dir,
    get_checkpoint_path,
    is_checkpoint_name,
    list_steps,
    parse_step,
)
from nsa_lab.runs.directory import READ_ERRORS, describe_read_error
from nsa_lab.runs.finite_weights import describe_nonfinite, find_nonfinite_weights
from nsa_lab.runs.history import History


def compute_expected_log_steps(history: History) -> DueSteps:
    """Return the steps for which the run must have written a `step` event."""
    train = history.config.train
    extra = [step for step in (*train.first_steps, train.steps) if step <= history.last_step]
    return DueSteps(history, ("log", "statistics"), extra)


def check_steps_counted_once(history: History, limits: Limits) -> Verdict:
    """Check that no step is missing or duplicated and that all token counts match the steps, over all attempts."""
    events = history.current_events("step")
    logged = events.ints("step")
    n_missing, missing = compute_expected_log_steps(history).find_missing(logged)
    distinct, counts = np.unique(logged, return_counts=True)
    duplicated = distinct[counts > 1]
    counted = history.current_events(*COMPLETED_KINDS)
    steps = counted.ints("step")
    miscounted = np.unique(steps[counted.numbers("tokens") != count_tokens(history, steps)])
    attempts = _describe_attempts(history.attempts())
    if not events and not n_missing:
        return Verdict("every step once", None, 0, 0, "no steps logged yet")
    problems = (
        ("missing", n_missing, missing),
        ("duplicated", len(duplicated), duplicated),
        ("with wrong token counts", len(miscounted), miscounted),
    )
    for problem, count, wrong in problems:
        if count:
            listed = ", ".join(f"{step:,}" for step in wrong[:5]) + (" …" if count > 5 else "")
            return Verdict("every step once", False, count, 0, f"steps {problem}: {listed}; {attempts}")
    return require_known_settings(
        history, Verdict("every step once", True, 0, 0, f"none missing, none duplicated; {attempts}")
    )


def _describe_attempts(attempts: list[Attempt]) -> str:
    if len(attempts) <= 1:
        return "one attempt"
    parts = shorten_middle([f"attempt {a.number} {a.outcome} at step {a.last_step:,}" for a in attempts[:-1]])
    last = attempts[-1]
    start = f"resumed at step {last.from_step:,}" if last.from_step else "started again"
    return f"{len(attempts)} attempts: {', '.join(parts)}, attempt {last.number} {start}"


def check_checkpoints(history: History, limits: Limits) -> Verdict:
    """Check that every due checkpoint was saved and that existing files are intact.

    A checkpoint that an attempt resumed from, or that is intact on disk, counts as saved even if the trainer was killed
    before it recorded the save.
    """
    recorded = {*history.current_events("checkpoint").ints("step").tolist()}
    failed, recovered = split_by_attempt(history, [e for e in history.events_of_kind("error") if e.get("where") == "save"])
    damaged, quarantined = split_by_attempt(
        history, [e for e in history.events_of_kind("guard") if e.get("action") == "quarantined"]
    )
    resumed = {event["from_step"] for event in history.events_of_kind("resume") if event.get("from_step")}
    saved = resumed | _list_intact_steps(history) | recorded
    # A save at the current step may be in progress.
    excused = {event["step"] for event in recovered} | (set() if history.is_done else {history.last_step})
    due = DueSteps(history, ("save",))
    n_missing, missing = due.find_missing([*saved, *excused])
    for problem in (*failed, *damaged):
        return Verdict("checkpoints", False, len(saved), len(due), _describe_failed_save(problem))
    if n_missing:
        text = f"none saved at step {missing[0]:,} ({n_missing} missing)"
        return Verdict("checkpoints", False, len(saved), len(due), text)
    if problem := _find_wrong_folder(history) or _find_wrong_removal(history):
        return Verdict("checkpoints", False, len(saved), len(due), problem)
    if not saved:
        return require_known_settings(history, Verdict("checkpoints", None, 0, len(due), "none due yet"))
    suffix = format_recovered([*recovered, *quarantined], _describe_failed_save)
    return _check_files(history, saved, recorded, len(due), suffix)


def _find_wrong_folder(history: History) -> str | None:
    """Return a text on a save in the folder of another step; None if there is none."""
    for event in history.events_of_kind("checkpoint"):
        path = get_checkpoint_path(Path(directory.CHECKPOINTS), event["step"]).as_posix()
        if event.get("path") not in (None, path):
            return f"step {event['step']:,} was saved as {shorten(event['path'])}, expected {path}"
    return None


def _find_wrong_removal(history: History) -> str | None:
    """Return a text on a removed checkpoint that `train.keep_last` or `train.keep_every` keeps; None if there is none.

    A checkpoint whose save was not recorded, because the trainer was killed, exists if an attempt resumed from it.
    """
    existing: list[int] = []  # ascending
    for event in history.events.of_kind("checkpoint", "guard", "resume"):
        if event["kind"] == "guard":
            _discard(existing, event.get("checkpoint_step", -1))
            continue
        added = event["step"] if event["kind"] == "checkpoint" else event.get("from_step") or 0
        _discard(existing, added)
        insort(existing, added)
        config = history.config_of_attempt(event["attempt"])
        for name in list_names(event.get("pruned")):
            if not is_checkpoint_name(name):
                return f"the save of step {event['step']:,} removed {shorten(name)}, which is no checkpoint"
            removed = parse_step(Path(name))
            newer = len(existing) - bisect_right(existing, removed)
            if config and newer < config.train.keep_last:
                text = f"the save of step {event['step']:,} removed step {removed:,} with {newer} newer checkpoints"
                return f"{text}, expected at least train.keep_last = {config.train.keep_last}"
            if config and config.train.keep_every and removed % config.train.keep_every == 0:
                text = f"the save of step {event['step']:,} removed step {removed:,}"
                return f"{text}, which train.keep_every = {config.train.keep_every:,} keeps"
            _discard(existing, removed)
    return None


def _discard(ascending: list[int], value: int) -> None:
    """Remove a value from an ascending list of distinct ones, if it is there."""
    index = bisect_left(ascending, value)
    if ascending[index : index + 1] == [value]:
        del ascending[index]


def _describe_failed_save(problem: Any) -> str:
    text = problem.get("text") or f"a save failed at step {problem['step']:,}: {problem.get('message')}"
    return join_lines(text)


def _list_intact_steps(history: History) -> set[int]:
    """Return the completed steps with an intact checkpoint on disk. Only sizes are compared, contents are not read."""
    folder = get_checkpoint_dir(history.run_dir)
    steps = [step for step in list_steps(folder) if step <= history.last_step] if folder.is_dir() else []
    return {step for step in steps if not find_problems(get_checkpoint_path(folder, step), check_hashes=False)}


def _check_files(history: History, saved: set[int], recorded: set[int], n_due: int, suffix: str) -> Verdict:
    """Check the recorded checkpoints that should still exist, and all others that do.

    A copy without checkpoint files is judged by its record.
    """
    folder = get_checkpoint_dir(history.run_dir)
    if not folder.is_dir():
        text = f"{len(saved)} saved, none missing; this copy does not contain their files"
        return require_known_settings(history, Verdict("checkpoints", True, len(saved), n_due, text + suffix))
    pruned = {name for event in history.events_of_kind("checkpoint") for name in list_names(event.get("pruned"))}
    retained = sorted(step for step in recorded if get_checkpoint_path(folder, step).name not in pruned)
    newest = retained[-1] if retained else None
    # Others are saves that a killed trainer did not record, and copies.
    for step in sorted({*retained, *list_steps(folder)}):
        path = get_checkpoint_path(folder, step)
        problems = find_problems(path, check_hashes=step == newest)
        if not problems and step == newest:
            problems = _find_weight_problems(path)
        if problems:
            return Verdict("checkpoints", False, len(saved), n_due, f"step {step:,}: {', '.join(problems)}")
    text = f"{len(saved)} saved, none missing; {len(retained)} kept, all intact"
    return require_known_settings(history, Verdict("checkpoints", True, len(saved), n_due, text + suffix))


def _find_weight_problems(checkpoint: Path) -> list[str]:
    """Return the problem of weights that are not finite, or that cannot be read."""
    weights = next(path for name in WEIGHT_FILES if (path := checkpoint / name).is_file())
    try:
        problem = (find_nonfinite_weights if weights.name == WEIGHT_FILES[0] else _find_nonfinite_shards)(weights)
    except (RuntimeError, *READ_ERRORS) as error:  # RuntimeError: a shard
        problem = f"{weights.name} cannot be read ({describe_read_error(error)})"
    return [problem] if problem else []


def _find_nonfinite_shards(index: Path) -> str | None:
    """Return the problem of the first of the sharded weights with NaN or infinite values; None without one."""
    from nsa_lab.model import sharded_files  # imports torch; only sharded runs need it

    tensors = sharded_files.iterate_tensors(index.parent, (sharded_files.WEIGHTS,))
    problems = (describe_nonfinite(name.partition(".")[2], tensor) for name, tensor in tensors)
    return next(filter(None, problems), None)
