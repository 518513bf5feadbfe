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
    _memo: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])

    @property
    def width(self) -> int:
        return self.positions.shape[1]

    @property
    def is_prefill(self) -> bool:
        """Whether there is nothing before them in any sequence; a captured step never begins."""
        return self.starts is not None and not any(self.starts)

    def select_rotary(self, table: Rotary) -> Rotary:
        """Of the new tokens, [B, S, R/2] each, of a table of all positions [capacity, R/2]; of padding past it, any."""
        cos, sin = table
        places = self._memoize(("angles", len(cos)), lambda: self.positions.clamp_max(len(cos) - 1))
        return self._memoize(("cos", len(cos)), lambda: cos[places]), self._memoize(("sin", len(sin)), lambda: sin[places])

    def get_row_indices(self, capacity: int) -> Tensor:
        """Places of the new tokens in `TokenRows`, int64 [B * S]."""
        return self._memoize(("rows", capacity), lambda: _compute_row_indices(self.rows, self.positions, capacity))

    def get_ring_indices(self, n_slots: int) -> Tensor:
        """Places of the new tokens in a `Ring`, int64 [B * S]."""
        return self._memoize(("ring", n_slots), lambda: _compute_ring_indices(self.rows, self.positions, n_slots))

    def get_initial_ring_tokens(self, n_slots: int) -> Tensor:
        """Which of the new tokens a `Ring` begins with, by their places among them all, int64 [B * slots]."""

        def latest() -> Tensor:
            last = self.counts[:, None] - 1
            slot = torch.arange(n_slots, device=last.device)
            return (self.rows * self.width + (last - (last - slot) % n_slots).clamp_min(0)).flatten()

        return self._memoize(("beginning", n_slots), latest)

    def get_previous_ring_indices(self, n_tokens: int, n_slots: int) -> Tensor:
        """Places in a `Ring` of so many tokens before the new ones, int64 [B * tokens]; where there are fewer, any."""

        def before() -> Tensor:
            back = torch.arange(-n_tokens, 0, device=self.positions.device)
            return _compute_ring_indices(self.rows, self.positions[:, :1] + back, n_slots)

        return self._memoize(("before", n_tokens, n_slots), before)

    def get_block_token_indices(self, nsa: NSAConfig, n_blocks: int, n_slots: int) -> Tensor:
        """Places in a `Ring` of the tokens of so many blocks from the first that is not complete, int64 [B * tokens]."""

        def tokens() -> Tensor:
            first = self._get_first_block(nsa) * nsa.d
            each = torch.arange((n_blocks - 1) * nsa.d + nsa.l, device=first.device)
            return _compute_ring_indices(self.rows, first + each, n_slots)

        return self._memoize(("tokens", nsa.l, nsa.d, n_blocks, n_slots), tokens)

    def get_block_indices(self, nsa: NSAConfig, n_blocks: int, capacity: int) -> Tensor:
        """Places in `TokenRows` of so many blocks from the first that is not complete, int64 [B * blocks]."""

        def places() -> Tensor:
            first = self._get_first_block(nsa)
            return _compute_row_indices(self.rows, first + torch.arange(n_blocks, device=first.device), capacity)

        return self._memoize(("blocks", nsa.l, nsa.d, n_blocks, capacity), places)

    def _get_first_block(self, nsa: NSAConfig) -> Tensor:
        """The first block that was not complete before this step, int64 [B, 1]."""
        before = self.positions[:, :1] - 1
        return self._memoize(("first", nsa.l, nsa.d), lambda: geometry.visible_compressed(before, nsa))

    def _memoize(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]


def _compute_row_indices(rows: Tensor, positions: Tensor, capacity: int) -> Tensor:
    """Of places [B, n] in each sequence, those past `capacity` in the row that follows all."""
    return torch.where(positions < capacity, rows * capacity + positions, len(rows) * capacity).flatten()


def _compute_ring_indices(rows: Tensor, positions: Tensor, n_slots: int) -> Tensor:
    return (rows * n_slots + positions % n_slots).flatten()
