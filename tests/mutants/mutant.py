"""One planted fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs exactly once in the module's source, by `new`.

    `module` is relative to nsa_lab. `tier` names the command whose tests catch the mutant: `make test` or `make nightly`.
    """

    name: str
    module: str
    old: str
    new: str
    tier: Literal["test", "nightly"] = "test"
