"""Verdicts on how the run went: its end, its guards, its errors, its stalls, and whether its numbers are numbers.

The last attempt is judged. Troubles of an attempt that a later one got over are told, and no longer held against the run.
"""

from __future__ import annotations

import math

from nsa_lab.health.log_integrity import format_guard, format_recovered, split_by_attempt
from nsa_lab.health.verdict import Limits, Verdict, join_lines, list_names
from nsa_lab.runs import directory
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import format_guards

# What every `step` event says, and every `eval` event.
REQUIRED_FIELDS = {"step": ("loss", "bpb", "lr", "grad_norm", "dt_s", "tokens_per_s"), "eval": ("loss", "bpb")}


def check_finished(history: History, limits: Limits) -> Verdict:
    """By the status; that a run is done, the record must say too."""
    status, steps = history.status, history.config.train.steps
    state, at = status.get("status", "unknown"), f"step {history.last_step:,} of {steps:,}"
    reason = join_lines(status.get("reason"))
    if state == directory.DONE:
        ok = history.last_step == steps
        if ok and not any(event["attempt"] == history.last_attempt for event in history.events_of_kind("end")):
            return Verdict("finished", None, history.last_step, steps, f"{at}, and the record does not tell its end")
        return Verdict("finished", ok, history.last_step, steps, at if ok else f"called DONE at {at}")
    if state == directory.PREEMPTED:
        text = f"{at}: {reason or 'stopped on request'}; resume it to finish"
        return Verdict("finished", None, history.last_step, steps, text)
    if state == directory.RUNNING and history.is_alive:
        return Verdict("finished", None, history.last_step, steps, f"running, {at}")
    if state == directory.RUNNING:
        return Verdict(
            "finished", False, history.last_step, steps, f"the trainer is gone without a word at {at}; resume it"
        )
    return Verdict("finished", False, history.last_step, steps, f"{state} at {at}: {reason or 'no reason given'}")


def check_guards(history: History, limits: Limits) -> Verdict:
    """Of all rules but those that a verdict of their own tells of: a damaged checkpoint, and a pace that fell."""
    every = history.current_events("guard")
    own = [event for event in every if event.get("action") != "quarantined" and event.get("rule") != "slowdown"]
    fired, overcome = split_by_attempt(history, own)
    # A halt explains itself better than the warnings that came before it.
    fired.sort(key=lambda event: event.get("action") != "halt")
    if not fired:
        config = history.config_of_attempt(history.last_attempt)
        worth = format_guards(config.train) if config else "which of them were on is not known"
        none = "no guard fired" if len(own) == len(every) else "no other guard fired"
        return _pass_if_recorded("guards", history, f"{none}; {worth}" + format_recovered(overcome, format_guard))
    return Verdict("guards", False, len(fired), 0, format_guard(fired[0]) + _format_more(fired))


# What a number can be. Above 0 alone: a step takes time.
POSITIVE_FIELDS = ("dt_s", "tokens_per_s")
NONNEGATIVE_FIELDS = (
    *("loss", "bpb", "lr", "grad_norm", "grad_norm_layers", "data_s", "mem_peak_bytes", "gate_entropy", "gate_update"),
    *("sel_distance", "norm_cmp", "norm_sel", "norm_win"),
)
FRACTION_FIELDS = (
    *("gate_share_cmp", "gate_share_sel", "gate_share_win", "gate_saturation"),
    *("sel_reuse", "sel_sink_share", "sel_window_overlap"),
)
ROUNDING = 1e-3  # of a share


def check_finite(history: History, limits: Limits) -> Verdict:
    """Of what was written, and of what every event must say: null without a word about it is no number either, and no
    number is what cannot be."""
    bad = [(event["step"], name) for event in history.current_events("step", "eval") for name in _list_nonfinite(event)]
    if not bad and not history.current_events("step", "eval"):
        return Verdict("finite numbers", None, 0, 0, "no number was recorded")
    impossible = [] if bad else [event for event in history.current_events("step", "eval") if _find_impossible(event)]
    if impossible:
        first = impossible[0]
        text = f"{_find_impossible(first)} at step {first['step']:,}, which cannot be ({len(impossible)} such events)"
        return Verdict("finite numbers", False, len(impossible), 0, text)
    if not bad:
        skipped = any(event.get("rule") == "non_finite" for event in history.current_events("guard"))
        but = "; a step that was not finite was skipped: see guards" if skipped else ""
        return Verdict("finite numbers", True, 0, 0, f"every recorded number is finite{but}")
    step, name = bad[0]
    return Verdict("finite numbers", False, len(bad), 0, f"{name} is not finite at step {step:,} ({len(bad)} such numbers)")


def _list_nonfinite(event: Event) -> list[str]:
    named = list_names(event.get("nonfinite"))
    said = {name: value for name, value in event.items() if name != "nonfinite"}
    said = dict.fromkeys(REQUIRED_FIELDS[event["kind"]]) | said
    for name, value in said.items():
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            if entry is None or (isinstance(entry, float) and not math.isfinite(entry)):
                named.append(name if index is None else f"{name}[{index}]")
    return list(dict.fromkeys(named))


def _find_impossible(event: Event) -> str | None:
    """The first number of an event of finite numbers that none can be, and what it is."""
    for name, value in event.items():
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, (int, float)) and not _is_possible(name, entry):
                return f"{name} is {entry:g}"
    return None


def _is_possible(name: str, value: float) -> bool:
    if name in POSITIVE_FIELDS:
        return value > 0
    if name in FRACTION_FIELDS:
        return -ROUNDING <= value <= 1 + ROUNDING
    return name not in NONNEGATIVE_FIELDS or value >= 0


# Of errors that ended nothing: what failed beside training, and left the record whole.
NONCRITICAL_PARTS = frozenset({"status", "tensorboard", "diagnosis"})


def check_errors(history: History, limits: Limits) -> Verdict:
    """An error that ended the run, or left a hole in its record, fails; what failed beside training is told.

    Where several processes died of one cause, that one speaks; a failed save is a matter of `checkpoints`.
    """
    found, overcome = split_by_attempt(
        history, [e for e in history.events_of_kind("error") if _is_fatal(e) or e.get("where") != "save"]
    )
    found.sort(key=lambda event: (event.get("cause") is not True, not _is_fatal(event)))

    def told(event: Event) -> str:
        kind = event.get("type", "error")
        kind = kind if _is_fatal(event) else f"{kind} ({event.get('where', 'unknown')})"
        return f"{kind} at step {event['step']:,}: {join_lines(event.get('message'))}"

    bad = [event for event in found if _is_fatal(event) or event.get("where") not in NONCRITICAL_PARTS]
    if bad:
        return Verdict("errors", False, len(bad), 0, told(bad[0]) + _format_more(bad))
    if found:
        text = f"none that ended the run; {told(found[0])}{_format_more(found)}"
        return Verdict("errors", True, 0, 0, text + format_recovered(overcome, told))
    return _pass_if_recorded("errors", history, "none" + format_recovered(overcome, told))


def _is_fatal(event: Event) -> bool:
    return event.get("fatal") is not False


def _format_more(found: list[Event]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def _pass_if_recorded(name: str, history: History, text: str) -> Verdict:
    """Nothing was recorded against the run: good, unless nothing was recorded at all."""
    return Verdict(name, True, 0, 0, text) if history.events else Verdict(name, None, 0, 0, "no event was written yet")


def check_stalls(history: History, limits: Limits) -> Verdict:
    found, overcome = split_by_attempt(history, history.events_of_kind("stall"))

    def told(event: Event) -> str:
        age_s = event.get("phase_age_s")
        noticed = "noticed" if age_s is None else f"noticed after {age_s:.0f} s"
        return f"in phase {event.get('phase')} at step {event['step']:,}, {noticed}"

    if not found:
        return _pass_if_recorded("stalls", history, "none" + format_recovered(overcome, told))
    worst = max(found, key=lambda event: event.get("phase_age_s") or 0)
    return Verdict("stalls", False, len(found), 0, f"{len(found)}; the longest {told(worst)}")


def check_preflight(history: History, limits: Limits) -> Verdict:
    """Of the last attempt that began at step 0: the others go on from what that one checked."""
    every = history.events_of_kind("preflight")
    last = max((event["attempt"] for event in every), default=0)
    found = [event for event in every if event["attempt"] == last]
    bad = [event for event in found if event.get("ok") is False]
    unclear = [event for event in found if event.get("ok") not in (True, False)]

    def told(event: Event) -> str:
        return join_lines(f"{event.get('name', 'a check')}: {event.get('value')}, limit {event.get('limit')}")

    if not found:
        trained = history.last_step > 0
        text = "no check was recorded before the first step" if trained else "no check was recorded"
        return Verdict("preflight", False if trained else None, 0, None, text)
    if bad:
        text = f"{told(bad[0])} ({len(bad)} of {len(found)} failed)"
        return Verdict("preflight", False, len(found) - len(bad), len(found), text)
    if unclear:
        return Verdict("preflight", None, None, len(found), f"{told(unclear[0])}: it says neither passed nor failed")
    overcome = [event for event in every if event["attempt"] != last and event.get("ok") is False]
    return Verdict(
        "preflight", True, len(found), len(found), f"{len(found)} checks passed" + format_recovered(overcome, told)
    )
