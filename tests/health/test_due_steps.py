"""Steps at which an entry is due, compared with sets."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from nsa_lab.health.due_steps import N_SHOWN, DueSteps
from nsa_lab.runs.history import StepRange


def make_history(rng: random.Random) -> Any:
    """Return a record with attempts of random intervals; the configuration of some is unknown."""
    ranges, first = [], 1
    for attempt in range(rng.randrange(1, 4)):
        last = first + rng.randrange(60)
        train = SimpleNamespace(log_every=rng.randrange(0, 9), stats_every=rng.randrange(1, 9))
        config = SimpleNamespace(train=train) if rng.random() < 0.9 else None
        ranges.append(StepRange(attempt, first, last, config))  # pyright: ignore[reportArgumentType]
        first = last + 1
    return SimpleNamespace(step_ranges=lambda: ranges)


def test_due_steps_equal_sets() -> None:
    rng = random.Random(0)
    for _ in range(500):
        history = make_history(rng)
        extra, excluded = ([rng.randrange(200) for _ in range(rng.randrange(4))] for _ in range(2))
        due = DueSteps(history, ("log", "statistics"), extra, excluded)
        expected = {
            step
            for part in history.step_ranges()
            if part.config
            for every in (part.config.train.log_every, part.config.train.stats_every)
            if every
            for step in range(part.first, part.last + 1)
            if step % every == 0
        }
        expected = (expected | set(extra)) - set(excluded)
        recorded = [step for step in range(200) if rng.random() < 0.7]
        missing = sorted(expected - set(recorded))
        assert len(due) == len(expected)
        assert due.find_missing(recorded) == (len(missing), missing[:N_SHOWN])


def test_number_of_due_steps_may_be_huge() -> None:
    train = SimpleNamespace(log_every=1, stats_every=2)
    parts = [StepRange(1, 1, 2 * 10**12, SimpleNamespace(train=train))]  # pyright: ignore[reportArgumentType]
    history: Any = SimpleNamespace(step_ranges=lambda: parts)
    count, first = DueSteps(history, ("log", "statistics")).find_missing([1, 2, 5])
    assert (count, first) == (2 * 10**12 - 3, [3, 4, 6, 7, 8])
