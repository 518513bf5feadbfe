"""Verdicts on the record itself: is it of one run, is its clock sound, and is everything there that was due?

What is missing where it was due is a failure. Where nothing was due yet, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from nsa_lab.health.verdict import Limits, Verdict
from nsa_lab.runs.history import Attempt, History

# What a reading of statistics holds, layer by layer.
OF_ANY_MODEL = ("grad_norm_layers",)
OF_BRANCHES = (
    *(f"gate_share_{branch}" for branch in ("cmp", "sel", "win")),
    *("gate_entropy", "gate_saturation", "gate_update", "sel_reuse", "sel_distance", "sel_sink_share"),
    *(f"norm_{branch}" for branch in ("cmp", "sel", "win")),
)


def one_run(history: History, limits: Limits) -> Verdict:
    """Status and events name the same run."""
    named = sorted({event["run"] for event in history.events if "run" in event})
    said = history.status.get("run")
    if len(named) > 1:
        return Verdict("one run", False, len(named), 1, f"the events are of several runs: {', '.join(named[:3])}")
    if not named or said is None:
        return Verdict("one run", None, None, 1, "no event was written yet" if said else "there is no status")
    text = f"status and events are of {said}" if said == named[0] else f"the status is of {said}, the events of {named[0]}"
    return Verdict("one run", said == named[0], len({said, *named}), 1, text)


def clock(history: History, limits: Limits) -> Verdict:
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


def heartbeats(history: History, limits: Limits) -> Verdict:
    """As many as the time of the last attempt asks for, and some in each earlier one that took long enough."""
    every_s = history.config.runtime.heartbeat_s
    beats = [event["attempt"] for event in history.of_kind("heartbeat")]

    def due(attempt: Attempt) -> int:
        return int((attempt.ended - attempt.began) / every_s)

    # Below that, when the thread began and what a busy machine left it matter more than how many there are.
    long = [attempt for attempt in history.attempts() if due(attempt) >= 3]
    for attempt in long:
        wanted = limits.heartbeats * due(attempt) if attempt.number == history.last_attempt else 1
        if beats.count(attempt.number) < wanted:
            text = (
                f"{beats.count(attempt.number)} in the {attempt.ended - attempt.began:,.0f} s of attempt {attempt.number}, "
                f"one every {every_s:g} s asked"
            )
            return Verdict("heartbeats", False, beats.count(attempt.number), wanted, text)
    if not long:
        return Verdict("heartbeats", None, len(beats), None, f"too short for heartbeats every {every_s:g} s")
    return Verdict("heartbeats", True, len(beats), None, f"{len(beats)}, one every {every_s:g} s")


def evaluations(history: History, limits: Limits) -> Verdict:
    """One before the first step, one at every `eval_every` steps and one at the end."""
    train = history.config.train
    due = {0} if history.reached else set[int]()
    if train.eval_every:
        due |= set(range(train.eval_every, history.reached + 1, train.eval_every))
        due |= {train.steps} if history.done else set()
    # The step that the run is at may be evaluated next.
    due -= set() if history.done else {history.reached}
    return _all_there("evaluations", due, {event["step"] for event in history.evaluations}, "evaluations")


def statistics(history: History, limits: Limits) -> Verdict:
    """Every reading of the layers that was due, whole."""
    train = history.config.train
    names = OF_ANY_MODEL + (OF_BRANCHES if history.config.model.attention == "nsa" else ())
    due = set(range(train.stats_every, history.reached + 1, train.stats_every))
    whole = {event["step"] for event in history.steps if all(event.get(name) for name in names)}
    return _all_there("statistics", due, whole, "readings of the layers")


def _all_there(name: str, due: set[int], found: Iterable[int], what: str) -> Verdict:
    missing = sorted(due - set(found))
    if not due:
        return Verdict(name, None, 0, 0, "none was due yet")
    if missing:
        text = f"{len(missing)} of {len(due)} {what} are missing, the first at step {missing[0]:,}"
        return Verdict(name, False, len(due) - len(missing), len(due), text)
    return Verdict(name, True, len(due), len(due), f"{len(due)}, each when it was due")
