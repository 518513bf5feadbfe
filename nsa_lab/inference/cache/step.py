"""A step: new tokens of every sequence, and their places in what a cache keeps.

Shape suffixes: B batch, S new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.model import Rotary


@dataclass(frozen=True)
class Step:
    """New tokens of every sequence.

    Where they go, in a cache of which shape, is the same for keys and values and in all layers: it is worked out for the
    first that asks. Places are numbered through all sequences, so that a write is one copy of whole rows.
    """

    starts: tuple[int, ...] | None
    """Tokens of each sequence before these; None in a step that is captured once and replayed at any lengths."""
    lengths: Tensor
    """The same, int32 [B] on the device."""
    positions: Tensor
    """Of the new tokens, int64 [B, S]."""
    counts: Tensor
    """How many of them are no padding, int64 [B]."""
    rows: Tensor
    """0 .. B-1, int64 [B, 1]."""
    _known: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])

    @property
    def width(self) -> int:
        return self.positions.shape[1]

    @property
    def begins(self) -> bool:
        """Whether there is nothing before them in any sequence; a captured step never begins."""
        return self.starts is not None and not any(self.starts)

    def rotary(self, table: Rotary) -> Rotary:
        """Of the new tokens, [B, S, R/2] each, of a table of all positions [capacity, R/2]; of padding past it, any."""
        cos, sin = table
        places = self._once(("angles", len(cos)), lambda: self.positions.clamp_max(len(cos) - 1))
        return self._once(("cos", len(cos)), lambda: cos[places]), self._once(("sin", len(sin)), lambda: sin[places])

    def in_rows(self, capacity: int) -> Tensor:
        """Places of the new tokens in `TokenRows`, int64 [B * S]."""
        return self._once(("rows", capacity), lambda: _in_rows(self.rows, self.positions, capacity))

    def in_ring(self, slots: int) -> Tensor:
        """Places of the new tokens in a `Ring`, int64 [B * S]."""
        return self._once(("ring", slots), lambda: _in_ring(self.rows, self.positions, slots))

    def beginning_of_ring(self, slots: int) -> Tensor:
        """Which of the new tokens a `Ring` begins with, by their places among them all, int64 [B * slots]."""

        def latest() -> Tensor:
            last = self.counts[:, None] - 1
            slot = torch.arange(slots, device=last.device)
            return (self.rows * self.width + (last - (last - slot) % slots).clamp_min(0)).flatten()

        return self._once(("beginning", slots), latest)

    def before_in_ring(self, tokens: int, slots: int) -> Tensor:
        """Places in a `Ring` of so many tokens before the new ones, int64 [B * tokens]; where there are fewer, any."""

        def before() -> Tensor:
            back = torch.arange(-tokens, 0, device=self.positions.device)
            return _in_ring(self.rows, self.positions[:, :1] + back, slots)

        return self._once(("before", tokens, slots), before)

    def tokens_of_blocks(self, nsa: NSAConfig, blocks: int, slots: int) -> Tensor:
        """Places in a `Ring` of the tokens of so many blocks from the first that is not complete, int64 [B * tokens]."""

        def tokens() -> Tensor:
            first = self._first_block(nsa) * nsa.d
            each = torch.arange((blocks - 1) * nsa.d + nsa.l, device=first.device)
            return _in_ring(self.rows, first + each, slots)

        return self._once(("tokens", nsa.l, nsa.d, blocks, slots), tokens)

    def in_blocks(self, nsa: NSAConfig, blocks: int, capacity: int) -> Tensor:
        """Places in `TokenRows` of so many blocks from the first that is not complete, int64 [B * blocks]."""

        def places() -> Tensor:
            first = self._first_block(nsa)
            return _in_rows(self.rows, first + torch.arange(blocks, device=first.device), capacity)

        return self._once(("blocks", nsa.l, nsa.d, blocks, capacity), places)

    def _first_block(self, nsa: NSAConfig) -> Tensor:
        """The first block that was not complete before this step, int64 [B, 1]."""
        before = self.positions[:, :1] - 1
        return self._once(("first", nsa.l, nsa.d), lambda: geometry.visible_compressed(before, nsa))

    def _once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _in_rows(rows: Tensor, places: Tensor, capacity: int) -> Tensor:
    """Of places [B, n] in each sequence, those past `capacity` in the row that follows all."""
    return torch.where(places < capacity, rows * capacity + places, len(rows) * capacity).flatten()


def _in_ring(rows: Tensor, positions: Tensor, slots: int) -> Tensor:
    return (rows * slots + positions % slots).flatten()
