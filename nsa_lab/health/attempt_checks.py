"""Checks that all attempts of a run trained one model with one code on one text, and were evaluated alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.config.errors import shorten
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.checkpoint_files import get_checkpoint_path
from nsa_lab.runs.event_schema import AttemptEvent
from nsa_lab.runs.history import History, find_stages

# Largest difference of losses before and after a resume: relative, of steps that both attempts record (0.0017 measured),
# and factor between medians of readings of one stage (1.05 measured).
REPEATED_LOSS, RESUMED_LOSS = 0.1, 1.5
N_BEFORE, N_AFTER = 8, 4  # most readings of these medians; half of them suffice
# Packages whose version changes results.
COMPARED_PACKAGES = ("torch", "triton", "flash-attn")


def check_attempts_agree(history: History, limits: Limits) -> Verdict:
    """Check that every later attempt has the code, the text, the model and the probe of the first one.

    Another version of a package is a warning: the trainer has compared the probe.
    """
    name = "attempts agree"
    if not history.first_events:
        return Verdict(name, None, None, 0, "no attempt has started")
    first, *others = history.first_events
    numbers = np.unique(history.events.ints("attempt"))
    if (is_other := numbers != np.arange(1, len(numbers) + 1)).any():
        index = int(is_other.argmax())
        text = (
            f"attempt {index + 1} is missing, but attempt {numbers[index]} is recorded: a new attempt has the next number"
        )
        return Verdict(name, False, 1, 0, text)
    if not others:
        return Verdict(name, True, 0, 0, "one attempt")
    for other in others:
        for subject, get_value in FACTS.items():
            values = get_value(first), get_value(other)
            if values[0] is not None and values[1] is None:
                text = f"attempt {other['attempt']} does not record its {subject}, but attempt {first['attempt']} does"
                return Verdict(name, False, 1, 0, text)
            if None not in values and values[0] != values[1]:
                shown = " and ".join(str(value)[:16] for value in values)
                text = f"attempts {first['attempt']} and {other['attempt']} differ in {subject}: {shown}"
                return Verdict(name, False, 1, 0, text)
        folder, from_step = other.get("checkpoint"), other.get("from_step") or 0
        if folder is not None and folder != get_checkpoint_path(Path(), from_step).name:
            text = f"attempt {other['attempt']} continues at step {from_step:,}, but from {shorten(folder)}"
            return Verdict(name, False, 1, 0, text)
        difference, limit = other.get("probe_difference"), limits.probe_difference
        if difference is not None and difference > limit:
            text = f"attempt {other['attempt']} computes other logits for the probe: {difference:.3g} of the largest"
            return Verdict(name, False, difference, limit, text)
    if problem := _find_other_losses(history):
        return Verdict(name, False, *problem)
    versions = [_get_versions(event) for event in history.first_events]
    changed = {package for own in versions for package in own if own[package] != versions[0].get(package, own[package])}
    text = f"{len(others) + 1} attempts with the same code, text and model"
    notes = [f"other versions of {', '.join(sorted(changed))}"] if changed else []
    if len({json.dumps(_get_backends(event), sort_keys=True) for event in history.first_events}) > 1:
        notes.append("other backends")
    if notes:
        return Verdict(name, False, len(notes), 0, f"{text}, but {' and '.join(notes)}").to_warning()
    return Verdict(name, True, 0, 0, text)


FACTS: dict[str, Any] = {
    "code": lambda event: (event.get("code") or {}).get("source"),
    "text": lambda event: event.get("data_identity") or None,
    "parameters": lambda event: event.get("params"),
    "steps": lambda event: event.get("steps"),
    "work per token": lambda event: event.get("flops_per_token"),
}
"""What two attempts must share -> its value in their first events; None if it was not recorded."""


def _find_other_losses(history: History) -> tuple[float, float, str] | None:
    """Return value, limit and text if an attempt does not continue the losses of the previous one; else None."""
    events = history.events_of_kind("step")
    losses = events.numbers("loss")
    valid = np.flatnonzero(losses > 0)
    order = valid[np.argsort(events.ints("attempt")[valid], kind="stable")]
    attempts, steps, losses = events.ints("attempt")[order], events.ints("step")[order], losses[order]
    stages = find_stages(steps, history.config.train)
    from_steps = {event["attempt"]: event.get("from_step") or 0 for event in history.first_events}
    numbers = sorted(from_steps)
    bounds = np.searchsorted(attempts, [*numbers, numbers[-1] + 1])
    for index, attempt in enumerate(numbers[1:], 1):
        previous, own = (slice(*bounds[first : first + 2]) for first in (index - 1, index))
        place = f"attempt {attempt}, resumed at step {from_steps[attempt]:,},"
        _, old, new = np.intersect1d(steps[previous], steps[own], return_indices=True)
        if len(old):
            ratio = float(np.median(losses[own][new] / losses[previous][old]))
            if not 1 / (1 + REPEATED_LOSS) <= ratio <= 1 + REPEATED_LOSS:
                text = (
                    f"{place} has {ratio:.3g} times the loss that attempt {numbers[index - 1]} recorded at the same steps"
                )
                return ratio, 1 + REPEATED_LOSS, text
        is_before = steps[previous] <= from_steps[attempt]
        before, after = losses[previous][is_before][-N_BEFORE:], losses[own][:N_AFTER]
        if len(before) < N_BEFORE // 2 or len(after) < N_AFTER // 2:
            continue
        if len({*stages[previous][is_before][-N_BEFORE:], *stages[own][:N_AFTER]}) > 1:
            continue
        ratio = float(np.median(after) / np.median(before))
        if ratio > RESUMED_LOSS:
            return ratio, RESUMED_LOSS, f"{place} has {ratio:.3g} times the loss before it: other weights or other text"
    return None


def _get_versions(event: AttemptEvent) -> dict[str, Any]:
    versions = event.get("versions") or {}
    return {package: versions[package] for package in COMPARED_PACKAGES if package in versions}


def _get_backends(event: AttemptEvent) -> dict[str, Any]:
    """Return part of attention -> backend."""
    return {part: choice.get("backend") for part, choice in (event.get("backend") or {}).items()}


def check_evaluated_text(history: History, limits: Limits) -> Verdict:
    """Check that all evaluations of a stage are of the same text and the same number of windows.

    `train.eval_batches` may change when a run is resumed. Losses before and after cannot be compared, which is a warning.
    """
    name, evaluations = "evaluated text", history.evaluations
    questions = _check_questions(history, name)
    if questions and questions.ok is False:
        return questions
    recorded = evaluations.select(evaluations.has("text") | evaluations.has("windows"))
    if len(recorded) < 2:
        return questions or Verdict(name, None, None, 0, "fewer than two evaluations record their text")
    stages = find_stages(recorded.ints("step"), history.config.train)
    lengths = np.array([stage.seq_len for stage in history.config.train.plan])[stages]
    sizes = list(zip(*(recorded.values(field) for field in ("text", "windows", "seq_len")), strict=True))
    steps, attempts = recorded.ints("step"), recorded.ints("attempt")
    for index in range(len(recorded)):
        if sizes[index][2] not in (None, lengths[index]):
            text = f"sequences of {sizes[index][2]:,} tokens at step {steps[index]:,}, configured: {lengths[index]:,}"
            return Verdict(name, False, 1, 0, text)
    warning = None
    for index in range(1, len(recorded)):
        if lengths[index] == lengths[index - 1] and sizes[index] != sizes[index - 1]:
            text = f"changes at step {steps[index]:,}, so losses before and after cannot be compared"
            verdict = Verdict(name, False, 1, 0, text)
            is_setting = attempts[index] != attempts[index - 1] and sizes[index][1] != sizes[index - 1][1]
            if not is_setting:
                return verdict
            warning = verdict.to_warning()
    warning = warning or questions
    if not warning and not recorded.has("text").any():
        return Verdict(name, None, None, 0, "fewer than two evaluations record their text")
    return warning or Verdict(name, True, 0, 0, f"the same in all {len(recorded)} evaluations of a length")


def _check_questions(history: History, name: str) -> Verdict | None:
    """Return a failed check of measurements of another length than the training, or of fewer sequences; None without one.

    A newer version, which resumed the run, may measure more sequences. Then it is a warning.
    """
    warning = None
    for kind, field in (("reach", "sequences"), ("conversion", "windows")):
        before: dict[int, Any] = {}
        for event in (event for event in history.current_events(kind) if "why_not" not in event):
            step, length = event["step"], history.config.train.stage_at(event["step"]).seq_len
            if event.get("length") not in (None, length):
                text = f"{kind}: sequences of {event['length']:,} tokens at step {step:,}, configured: {length:,}"
                return Verdict(name, False, 1, 0, text)
            previous = before.setdefault(length, event)
            if previous.get(field) != event.get(field):
                text = (
                    f"{kind}: {event.get(field)} sequences at step {step:,}, {previous.get(field)} at {previous['step']:,}"
                )
                verdict = Verdict(name, False, 1, 0, text)
                if previous["attempt"] == event["attempt"]:
                    return verdict
                warning, before[length] = verdict.to_warning(), event
    return warning
