"""Checks that nothing is missing from the record: heartbeats, evaluations, and readings of statistics.

A missing entry that was due fails the check. If nothing was due yet, the result is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nsa_lab.config import ModelConfig, RunConfig
from nsa_lab.health.due_steps import DueSteps
from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.attempts import Attempt, group_positions
from nsa_lab.runs.event_columns import NUMBER
from nsa_lab.runs.history import History, find_stages

MIN_ZERO_LOSSES = 5
# Prefixes of the fields of a `step` event that only some models have.
STATISTICS = ("gate_", "sel_", "norm_", "selection_loss", "teacher_kl")


def list_layer_statistics(model: ModelConfig) -> list[str]:
    """Return the fields of a reading of statistics that have one value per layer, for the branches that the model has."""
    names = ["grad_norm_layers"]
    if model.attention == "dense":
        return names
    if len(model.branches) > 1:  # a single branch has no gate
        names += [f"gate_share_{branch}" for branch in model.branches]
        names += ["gate_entropy", "gate_saturation", "gate_update"]
    if "sel" in model.branches:
        names += ["sel_reuse", "sel_distance", "sel_sink_share"]
    return names + [f"norm_{branch}" for branch in model.branches]


def list_possible_statistics(config: RunConfig) -> set[str]:
    """Return the fields with a prefix of `STATISTICS` that the configured model may have, of any version."""
    model, names = config.model, {*list_layer_statistics(config.model)}
    if "sel_distance" in names:
        names |= {"sel_keys", "sel_keys_most"} | ({"sel_window_overlap"} if "win" in model.branches else set())
    names |= {"selection_loss"} if model.has_selection_loss else set()
    return names | ({"teacher_kl"} if config.train.teacher_weight else set())


def check_heartbeats(history: History, limits: Limits) -> Verdict:
    """Check the number of heartbeats in the last attempt, and that every long enough earlier attempt has some."""
    counts = Counter(history.events_of_kind("heartbeat").ints("attempt").tolist())
    intervals = {
        a: config.runtime.heartbeat_s for a in history.attempts() if (config := history.config_of_attempt(a.number))
    }

    suspended_s = _sum_suspensions(history)

    def count_due(attempt: Attempt) -> int:
        awake_s = attempt.ended_at - attempt.started_at - suspended_s.get(attempt.number, 0.0)
        return int(awake_s / intervals[attempt])

    # With fewer than three, the start time of the thread and the load of the machine dominate the count.
    long = [attempt for attempt in intervals if count_due(attempt) >= 3]
    for attempt in long:
        n_required = limits.heartbeats * count_due(attempt) if attempt.number == history.last_attempt else 1
        if counts[attempt.number] < n_required:
            text = (
                f"{counts[attempt.number]} in the {attempt.ended_at - attempt.started_at:,.0f} s of attempt "
                f"{attempt.number}, expected one every {intervals[attempt]:g} s"
            )
            return Verdict("heartbeats", False, counts[attempt.number], n_required, text)
    every = ", then ".join(dict.fromkeys(f"{every_s:g}" for every_s in intervals.values()))
    suspension = f"; suspended for {sum(suspended_s.values()):,.0f} s" if suspended_s else ""
    if not long:
        every = every or f"{history.config.runtime.heartbeat_s:g}"
        return Verdict("heartbeats", None, counts.total(), None, f"too short for heartbeats every {every} s")
    return require_known_settings(
        history, Verdict("heartbeats", True, counts.total(), None, f"{counts.total()}, one every {every} s{suspension}")
    )


def _sum_suspensions(history: History) -> dict[int, float]:
    """Return the seconds for which the process or the machine was suspended, by attempt; only of those with any."""
    beats = history.events_of_kind("heartbeat")
    seconds, attempts = np.nan_to_num(beats.numbers("suspended_s")), beats.ints("attempt")
    sums = {attempt: float(seconds[own].sum()) for attempt, own in group_positions(attempts).items()}
    return {attempt: total for attempt, total in sums.items() if total > 0}


def check_evaluations(history: History, limits: Limits) -> Verdict:
    """Check that there is an evaluation before the first step, at every multiple of `eval_every`, and at the end."""
    due = {0} if history.last_step else set[int]()
    if history.is_done and (config := history.config_of_attempt(history.last_attempt)) and config.train.eval_every:
        due.add(config.train.steps)
    # The current step may be evaluated next.
    excluded = () if history.is_done else (history.last_step,)
    steps = DueSteps(history, ("evaluation",), due, excluded)
    return _check_complete(history, "evaluations", steps, history.evaluations.ints("step"), "evaluations")


def check_statistics(history: History, limits: Limits) -> Verdict:
    """Check that every reading that was due is complete: its statistics, which are no copies, and its other numbers."""
    due = DueSteps(history, ("statistics",))
    is_complete = np.ones(len(history.steps), dtype=bool)
    for name in list_layer_statistics(history.config.model):
        is_complete &= _has_list(history, name)
    complete = history.steps.ints("step")[is_complete]
    verdict = _check_complete(history, "statistics", due, complete, "readings of the layers")
    repeated = _find_repeated_readings(history, limits.equal_readings) if verdict.ok else None
    stopped = _find_untrained_selection(history) or _find_stopped_number(history, limits)
    problem = repeated or (stopped if verdict.ok is not False else None)
    return verdict if problem is None else replace(verdict, ok=False, text=problem)


def _find_untrained_selection(history: History) -> str | None:
    """Return a text on a selection loss that is 0 or missing in many readings, or in all; None if there is none.

    Its cross-entropy is 0 only if every query has one block.
    """
    model, steps = history.config.model, history.steps
    longest = max(stage.seq_len for stage in history.config.train.plan)
    if not model.has_selection_loss or not len(steps) or longest <= model.nsa.l_sel:
        return None
    where = f"although model.selection_loss is {model.selection_loss:g}: nothing trains the selection"
    if not steps.has("selection_loss").any():
        return f"selection_loss is missing in all {len(steps):,} readings, {where}"
    recorded, values = history.series("selection_loss")
    has_choice = find_readings_with_selection(history, recorded)  # otherwise, nothing can be learned
    recorded, values = recorded[has_choice], values[has_choice]
    if not len(values):
        return None
    is_zero = values == 0
    streak, end = find_longest_constant(is_zero.astype(np.float64), is_zero)
    if not is_zero[end] or streak < min(MIN_ZERO_LOSSES, len(values)):
        return None
    return f"selection_loss is 0 in {streak:,} readings in a row, up to step {recorded[end]:,}, {where}"


def _find_stopped_number(history: History, limits: Limits) -> str | None:
    """Return a text on a number that most readings of a stage had until it was no longer recorded; None without one."""
    forms, all_steps = history.steps.list_fields(), history.steps.ints("step")
    stages, size = find_stages(all_steps, history.config.train), limits.missing_readings
    for name in (name for name, form in forms.items() if form == NUMBER):
        for stage in np.unique(stages):
            steps, has = all_steps[stages == stage], history.steps.has(name)[stages == stage]
            recorded = np.flatnonzero(has)
            counts = np.diff(np.append(recorded, len(has))) - 1  # of the readings without it after each one with it
            before = np.arange(1, len(recorded) + 1)
            is_stop = (counts >= size) & (before >= size) & (2 * before > recorded - recorded[:1] + 1)
            if is_stop.any():
                first, count = int(recorded[is_stop.argmax()]) + 1, int(counts[is_stop.argmax()])
                return f"{name} is missing in {count} readings in a row, the first at step {steps[first]:,}"
    return None


def _has_list(history: History, name: str) -> np.ndarray:
    """Return which `step` events have a list of numbers that is not empty, bool."""
    mask = np.zeros(len(history.steps), dtype=bool)
    mask[history.steps.matrix(name)[0]] = True
    return mask


def _find_repeated_readings(history: History, n_equal: int) -> str | None:
    """Return which statistics are bitwise equal in all layers in `n_equal` readings in a row: they are no longer measured.

    Gates and zero branches have other checks. If all blocks are selected, the statistics of selection are constant anyway.
    """
    names = list_layer_statistics(history.config.model)
    for subject, prefix in (("selection statistics are", "sel_"), ("branch norms are", "norm_")):
        readings = [history.layer_series(name) for name in names if name.startswith(prefix)]
        if not readings:
            continue
        steps = readings[0][0]
        values = [own for own_steps, own in readings if np.array_equal(own_steps, steps)]
        layers = np.concatenate(values, axis=1)
        can_repeat = (layers != 0).any(axis=1)
        if prefix == "sel_":
            can_repeat &= find_readings_with_selection(history, steps)
        streak, end = find_longest_constant(layers, can_repeat)
        if streak >= n_equal:
            return f"{subject} bitwise equal in {streak} readings in a row, up to step {steps[end]:,}"
    return None


def find_readings_with_selection(history: History, steps: np.ndarray) -> np.ndarray:
    """Return which readings, at `steps`, are of stages with a choice: blocks that are neither forced nor all selected."""
    nsa, train = history.config.nsa, history.config.train
    has_choice = nsa.n_sel > nsa.sink_blocks + nsa.local_blocks
    has_selection = np.array([has_choice and stage.seq_len > nsa.n_sel * nsa.l_sel for stage in train.plan])
    return has_selection[find_stages(steps, train)]


def find_longest_constant(values: np.ndarray, can_repeat: np.ndarray | bool = True) -> tuple[int, int]:
    """Return the length of the longest streak of bitwise equal readings [n, ...] and the index of its last reading.

    `can_repeat`, bool [n]: whether a reading may continue a streak.
    """
    if not len(values):
        return 0, 0
    rows = values.reshape(len(values), -1)
    is_repeated = (rows[1:] == rows[:-1]).all(axis=1)
    is_repeated &= can_repeat if isinstance(can_repeat, bool) else can_repeat[1:]
    # Number of repeated readings up to each one since the last that was not repeated.
    indices = np.arange(1, len(rows))
    starts = np.maximum.accumulate(np.where(is_repeated, 0, indices))
    streaks = np.concatenate([[1], indices - starts + 1])
    end = int(streaks.argmax())
    return int(streaks[end]), end


def _check_complete(
    history: History, name: str, due: DueSteps, recorded: Sequence[int] | np.ndarray, subject: str
) -> Verdict:
    """Check that all steps that were `due` are `recorded`."""
    count, missing = due.find_missing(recorded)
    if count:
        text = f"{count} of {len(due)} {subject} are missing, the first at step {missing[0]:,}"
        return Verdict(name, False, len(due) - count, len(due), text)
    if not len(due):
        return require_known_settings(history, Verdict(name, None, 0, 0, "none due yet"))
    return require_known_settings(history, Verdict(name, True, len(due), len(due), f"{len(due)}, none missing"))


def require_known_settings(history: History, verdict: Verdict) -> Verdict:
    """Return `verdict`; unknown instead if the settings of an attempt, which determine the due entries, are unknown."""
    unknown = [f"{step_range.attempt}" for step_range in history.step_ranges() if step_range.config is None]
    if not unknown:
        return verdict
    attempts = f"attempt {unknown[0]}" if len(unknown) == 1 else f"attempts {', '.join(unknown)}"
    text = f"settings of {attempts} unknown: config.yaml has changed since, and the events do not record them"
    return replace(verdict, ok=None, text=f"{verdict.text}; {text}")
