"""Verdicts on the record itself: is it of one run, is its clock sound, and is everything there that was due?

What is missing where it was due is a failure. Where nothing was due yet, nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nsa_lab.config import TrainConfig
from nsa_lab.health.verdict import Limits, Verdict, join_lines
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import Attempt, History

# What a reading of statistics holds, layer by layer.
LAYER_STATISTICS = ("grad_norm_layers",)
BRANCH_STATISTICS = (
    *(f"gate_share_{branch}" for branch in ("cmp", "sel", "win")),
    *("gate_entropy", "gate_saturation", "gate_update", "sel_reuse", "sel_distance", "sel_sink_share"),
    *(f"norm_{branch}" for branch in ("cmp", "sel", "win")),
)


def check_one_run(history: History, limits: Limits) -> Verdict:
    """Status and events name the same run."""
    named = sorted({str(event["run"]) for event in history.events if "run" in event})
    said = history.status.get("run")
    if len(named) > 1:
        return Verdict("one run", False, len(named), 1, f"the events are of several runs: {', '.join(named[:3])}")
    if not named or said is None:
        return Verdict("one run", None, None, 1, "no event was written yet" if said else "there is no status")
    begun = {event["attempt"] for event in history.events_of_kind("start", "resume")}
    if said == named[0] and (lost := sorted({event["attempt"] for event in history.events} - begun)):
        text = f"status and events are of {said}, and the record does not tell how attempt {lost[0]} began"
        return Verdict("one run", None, len(named), 1, text)
    text = f"status and events are of {said}" if said == named[0] else f"the status is of {said}, the events of {named[0]}"
    return Verdict("one run", said == named[0], len({said, *named}), 1, text)


def check_clock(history: History, limits: Limits) -> Verdict:
    """Time goes forward from event to event, over all attempts."""
    times = [(event["t"], event["step"]) for event in history.events if isinstance(event.get("t"), (int, float))]
    latest, back, where = float("-inf"), 0.0, 0
    for t, step in times:
        latest = max(latest, t)
        if latest - t > back:
            back, where = latest - t, step
    if len(times) < 2:
        return Verdict("clock", None, None, limits.clock_back_s, "fewer than two events")
    ok = back <= limits.clock_back_s
    text = "goes forward from event to event" if ok else f"steps back by {back:,.0f} s at step {where:,}"
    return Verdict("clock", ok, back, limits.clock_back_s, text)


def check_heartbeats(history: History, limits: Limits) -> Verdict:
    """As many as the time of the last attempt asks for, and some in each earlier one that took long enough."""
    beats = [event["attempt"] for event in history.events_of_kind("heartbeat")]
    asked = {a: config.runtime.heartbeat_s for a in history.attempts() if (config := history.config_of_attempt(a.number))}

    def due(attempt: Attempt) -> int:
        return int((attempt.ended_at - attempt.started_at) / asked[attempt])

    # Below that, when the thread began and what a busy machine left it matter more than how many there are.
    long = [attempt for attempt in asked if due(attempt) >= 3]
    for attempt in long:
        wanted = limits.heartbeats * due(attempt) if attempt.number == history.last_attempt else 1
        if beats.count(attempt.number) < wanted:
            text = (
                f"{beats.count(attempt.number)} in the {attempt.ended_at - attempt.started_at:,.0f} s of attempt {attempt.number}, "
                f"one every {asked[attempt]:g} s asked"
            )
            return Verdict("heartbeats", False, beats.count(attempt.number), wanted, text)
    every = ", then ".join(dict.fromkeys(f"{every_s:g}" for every_s in asked.values()))
    if not long:
        every = every or f"{history.config.runtime.heartbeat_s:g}"
        return Verdict("heartbeats", None, len(beats), None, f"too short for heartbeats every {every} s")
    return require_known_settings(
        history, Verdict("heartbeats", True, len(beats), None, f"{len(beats)}, one every {every} s")
    )


def check_evaluations(history: History, limits: Limits) -> Verdict:
    """One before the first step, one at every `eval_every` steps and one at the end."""
    due = {0} if history.last_step else set[int]()
    due |= get_due_steps(history, lambda train: train.eval_every)
    if history.is_done and (config := history.config_of_attempt(history.last_attempt)) and config.train.eval_every:
        due.add(config.train.steps)
    # The step that the run is at may be evaluated next.
    due -= set() if history.is_done else {history.last_step}
    return _check_complete(history, "evaluations", due, {event["step"] for event in history.evaluations}, "evaluations")


def check_statistics(history: History, limits: Limits) -> Verdict:
    """Every reading of the layers that was due, whole."""
    names = LAYER_STATISTICS + (BRANCH_STATISTICS if history.config.model.attention == "nsa" else ())
    due = get_due_steps(history, lambda train: train.stats_every)
    whole = {event["step"] for event in history.steps if all(event.get(name) for name in names)}
    found = _check_complete(history, "statistics", due, whole, "readings of the layers")
    stuck = _find_repeated_readings(history, limits.equal_readings) if found.ok else None
    return found if stuck is None else replace(found, ok=False, text=stuck)


def _find_repeated_readings(history: History, most: int) -> str | None:
    """What says the same of every layer, to the last bit, in `most` readings in a row: nobody measures it any more.

    Of gates, and of a branch that is 0, other verdicts speak. Where all blocks are read, the choice stays what it is.
    """
    nsa, train = history.config.model.nsa, history.config.train
    for what, prefix in (("the statistics of the choice are", "sel_"), ("the norms of the branches are", "norm_")):
        names = [name for name in BRANCH_STATISTICS if name.startswith(prefix)]
        readings = [(event["step"], [event.get(name) for name in names]) for event in history.steps if names[0] in event]
        row, before = 1, None
        for step, reading in readings:
            chosen = prefix == "norm_" or train.stage_at(step).seq_len > nsa.n_sel * nsa.l_sel
            row = row + 1 if chosen and reading == before and _has_nonzero(reading) else 1
            before = reading
            if row >= most:
                return f"{what} the same to the last bit in {row} readings in a row, up to step {step:,}"
    return None


def _has_nonzero(reading: list[Any]) -> bool:
    return any(value for layers in reading if isinstance(layers, list) for value in layers)


def _check_complete(history: History, name: str, due: set[int], found: Iterable[int], what: str) -> Verdict:
    missing = sorted(due - set(found))
    if missing:
        text = f"{len(missing)} of {len(due)} {what} are missing, the first at step {missing[0]:,}"
        return Verdict(name, False, len(due) - len(missing), len(due), text)
    if not due:
        return require_known_settings(history, Verdict(name, None, 0, 0, "none was due yet"))
    return require_known_settings(history, Verdict(name, True, len(due), len(due), f"{len(due)}, each when it was due"))


def get_due_steps(history: History, every: Callable[[TrainConfig], int]) -> set[int]:
    """The steps, up to the one that the run is at, that an attempt owed something for, `every` so many of its steps."""
    return {
        step
        for stretch in history.step_ranges()
        if stretch.config
        for step in stretch.list_multiples(every(stretch.config.train))
    }


def require_known_settings(history: History, verdict: Verdict) -> Verdict:
    """What was due is there, as far as it is known what was due: not for an attempt whose settings are not."""
    unknown = [f"{stretch.attempt}" for stretch in history.step_ranges() if stretch.config is None]
    if not unknown:
        return verdict
    who = f"attempt {unknown[0]}" if len(unknown) == 1 else f"attempts {', '.join(unknown)}"
    text = f"what was due in {who} is not known: config.yaml has changed since, and the record does not tell what it said"
    return replace(verdict, ok=None, text=f"{verdict.text}; {text}")


def split_by_attempt(history: History, found: list[Event]) -> tuple[list[Event], list[Event]]:
    """Those of the last attempt, and those that a later attempt got over."""
    last = history.last_attempt
    return [event for event in found if event["attempt"] == last], [event for event in found if event["attempt"] != last]


def format_guard(event: Event) -> str:
    """What a guard found, and what it did."""
    text = event.get("text") or f"step {event['step']}: value {event.get('value')}, limit {event.get('limit')}"
    return f"{event.get('rule', 'a rule')} ({event.get('action')}): {join_lines(text)}"


def format_recovered(found: list[Event], told: Callable[[Event], str]) -> str:
    """Earlier troubles, for the end of a sentence; empty if there were none."""
    if not found:
        return ""
    shown = "; ".join(f"attempt {event['attempt']}: {told(event)}" for event in found[:3])
    return f" (got over: {shown}{' …' if len(found) > 3 else ''})"
