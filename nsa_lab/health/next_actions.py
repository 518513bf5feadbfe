"""What to do about a run that is not done: one wording for its page, its notebook, a terminal and `nsa-lab status`."""

from __future__ import annotations

from nsa_lab.health.divergence import diagnose_divergence
from nsa_lab.health.verdict import LIMITS
from nsa_lab.runs import directory
from nsa_lab.runs.history import History

# None is left where nothing was trained: by a check before the first step, or text that cannot be read.
DIAGNOSIS_HINT = "The newest halt-… folder of the run holds the diagnosis."
RERUN_HINT = "If the cause is a value of the configuration, train anew with another: nsa-lab run NAME -p section.key=value."
BEFORE_FIRST_STEP = f"Nothing was trained yet. {RERUN_HINT} If it lies outside, in data or machine, mend it and begin: nsa-lab resume {{run}}"
AFTER_FIRST_STEP = (
    f"{RERUN_HINT} The weights are those of step {{step:,}}, the last good one. If the cause lies outside, in data or machine, "
    "mend it and go on from them: nsa-lab resume {run}"
)
ACTION_BY_STATE = {
    directory.PREEMPTED: "Nothing is lost: nsa-lab resume {run} goes on from step {step:,}.",
    "DEAD": "The trainer was killed; the last recorded step is {step:,}. nsa-lab resume {run} goes on from the newest "
    "checkpoint.",
}


def list_next_actions(history: History) -> list[str]:
    """A line each; of a run that diverged the suspect first, and resuming last. Empty for one that is done or goes on."""
    found = diagnose_divergence(history, LIMITS)
    if found:
        return [found.action, found.resume_hint]
    told = _describe_halt_action(history) if history.state == directory.HALTED else ACTION_BY_STATE.get(history.state or "")
    return [told.format(run=history.run, step=history.last_step)] if told else []


def _describe_halt_action(history: History) -> str:
    told = AFTER_FIRST_STEP if history.last_step else BEFORE_FIRST_STEP
    return f"{DIAGNOSIS_HINT} {told}" if history.last_step or history.events_of_kind("guard") else told


def list_advice(history: History) -> list[str]:
    """`what_to_do`, and of a run that diverged, before it, what its record says of how."""
    found = diagnose_divergence(history, LIMITS)
    return [*(found.observations if found else []), *list_next_actions(history)]
