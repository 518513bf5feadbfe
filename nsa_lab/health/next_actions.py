"""Next actions for a run that is not DONE, shown on its page, in its notebook, in a terminal and by `nsa-lab status`."""

from __future__ import annotations

from nsa_lab.health.divergence import diagnose_divergence
from nsa_lab.health.verdict import LIMITS
from nsa_lab.runs import directory
from nsa_lab.runs.history import History

# This folder does not exist if a check before the first step failed or the text could not be read.
DIAGNOSIS_HINT = "See the newest halt-… folder of the run for the diagnosis."
RERUN_HINT = "If the cause is a setting, train again with another value: nsa-lab run NAME -p section.key=value."
BEFORE_FIRST_STEP = (
    f"Training has not started. {RERUN_HINT} If the cause is the data or the machine, fix it and start: "
    "nsa-lab resume {run}"
)
AFTER_FIRST_STEP = (
    f"{RERUN_HINT} The weights are those of step {{step:,}}, the last good step. If the cause is the data or the machine, "
    "fix it and continue from them: nsa-lab resume {run}"
)
ACTION_BY_STATE = {
    directory.PREEMPTED: "Nothing is lost: nsa-lab resume {run} continues from step {step:,}.",
    "DEAD": "The trainer was killed; the last recorded step is {step:,}. nsa-lab resume {run} continues from the newest "
    "checkpoint.",
}


def list_next_actions(history: History) -> list[str]:
    """Return one line per action; for a diverged run the likely cause first, resuming last. Empty if DONE or RUNNING."""
    divergence = diagnose_divergence(history, LIMITS)
    if divergence:
        return [divergence.action, divergence.resume_hint]
    action = (
        _describe_halt_action(history) if history.state == directory.HALTED else ACTION_BY_STATE.get(history.state or "")
    )
    return [action.format(run=history.run, step=history.last_step)] if action else []


def _describe_halt_action(history: History) -> str:
    action = AFTER_FIRST_STEP if history.last_step else BEFORE_FIRST_STEP
    return f"{DIAGNOSIS_HINT} {action}" if history.last_step or history.events_of_kind("guard") else action


def list_advice(history: History) -> list[str]:
    """Return `list_next_actions`; for a diverged run the observations in its record come first."""
    divergence = diagnose_divergence(history, LIMITS)
    return [*(divergence.observations if divergence else []), *list_next_actions(history)]
