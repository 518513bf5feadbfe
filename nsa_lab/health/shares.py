"""How many of those asked were right, with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)


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


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The shares whose score test at 5 % does not reject `right` of `asked`, `asked` > 0: the lowest and the highest."""
    share, z2 = right / asked, Z**2 / asked
    middle = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * share * (1 - share) + z2**2 / 4) / (1 + z2)
    # At 0 and at 1 the bound is that very number, but for rounding.
    return 0.0 if right == 0 else middle - half, 1.0 if right == asked else middle + half
