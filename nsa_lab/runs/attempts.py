"""The attempts of a run: its training processes, one after another.

A run may have thousands of attempts and a million events. Everything here takes one pass over the events, whatever the
number of attempts: a loop over attempts never looks at all events (`group_positions`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory
from nsa_lab.runs.event_schema import AttemptEvent
from nsa_lab.runs.event_table import Events
from nsa_lab.runs.events import Event

N_DESCRIBED = 5  # first and last attempts that a text describes


@dataclass(frozen=True)
class Attempt:
    """One training process: its steps, its times (seconds since 1970) and its outcome.

    `outcome`: done, halted, stopped (on request), failed (an error), running, or killed (no final event).
    """

    number: int
    from_step: int
    last_step: int
    started_at: float
    ended_at: float
    outcome: str


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last` of one attempt that no later attempt repeated.

    `config`: the configuration of the attempt; None if unknown.
    """

    attempt: int
    first: int
    last: int
    config: RunConfig | None

    def list_multiples(self, every: int) -> range:
        """Return the steps in this range that are multiples of `every`; empty if `every` is 0 (never)."""
        return range(-(-self.first // every) * every, self.last + 1, every) if every else range(0)


_OUTCOMES = {
    ("end", directory.DONE): "done",
    ("end", directory.PREEMPTED): "stopped",
    ("end", directory.HALTED): "halted",
    ("halt", directory.HALTED): "halted",
    ("halt", None): "halted",
    ("end", None): "done",
}


def group_positions(values: np.ndarray) -> dict[int, np.ndarray]:
    """Return the ascending positions of each distinct value of an integer array, values ascending."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order, starts[1:]), strict=False))


def shorten_middle(descriptions: list[str]) -> list[str]:
    """Return the descriptions of attempts, of many only the first and the last ones."""
    if len(descriptions) <= 2 * N_DESCRIBED:
        return descriptions
    return [*descriptions[:N_DESCRIBED], "…", *descriptions[-N_DESCRIBED:]]


def build_attempts(events: Events[Event], first_events: Events[AttemptEvent], is_alive: bool) -> list[Attempt]:
    """Return an attempt for each of its first events, in their order. `is_alive`: a trainer is at work."""
    positions = group_positions(events.ints("attempt"))
    steps, times = events.ints("step"), events.numbers("t")
    outcomes: dict[int, str] = {}
    for event in events.of_kind("end", "halt"):
        if (ending := (event["kind"], event.get("status"))) in _OUTCOMES:
            outcomes[event["attempt"]] = _OUTCOMES[ending]
    outcomes |= {event["attempt"]: "failed" for event in events.of_kind("error") if event.get("fatal")}
    numbers, first_steps = first_events.ints("attempt").tolist(), first_events.ints("step").tolist()
    from_steps, starts = first_events.numbers("from_step").tolist(), first_events.numbers("t").tolist()
    attempts = []
    for index, number in enumerate(numbers):
        own = positions[number]
        unrecorded = "running" if is_alive and index == len(numbers) - 1 else "killed"
        attempts.append(
            Attempt(
                number=number,
                from_step=first_steps[index] if np.isnan(from_steps[index]) else int(from_steps[index]),
                last_step=int(steps[own].max()),
                started_at=starts[index],
                ended_at=float(times[own[-1]]),
                outcome=outcomes.get(number, unrecorded),
            )
        )
    return attempts
