"""Storage of a cache: rows for all tokens of a sequence, rings for the latest tokens.

Shape suffixes: B batch, S new tokens, R slots of a ring, G key/value groups, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.cache_step import Step


class TokenRows:
    """Storage [B, capacity, G, D], with one extra row for padding beyond the capacity. It has no gradients.

    `dtype`: of the stored values; None: the dtype of `like`.
    """

    def __init__(
        self, capacity: int, groups: int, width: int, batch: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        self._set_storage(capacity, like.new_zeros(batch * capacity + 1, groups, width, dtype=dtype or like.dtype), batch)

    @property
    def n_slots(self) -> int:
        """Slots of the same storage as a ring, which never wraps."""
        return self.capacity

    def _set_storage(self, capacity: int, flat: Tensor, batch: int) -> None:
        self.capacity, self._flat = capacity, flat
        self.rows = flat[:-1].unflatten(0, (batch, capacity))

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens and keep the contents."""
        old, batch = self.rows, len(self.rows)
        self._set_storage(capacity, old.new_zeros(batch * capacity + 1, *old.shape[2:]), batch)
        self.rows[:, : old.shape[1]] = old

    def put(self, x: Tensor, step: Step) -> None:
        """Write the new tokens x [B, S, G, D]."""
        self.put_rows(x, step.get_row_indices(self.capacity))

    def put_rows(self, x: Tensor, indices: Tensor) -> None:
        """Write x [B, S, G, D] at `indices` from `Step`."""
        rows, flat = x.flatten(0, 1).to(self._flat.dtype), self._flat
        if flat.dtype.itemsize == 1:  # index_copy_ does not support fp8
            rows, flat = rows.view(torch.uint8), flat.view(torch.uint8)
        flat.index_copy_(0, indices, rows)

    def read(self, indices: Tensor) -> Tensor:
        """Return the tokens at `indices`, int64 [B * n] from `Step`: [B, n, G, D]."""
        return self._flat.index_select(0, indices).unflatten(0, (len(self.rows), -1))


class Ring:
    """Ring buffer [B, R, G, D]: the token at position p is in slot p % R."""

    def __init__(self, n_slots: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self._flat = like.new_zeros(batch * n_slots, groups, width)
        self.rows = self._flat.unflatten(0, (batch, n_slots))

    @property
    def n_slots(self) -> int:
        return self.rows.shape[1]

    def grow(self, capacity: int) -> None:
        """Do nothing: the size of a ring does not depend on the capacity."""

    def put(self, x: Tensor, step: Step) -> None:
        """Append x [B, S, G, D]. S <= `kv_cache_size.MAX_STEP_TOKENS`, except at prefill."""
        x = x.flatten(0, 1).to(self._flat.dtype)
        if step.is_prefill:
            self._flat.copy_(x.index_select(0, step.get_initial_ring_tokens(self.n_slots)))
        else:
            self._flat.index_copy_(0, step.get_ring_indices(self.n_slots), x)

    def read(self, indices: Tensor) -> Tensor:
        """Return the tokens at `indices`, int64 [B * n] from `Step`: [B, n, G, D]."""
        return self._flat.index_select(0, indices).unflatten(0, (len(self.rows), -1))


TokenStorage = TokenRows | Ring
"""Storage of new tokens; as a ring, a token at position p is in slot p % n_slots of `rows`."""


class LatestTokens:
    """Ring of the latest tokens, which the n-grams of new tokens need."""

    def __init__(self, max_ngram: int, batch: int, lengths: Tensor) -> None:
        self._n_previous = max_ngram - 1
        self.ring = Ring(kv_cache_size.count_ngram_slots(max_ngram), 1, 1, batch, lengths.long())

    def read_previous(self, step: Step) -> Tensor | None:
        """Return the tokens before the new ones, int64 [B, n - 1], undefined before position 0. None at prefill."""
        if step.is_prefill:
            return None
        return self.ring.read(step.get_previous_ring_indices(self._n_previous, self.ring.n_slots))[..., 0, 0]

    def put(self, tokens: Tensor, step: Step) -> None:
        """Append tokens [B, S]."""
        self.ring.put(tokens[..., None, None], step)


class PreviousKeys:
    """Ring of the latest keys before the short convolution, which combines each key with the previous one."""

    def __init__(self, n_sets: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self._sets, self._groups = n_sets, groups
        self.ring = Ring(kv_cache_size.count_previous_key_slots(), n_sets * groups, width, batch, like)

    def read_previous(self, step: Step) -> Tensor | None:
        """Return the previous token's keys, [B, 1, sets, G, D]; 0 for an empty sequence, None at prefill."""
        if step.is_prefill:
            return None
        previous = self.ring.read(step.get_previous_ring_indices(1, self.ring.n_slots)).unflatten(
            2, (self._sets, self._groups)
        )
        return previous.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)

    def put(self, k_before_conv: Tensor | None, step: Step) -> None:
        """Append keys [B, S, sets, G, D], as returned by the layer; None does nothing."""
        if k_before_conv is not None:
            self.ring.put(k_before_conv.flatten(2, 3), step)
