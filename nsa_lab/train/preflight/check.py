"""The outcome of one check before a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreflightCheck:
    """`value` is what was found and `limit` what was asked for, both with their units, as a person reads them.

    `numbers` are what was measured on the way, by name with the unit in it.
    """

    name: str
    ok: bool
    value: str
    limit: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
