"""How many of those asked were right, with an interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nsa_lab.runs.evaluation import wilson


@dataclass(frozen=True)
class Share:
    """`right` of `asked`, the share that is, and its 95 % interval by Wilson (1927), from `low` to `high`."""

    right: int
    asked: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, right: int, asked: int) -> Share | None:
        """None where nothing was asked."""
        return cls(right, asked, right / asked, *wilson(right, asked)) if asked else None

    @classmethod
    def together(cls, shares: Iterable[Share | None]) -> Share | None:
        """All that was asked, as one share."""
        told = [share for share in shares if share]
        return cls.of(sum(share.right for share in told), sum(share.asked for share in told))
