"""Proportions of correct answers with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nsa_lab.runs.evaluation import compute_wilson_interval


@dataclass(frozen=True)
class Proportion:
    """`right` correct of `total` answers, their ratio `share`, and its 95% Wilson interval [`low`, `high`]."""

    right: int
    total: int
    share: float
    low: float
    high: float

    @classmethod
    def from_counts(cls, right: int, total: int) -> Proportion | None:
        """Return the proportion right / total; None if `total` is 0."""
        return cls(right, total, right / total, *compute_wilson_interval(right, total)) if total else None

    @classmethod
    def pool(cls, proportions: Iterable[Proportion | None]) -> Proportion | None:
        """Return the proportion over the answers of all given proportions; None if there are none."""
        known = [proportion for proportion in proportions if proportion]
        return cls.from_counts(sum(proportion.right for proportion in known), sum(proportion.total for proportion in known))
