"""Verdicts on the steps: each is there once, and the checkpoints that were due are there.

Which steps must have been logged is written down here independently of the trainer.
"""

from __future__ import annotations

from nsa_lab.health.log_integrity import format_recovered, get_due_steps, require_known_settings, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict, join_lines, list_names
from nsa_lab.runs.checkpoint_files import find_problems, get_checkpoint_dir, get_checkpoint_path
from nsa_lab.runs.checkpoint_files import list_steps as steps_on_disk
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import Attempt, History


def compute_expected_log_steps(history: History) -> set[int]:
    """The steps that the run must have written a `step` event for."""
    regular = get_due_steps(history, lambda train: train.log_every) | get_due_steps(
        history, lambda train: train.stats_every
    )
    train = history.config.train
    return regular | {step for step in (*train.first_steps, train.steps) if step <= history.last_step}


def check_steps_counted_once(history: History, limits: Limits) -> Verdict:
    """No step lost, none doubled, and tokens that fit the steps, over all attempts."""
    logged = history.current_events("step")
    seen = [event["step"] for event in logged]
    lost = sorted(compute_expected_log_steps(history) - set(seen))
    doubled = sorted({step for step in seen if seen.count(step) > 1}) if len(set(seen)) < len(seen) else []
    tokens_by = history.config.train.tokens_until
    miscounted = [event["step"] for event in logged if event.get("tokens") != tokens_by(event["step"])]
    story = _describe_attempts(history.attempts())
    if not logged and not lost:
        return Verdict("every step once", None, 0, 0, "no step was logged yet")
    for what, which in (("lost", lost), ("doubled", doubled), ("counted with wrong tokens", miscounted)):
        if which:
            shown = ", ".join(f"{step:,}" for step in which[:5]) + (" …" if len(which) > 5 else "")
            return Verdict("every step once", False, len(which), 0, f"steps {what}: {shown}; {story}")
    return require_known_settings(history, Verdict("every step once", True, 0, 0, f"none lost, none doubled; {story}"))


def _describe_attempts(attempts: list[Attempt]) -> str:
    if len(attempts) <= 1:
        return "one attempt"
    parts = [f"attempt {a.number} {a.outcome} at step {a.last_step:,}" for a in attempts[:-1]]
    last = attempts[-1]
    way = f"went on from step {last.from_step:,}" if last.from_step else "began anew"
    return f"{len(attempts)} attempts: {', '.join(parts)}, attempt {last.number} {way}"


def check_checkpoints(history: History, limits: Limits) -> Verdict:
    """Each that was due is there. One that an attempt went on from, or that lies there whole, was saved, also if the
    trainer was killed before it could say so."""
    recorded = {event["step"] for event in history.current_events("checkpoint")}
    failed, overcome = split_by_attempt(history, [e for e in history.events_of_kind("error") if e.get("where") == "save"])
    damaged, quarantined = split_by_attempt(
        history, [e for e in history.events_of_kind("guard") if e.get("action") == "quarantined"]
    )
    resumed = {event["from_step"] for event in history.events_of_kind("resume") if event.get("from_step")}
    saved = resumed | _list_intact_steps(history) | recorded
    wanted = get_due_steps(history, lambda train: train.save_every)
    excused = {event["step"] for event in overcome}
    missing = sorted(step for step in wanted - saved - excused if step < history.last_step or history.is_done)
    for problem in (*failed, *damaged):
        return Verdict("checkpoints", False, len(saved), len(wanted), _describe_failed_save(problem))
    if missing:
        text = f"none was saved at step {missing[0]:,} ({len(missing)} missing)"
        return Verdict("checkpoints", False, len(saved), len(wanted), text)
    if not saved:
        return require_known_settings(history, Verdict("checkpoints", None, 0, len(wanted), "none was due yet"))
    told = format_recovered([*overcome, *quarantined], _describe_failed_save)
    return _check_files(history, saved, recorded, len(wanted), told)


def _describe_failed_save(problem: Event) -> str:
    said = problem.get("text") or f"a save failed at step {problem['step']:,}: {problem.get('message')}"
    return join_lines(said)


def _list_intact_steps(history: History) -> set[int]:
    """Steps of the run, up to the one it is at, whose checkpoint lies there whole; contents are not read."""
    folder = get_checkpoint_dir(history.run_dir)
    there = [step for step in steps_on_disk(folder) if step <= history.last_step] if folder.is_dir() else []
    return {step for step in there if not find_problems(get_checkpoint_path(folder, step), check_hashes=False)}


def _check_files(history: History, saved: set[int], recorded: set[int], wanted: int, told: str) -> Verdict:
    """The record decides; files that are there must be whole. A copy without them is judged as the run itself was."""
    folder = get_checkpoint_dir(history.run_dir)
    if not folder.is_dir():
        text = f"{len(saved)} saved, each when it was due; their files are not kept with this copy"
        return require_known_settings(history, Verdict("checkpoints", True, len(saved), wanted, text + told))
    pruned = {name for event in history.events_of_kind("checkpoint") for name in list_names(event.get("pruned"))}
    kept = sorted(step for step in recorded if get_checkpoint_path(folder, step).name not in pruned)
    newest = kept[-1] if kept else None
    for step in kept:
        problems = find_problems(get_checkpoint_path(folder, step), check_hashes=step == newest)
        if problems:
            return Verdict("checkpoints", False, len(saved), wanted, f"step {step:,}: {', '.join(problems)}")
    text = f"{len(saved)} saved, each when it was due; {len(kept)} kept, all whole"
    return require_known_settings(history, Verdict("checkpoints", True, len(saved), wanted, text + told))
