"""Proportions of correct answers with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nsa_lab.runs.evaluation import compute_wilson_interval


@dataclass(frozen=True)
class Proportion:
    """`right` correct of `asked` answers, their ratio `share`, and its 95% Wilson interval [`low`, `high`]."""

    right: int
    asked: int
    share: float
    low: float
    high: float

    @classmethod
    def from_counts(cls, right: int, asked: int) -> Proportion | None:
        """Return the proportion right / asked; None if `asked` is 0."""
        return cls(right, asked, right / asked, *compute_wilson_interval(right, asked)) if asked else None

    @classmethod
    def pool(cls, proportions: Iterable[Proportion | None]) -> Proportion | None:
        """Return the proportion over the answers of all given proportions; None if there are none."""
        known = [proportion for proportion in proportions if proportion]
        return cls.from_counts(sum(proportion.right for proportion in known), sum(proportion.asked for proportion in known))
