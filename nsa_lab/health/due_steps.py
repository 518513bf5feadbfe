"""The steps at which a record must have an entry, stored as ranges, because their number may be large; and their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from nsa_lab.config import TrainConfig
from nsa_lab.runs.history import History, find_stages

N_SHOWN = 5
INTERVALS: dict[str, Callable[[TrainConfig], int]] = {
    "log": lambda train: train.log_every,
    "statistics": lambda train: train.stats_every,
    "evaluation": lambda train: train.eval_every,
    "save": lambda train: train.save_every,
}
"""Name of an interval -> its value in the settings of an attempt; 0: never."""


class DueSteps:
    """Completed steps that are multiples of an interval of their attempt, with `extra` and without `excluded` steps."""

    def __init__(
        self, history: History, intervals: Iterable[str], extra: Iterable[int] = (), excluded: Iterable[int] = ()
    ) -> None:
        self._ranges: list[tuple[int, range]] = []  # (sign, range): intersections are subtracted
        for step_range in history.step_ranges():
            if step_range.config:
                every = list(filter(None, (INTERVALS[name](step_range.config.train) for name in intervals)))
                self._ranges += [(1, step_range.list_multiples(n)) for n in every]
                if len(every) > 1:
                    self._ranges.append((-1, step_range.list_multiples(math.lcm(*every))))
        self._excluded = {step for step in excluded if self._has_multiple(step)}
        self._extra = {step for step in extra if not self._has_multiple(step)} - set(excluded)

    def __len__(self) -> int:
        return sum(sign * len(steps) for sign, steps in self._ranges) + len(self._extra) - len(self._excluded)

    def find_missing(self, recorded: Sequence[int] | np.ndarray) -> tuple[int, list[int]]:
        """Return the number of due steps that are not `recorded`, and the first of them, at most `N_SHOWN`."""
        done = np.unique(np.append(np.array(recorded, dtype=np.int64), list(self._excluded)).astype(np.int64))
        extra = sorted(self._extra - set(done.tolist()))
        count, first = len(extra), extra[:N_SHOWN]
        for sign, steps in self._ranges:
            found = _intersect(done, steps)
            count += sign * (len(steps) - len(found))
            if sign > 0:
                candidates = np.array(steps[: len(found) + N_SHOWN], dtype=np.int64)
                first += np.setdiff1d(candidates, found)[:N_SHOWN].tolist()
        return count, sorted(set(first))[:N_SHOWN]

    def _has_multiple(self, step: int) -> bool:
        return any(step in steps for _, steps in self._ranges)


def _intersect(steps: np.ndarray, due: range) -> np.ndarray:
    """Return the members of ascending `steps` that are in `due`."""
    inside = steps[slice(*np.searchsorted(steps, (due.start, due.stop)))]
    return inside[(inside - due.start) % due.step == 0]


def count_tokens(history: History, steps: np.ndarray) -> np.ndarray:
    """Return the number of tokens of the steps up to each of `steps`, int64."""
    plan = history.config.train.plan
    per_step = np.array([stage.tokens_per_step for stage in plan], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum([stage.steps for stage in plan])[:-1]]).astype(np.int64)
    tokens_before = np.concatenate([[0], np.cumsum([stage.steps * stage.tokens_per_step for stage in plan])[:-1]])
    stages = find_stages(steps, history.config.train)
    return tokens_before.astype(np.int64)[stages] + (steps - starts[stages]) * per_step[stages]
