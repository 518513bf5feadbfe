"""Kernels that `nsa-lab bench tune` can tune. Needs no torch, so that a wrong name is refused at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A function of the launch table, the part of attention that calls it, and whether its backward pass does."""

    function: str
    part: str
    backward: bool


ENTRIES = {
    f"{function}, {part}": Entry(function, part, backward)
    for part in ("compressed", "window")
    for function, backward in (("band_forward", False), ("band_dq", True), ("band_dkv", True))
} | {
    "choice": Entry("block_topk", "choice", False),
    "selected_union": Entry("selected_union", "selected, smooth", True),
    "selected_items": Entry("selected_items", "selected, smooth", True),
}


def parse_kernel(text: str) -> str:
    """Return `text` if it is a key of `ENTRIES`. Raises ValueError otherwise."""
    if text not in ENTRIES:
        raise ValueError(f"kernel {text!r}: expected one of {', '.join(map(repr, ENTRIES))}")
    return text
