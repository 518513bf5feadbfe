"""One step of new tokens, and their indices in the storage of a cache.

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

    Their indices depend only on the shape of the storage, so keys, values and all layers share them: each is computed at
    its first use and memoized. Indices count through the flattened batch, so that a write is one `index_copy_`.
    """

    starts: tuple[int, ...] | None
    """Number of earlier tokens per sequence; None in a captured step, which is replayed at any lengths."""
    lengths: Tensor
    """The same as a tensor on the device, int32 [B]."""
    width: int
    """Number of new tokens of every sequence, S."""
    counts: Tensor
    """Number of new tokens that are not padding, int64 [B]."""
    rows: Tensor
    """0 .. B-1, int64 [B, 1]."""
    _memo: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])
    _copies: dict[torch.device, Step] = field(default_factory=dict[torch.device, "Step"])

    def to(self, device: torch.device) -> Step:
        """Return the step with its tensors on `device`, copied once."""
        if device == self.lengths.device:
            return self
        if device not in self._copies:
            lengths, counts, rows = (x.to(device) for x in (self.lengths, self.counts, self.rows))
            self._copies[device] = Step(self.starts, lengths, self.width, counts, rows)
        return self._copies[device]

    @property
    def positions(self) -> Tensor:
        """Positions of the new tokens, int64 [B, S]."""

        def compute() -> Tensor:
            return self.lengths[:, None] + torch.arange(self.width, device=self.lengths.device)

        return self._memoize("positions", compute)

    @property
    def is_prefill(self) -> bool:
        """Return True if no sequence has earlier tokens. Always False in a captured step."""
        return self.starts is not None and not any(self.starts)

    def select_rotary(self, table: Rotary) -> Rotary:
        """Return cos and sin of the new tokens, [B, S, R/2], from a table [capacity, R/2]; undefined for excess padding."""
        cos, sin = table
        positions = self._memoize(("angles", len(cos)), lambda: self.positions.clamp_max(len(cos) - 1))
        return self._memoize(("cos", len(cos)), lambda: cos[positions]), self._memoize(
            ("sin", len(sin)), lambda: sin[positions]
        )

    def get_row_indices(self, capacity: int) -> Tensor:
        """Return indices of the new tokens in `TokenRows`, int64 [B * S]."""
        return self._memoize(("rows", capacity), lambda: _compute_row_indices(self.rows, self.positions, capacity))

    def get_ring_indices(self, n_slots: int) -> Tensor:
        """Return indices of the new tokens in a `Ring`, int64 [B * S]."""
        return self._memoize(("ring", n_slots), lambda: _compute_ring_indices(self.rows, self.positions, n_slots))

    def get_initial_ring_tokens(self, n_slots: int) -> Tensor:
        """Return the index of the new token for each slot of a `Ring` at prefill, int64 [B * n_slots]."""

        def compute() -> Tensor:
            last = self.counts[:, None] - 1
            slot = torch.arange(n_slots, device=last.device)
            return (self.rows * self.width + (last - (last - slot) % n_slots).clamp_min(0)).flatten()

        return self._memoize(("beginning", n_slots), compute)

    def get_previous_ring_indices(self, n_tokens: int, n_slots: int) -> Tensor:
        """Return `Ring` indices of the `n_tokens` before the new ones, int64 [B * n_tokens]; wrapped at position 0."""

        def compute() -> Tensor:
            offsets = torch.arange(-n_tokens, 0, device=self.positions.device)
            return _compute_ring_indices(self.rows, self.positions[:, :1] + offsets, n_slots)

        return self._memoize(("before", n_tokens, n_slots), compute)

    def get_block_token_indices(self, nsa: NSAConfig, n_blocks: int, n_slots: int) -> Tensor:
        """Return `Ring` indices of the tokens of `n_blocks` blocks from the first incomplete one, int64 [B * tokens]."""

        def compute() -> Tensor:
            first = self._get_first_block(nsa) * nsa.d
            offsets = torch.arange((n_blocks - 1) * nsa.d + nsa.l, device=first.device)
            return _compute_ring_indices(self.rows, first + offsets, n_slots)

        return self._memoize(("tokens", nsa.l, nsa.d, n_blocks, n_slots), compute)

    def get_block_indices(self, nsa: NSAConfig, n_blocks: int, capacity: int) -> Tensor:
        """Return `TokenRows` indices of `n_blocks` blocks from the first incomplete one, int64 [B * n_blocks]."""

        def compute() -> Tensor:
            first = self._get_first_block(nsa)
            return _compute_row_indices(self.rows, first + torch.arange(n_blocks, device=first.device), capacity)

        return self._memoize(("blocks", nsa.l, nsa.d, n_blocks, capacity), compute)

    def get_block_positions(self, nsa: NSAConfig, n_blocks: int) -> Tensor:
        """Return the positions of the first tokens of `n_blocks` blocks from the first incomplete one, int64 [B, n]."""

        def compute() -> Tensor:
            first = self._get_first_block(nsa)
            return (first + torch.arange(n_blocks, device=first.device)) * nsa.d

        return self._memoize(("starts", nsa.l, nsa.d, n_blocks), compute)

    def _get_first_block(self, nsa: NSAConfig) -> Tensor:
        """Return the first block that was incomplete before this step, int64 [B, 1]."""
        last_position = self.positions[:, :1] - 1
        return self._memoize(("first", nsa.l, nsa.d), lambda: geometry.visible_compressed(last_position, nsa))

    def _memoize(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]


def _compute_row_indices(rows: Tensor, positions: Tensor, capacity: int) -> Tensor:
    """Return flat indices of `positions` [B, n]. Positions beyond `capacity` map to the extra last row."""
    return torch.where(positions < capacity, rows * capacity + positions, len(rows) * capacity).flatten()


def _compute_ring_indices(rows: Tensor, positions: Tensor, n_slots: int) -> Tensor:
    return (rows * n_slots + positions % n_slots).flatten()
