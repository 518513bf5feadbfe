"""What to do about a run that is not done: one wording for its page, its notebook, a terminal and `nsa-lab status`."""

from __future__ import annotations

from nsa_lab.health.suspect import suspect
from nsa_lab.health.verdict import LIMITS
from nsa_lab.runs import directory
from nsa_lab.runs.history import History

# None is left where nothing was trained: by a check before the first step, or text that cannot be read.
DIAGNOSIS = "The newest halt-… folder of the run holds the diagnosis."
ANEW = "If the cause is a value of the configuration, train anew with another: nsa-lab run NAME -p section.key=value."
BEFORE_THE_FIRST = (
    f"Nothing was trained yet. {ANEW} If it lies outside, in data or machine, mend it and begin: nsa-lab resume {{run}}"
)
AFTER_A_STEP = (
    f"{ANEW} The weights are those of step {{step:,}}, the last good one. If the cause lies outside, in data or machine, "
    "mend it and go on from them: nsa-lab resume {run}"
)
ENDED = {
    directory.PREEMPTED: "Nothing is lost: nsa-lab resume {run} goes on from step {step:,}.",
    "DEAD": "The trainer was killed; the last recorded step is {step:,}. nsa-lab resume {run} goes on from the newest "
    "checkpoint.",
}


def what_to_do(history: History) -> list[str]:
    """A line each; of a run that diverged the suspect first, and resuming last. Empty for one that is done or goes on."""
    found = suspect(history, LIMITS)
    if found:
        return [found.change, found.resume]
    told = _halted(history) if history.state == directory.HALTED else ENDED.get(history.state or "")
    return [told.format(run=history.run, step=history.reached)] if told else []


def _halted(history: History) -> str:
    told = AFTER_A_STEP if history.reached else BEFORE_THE_FIRST
    return f"{DIAGNOSIS} {told}" if history.reached or history.of_kind("guard") else told


def advice(history: History) -> list[str]:
    """`what_to_do`, and of a run that diverged, before it, what its record says of how."""
    found = suspect(history, LIMITS)
    return [*(found.seen if found else []), *what_to_do(history)]
