"""Verdicts on how the run went: its end, its guards, its errors, its stalls, and whether its numbers are numbers.

The last attempt is judged. Troubles of an attempt that a later one got over are told, and no longer held against the run.
"""

from __future__ import annotations

import math

from nsa_lab.health.record import by_attempt, got_over, guard_told
from nsa_lab.health.verdict import Limits, Verdict, names_in, one_line
from nsa_lab.runs import directory
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import guards_of

# What every `step` event says, and every `eval` event.
TOLD = {"step": ("loss", "bpb", "lr", "grad_norm", "dt_s", "tokens_per_s"), "eval": ("loss", "bpb")}


def finished(history: History, limits: Limits) -> Verdict:
    """By the status; that a run is done, the record must say too."""
    status, steps = history.status, history.config.train.steps
    state, at = status.get("status", "unknown"), f"step {history.reached:,} of {steps:,}"
    reason = one_line(status.get("reason"))
    if state == directory.DONE:
        ok = history.reached == steps
        if ok and not any(event["attempt"] == history.last_attempt for event in history.of_kind("end")):
            return Verdict("finished", None, history.reached, steps, f"{at}, and the record does not tell its end")
        return Verdict("finished", ok, history.reached, steps, at if ok else f"called DONE at {at}")
    if state == directory.PREEMPTED:
        text = f"{at}: {reason or 'stopped on request'}; resume it to finish"
        return Verdict("finished", None, history.reached, steps, text)
    if state == directory.RUNNING and history.alive:
        return Verdict("finished", None, history.reached, steps, f"running, {at}")
    if state == directory.RUNNING:
        return Verdict("finished", False, history.reached, steps, f"the trainer is gone without a word at {at}; resume it")
    return Verdict("finished", False, history.reached, steps, f"{state} at {at}: {reason or 'no reason given'}")


def guards(history: History, limits: Limits) -> Verdict:
    """Of all rules but those that a verdict of their own tells of: a damaged checkpoint, and a pace that fell."""
    every = history.current("guard")
    own = [event for event in every if event.get("action") != "quarantined" and event.get("rule") != "slowdown"]
    fired, overcome = by_attempt(history, own)
    # A halt explains itself better than the warnings that came before it.
    fired.sort(key=lambda event: event.get("action") != "halt")
    if not fired:
        config = history.config_of(history.last_attempt)
        worth = guards_of(config.train) if config else "which of them were on is not known"
        none = "no guard fired" if len(own) == len(every) else "no other guard fired"
        return _silent("guards", history, f"{none}; {worth}" + got_over(overcome, guard_told))
    return Verdict("guards", False, len(fired), 0, guard_told(fired[0]) + _more(fired))


# What a number can be. Above 0 alone: a step takes time.
ABOVE_ZERO = ("dt_s", "tokens_per_s")
NOT_NEGATIVE = (
    *("loss", "bpb", "lr", "grad_norm", "grad_norm_layers", "data_s", "mem_peak_bytes", "gate_entropy", "gate_update"),
    *("sel_distance", "norm_cmp", "norm_sel", "norm_win"),
)
SHARES = (
    *("gate_share_cmp", "gate_share_sel", "gate_share_win", "gate_saturation"),
    *("sel_reuse", "sel_sink_share", "sel_window_overlap"),
)
ROUNDING = 1e-3  # of a share


def finite(history: History, limits: Limits) -> Verdict:
    """Of what was written, and of what every event must say: null without a word about it is no number either, and no
    number is what cannot be."""
    bad = [(event["step"], name) for event in history.current("step", "eval") for name in _not_numbers(event)]
    if not bad and not history.current("step", "eval"):
        return Verdict("finite numbers", None, 0, 0, "no number was recorded")
    impossible = [] if bad else [event for event in history.current("step", "eval") if _impossible(event)]
    if impossible:
        first = impossible[0]
        text = f"{_impossible(first)} at step {first['step']:,}, which cannot be ({len(impossible)} such events)"
        return Verdict("finite numbers", False, len(impossible), 0, text)
    if not bad:
        skipped = any(event.get("rule") == "non_finite" for event in history.current("guard"))
        but = "; a step that was not finite was skipped: see guards" if skipped else ""
        return Verdict("finite numbers", True, 0, 0, f"every recorded number is finite{but}")
    step, name = bad[0]
    return Verdict("finite numbers", False, len(bad), 0, f"{name} is not finite at step {step:,} ({len(bad)} such numbers)")


def _not_numbers(event: Event) -> list[str]:
    named = names_in(event.get("nonfinite"))
    said = {name: value for name, value in event.items() if name != "nonfinite"}
    said = dict.fromkeys(TOLD[event["kind"]]) | said
    for name, value in said.items():
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            if entry is None or (isinstance(entry, float) and not math.isfinite(entry)):
                named.append(name if index is None else f"{name}[{index}]")
    return list(dict.fromkeys(named))


def _impossible(event: Event) -> str | None:
    """The first number of an event of finite numbers that none can be, and what it is."""
    for name, value in event.items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, (int, float)) and not _can_be(name, entry):
                return f"{name} is {entry:g}"
    return None


def _can_be(name: str, value: float) -> bool:
    if name in ABOVE_ZERO:
        return value > 0
    if name in SHARES:
        return -ROUNDING <= value <= 1 + ROUNDING
    return name not in NOT_NEGATIVE or value >= 0


# Of errors that ended nothing: what failed beside training, and left the record whole.
BESIDE = frozenset({"status", "tensorboard", "diagnosis"})


def errors(history: History, limits: Limits) -> Verdict:
    """An error that ended the run, or left a hole in its record, fails; what failed beside training is told.

    Where several processes died of one cause, that one speaks; a failed save is a matter of `checkpoints`.
    """
    found, overcome = by_attempt(history, [e for e in history.of_kind("error") if _fatal(e) or e.get("where") != "save"])
    found.sort(key=lambda event: (event.get("cause") is not True, not _fatal(event)))

    def told(event: Event) -> str:
        kind = event.get("type", "error")
        kind = kind if _fatal(event) else f"{kind} ({event.get('where', 'unknown')})"
        return f"{kind} at step {event['step']:,}: {one_line(event.get('message'))}"

    bad = [event for event in found if _fatal(event) or event.get("where") not in BESIDE]
    if bad:
        return Verdict("errors", False, len(bad), 0, told(bad[0]) + _more(bad))
    if found:
        text = f"none that ended the run; {told(found[0])}{_more(found)}"
        return Verdict("errors", True, 0, 0, text + got_over(overcome, told))
    return _silent("errors", history, "none" + got_over(overcome, told))


def _fatal(event: Event) -> bool:
    return event.get("fatal") is not False


def _more(found: list[Event]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def _silent(name: str, history: History, text: str) -> Verdict:
    """Nothing was recorded against the run: good, unless nothing was recorded at all."""
    return Verdict(name, True, 0, 0, text) if history.events else Verdict(name, None, 0, 0, "no event was written yet")


def stalls(history: History, limits: Limits) -> Verdict:
    found, overcome = by_attempt(history, history.of_kind("stall"))

    def told(event: Event) -> str:
        age_s = event.get("phase_age_s")
        noticed = "noticed" if age_s is None else f"noticed after {age_s:.0f} s"
        return f"in phase {event.get('phase')} at step {event['step']:,}, {noticed}"

    if not found:
        return _silent("stalls", history, "none" + got_over(overcome, told))
    worst = max(found, key=lambda event: event.get("phase_age_s") or 0)
    return Verdict("stalls", False, len(found), 0, f"{len(found)}; the longest {told(worst)}")


def preflight(history: History, limits: Limits) -> Verdict:
    """Of the last attempt that began at step 0: the others go on from what that one checked."""
    every = history.of_kind("preflight")
    last = max((event["attempt"] for event in every), default=0)
    found = [event for event in every if event["attempt"] == last]
    bad = [event for event in found if event.get("ok") is False]
    unclear = [event for event in found if event.get("ok") not in (True, False)]

    def told(event: Event) -> str:
        return one_line(f"{event.get('name', 'a check')}: {event.get('value')}, limit {event.get('limit')}")

    if not found:
        trained = history.reached > 0
        text = "no check was recorded before the first step" if trained else "no check was recorded"
        return Verdict("preflight", False if trained else None, 0, None, text)
    if bad:
        text = f"{told(bad[0])} ({len(bad)} of {len(found)} failed)"
        return Verdict("preflight", False, len(found) - len(bad), len(found), text)
    if unclear:
        return Verdict("preflight", None, None, len(found), f"{told(unclear[0])}: it says neither passed nor failed")
    overcome = [event for event in every if event["attempt"] != last and event.get("ok") is False]
    return Verdict("preflight", True, len(found), len(found), f"{len(found)} checks passed" + got_over(overcome, told))
