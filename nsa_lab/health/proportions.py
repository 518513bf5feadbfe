"""How many of those asked were right, with an interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nsa_lab.runs.evaluation import compute_wilson_interval


@dataclass(frozen=True)
class Proportion:
    """`right` of `asked`, the share that is, and its 95 % interval by Wilson (1927), from `low` to `high`."""

    right: int
    asked: int
    share: float
    low: float
    high: float

    @classmethod
    def from_counts(cls, right: int, asked: int) -> Proportion | None:
        """None where nothing was asked."""
        return cls(right, asked, right / asked, *compute_wilson_interval(right, asked)) if asked else None

    @classmethod
    def pool(cls, shares: Iterable[Proportion | None]) -> Proportion | None:
        """All that was asked, as one share."""
        told = [share for share in shares if share]
        return cls.from_counts(sum(share.right for share in told), sum(share.asked for share in told))
