"""Verdicts on the steps: each is there once, and the checkpoints that were due are there.

Which steps must have been logged is written down here independently of the trainer.
"""

from __future__ import annotations

from nsa_lab.health.record import by_attempt, got_over, if_told, owed
from nsa_lab.health.verdict import Limits, Verdict, names_in, one_line
from nsa_lab.runs.checkpoints import folder_of, path_of, verify
from nsa_lab.runs.checkpoints import steps as steps_on_disk
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import Attempt, History


def expected_log_steps(history: History) -> set[int]:
    """The steps that the run must have written a `step` event for."""
    regular = owed(history, lambda train: train.log_every) | owed(history, lambda train: train.stats_every)
    train = history.config.train
    return regular | {step for step in (*train.first_steps, train.steps) if step <= history.reached}


def steps_counted_once(history: History, limits: Limits) -> Verdict:
    """No step lost, none doubled, and tokens that fit the steps, over all attempts."""
    logged = history.current("step")
    seen = [event["step"] for event in logged]
    lost = sorted(expected_log_steps(history) - set(seen))
    doubled = sorted({step for step in seen if seen.count(step) > 1}) if len(set(seen)) < len(seen) else []
    tokens_by = history.config.train.tokens_by
    miscounted = [event["step"] for event in logged if event.get("tokens") != tokens_by(event["step"])]
    story = _story(history.attempts())
    if not logged and not lost:
        return Verdict("every step once", None, 0, 0, "no step was logged yet")
    for what, which in (("lost", lost), ("doubled", doubled), ("counted with wrong tokens", miscounted)):
        if which:
            shown = ", ".join(f"{step:,}" for step in which[:5]) + (" …" if len(which) > 5 else "")
            return Verdict("every step once", False, len(which), 0, f"steps {what}: {shown}; {story}")
    return if_told(history, Verdict("every step once", True, 0, 0, f"none lost, none doubled; {story}"))


def _story(attempts: list[Attempt]) -> str:
    if len(attempts) <= 1:
        return "one attempt"
    parts = [f"attempt {a.number} {a.ending} at step {a.last_step:,}" for a in attempts[:-1]]
    last = attempts[-1]
    way = f"went on from step {last.from_step:,}" if last.from_step else "began anew"
    return f"{len(attempts)} attempts: {', '.join(parts)}, attempt {last.number} {way}"


def checkpoints(history: History, limits: Limits) -> Verdict:
    """Each that was due is there. One that an attempt went on from, or that lies there whole, was saved, also if the
    trainer was killed before it could say so."""
    recorded = {event["step"] for event in history.current("checkpoint")}
    failed, overcome = by_attempt(history, [e for e in history.of_kind("error") if e.get("where") == "save"])
    damaged, quarantined = by_attempt(history, [e for e in history.of_kind("guard") if e.get("action") == "quarantined"])
    resumed = {event["from_step"] for event in history.of_kind("resume") if event.get("from_step")}
    saved = resumed | _whole_on_disk(history) | recorded
    wanted = owed(history, lambda train: train.save_every)
    excused = {event["step"] for event in overcome}
    missing = sorted(step for step in wanted - saved - excused if step < history.reached or history.done)
    for problem in (*failed, *damaged):
        return Verdict("checkpoints", False, len(saved), len(wanted), _failed_save(problem))
    if missing:
        text = f"none was saved at step {missing[0]:,} ({len(missing)} missing)"
        return Verdict("checkpoints", False, len(saved), len(wanted), text)
    if not saved:
        return if_told(history, Verdict("checkpoints", None, 0, len(wanted), "none was due yet"))
    told = got_over([*overcome, *quarantined], _failed_save)
    return _on_disk(history, saved, recorded, len(wanted), told)


def _failed_save(problem: Event) -> str:
    said = problem.get("text") or f"a save failed at step {problem['step']:,}: {problem.get('message')}"
    return one_line(said)


def _whole_on_disk(history: History) -> set[int]:
    """Steps of the run, up to the one it is at, whose checkpoint lies there whole; contents are not read."""
    folder = folder_of(history.run_dir)
    there = [step for step in steps_on_disk(folder) if step <= history.reached] if folder.is_dir() else []
    return {step for step in there if not verify(path_of(folder, step), hashes=False)}


def _on_disk(history: History, saved: set[int], recorded: set[int], wanted: int, told: str) -> Verdict:
    """The record decides; files that are there must be whole. A copy without them is judged as the run itself was."""
    folder = folder_of(history.run_dir)
    if not folder.is_dir():
        text = f"{len(saved)} saved, each when it was due; their files are not kept with this copy"
        return if_told(history, Verdict("checkpoints", True, len(saved), wanted, text + told))
    pruned = {name for event in history.of_kind("checkpoint") for name in names_in(event.get("pruned"))}
    kept = sorted(step for step in recorded if path_of(folder, step).name not in pruned)
    newest = kept[-1] if kept else None
    for step in kept:
        problems = verify(path_of(folder, step), hashes=step == newest)
        if problems:
            return Verdict("checkpoints", False, len(saved), wanted, f"step {step:,}: {', '.join(problems)}")
    text = f"{len(saved)} saved, each when it was due; {len(kept)} kept, all whole"
    return if_told(history, Verdict("checkpoints", True, len(saved), wanted, text + told))
