"""Where tokens are kept: rows for every token of a sequence, rings for the latest.

Shape suffixes: B batch, S new tokens, R slots of a ring, G key/value groups, D head width.
"""

from __future__ import annotations

from torch import Tensor

from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.model import ShortConvolution


class TokenRows:
    """[B, capacity, G, D], and one row more, where padding past the capacity goes. Made and written without gradients."""

    def __init__(self, capacity: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self._set_storage(capacity, like.new_zeros(batch * capacity + 1, groups, width), batch)

    def _set_storage(self, capacity: int, flat: Tensor, batch: int) -> None:
        self.capacity, self._flat = capacity, flat
        self.rows = flat[:-1].unflatten(0, (batch, capacity))

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens; what is there stays."""
        there, batch = self.rows, len(self.rows)
        self._set_storage(capacity, there.new_zeros(batch * capacity + 1, *there.shape[2:]), batch)
        self.rows[:, : there.shape[1]] = there

    def put(self, x: Tensor, indices: Tensor) -> None:
        """x [B, S, G, D] at `places`, as `Step` gives them."""
        self._flat.index_copy_(0, indices, x.flatten(0, 1))


class Ring:
    """[B, R, G, D]: the token at position p lies in slot p % R."""

    def __init__(self, n_slots: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self._flat = like.new_zeros(batch * n_slots, groups, width)
        self.data = self._flat.unflatten(0, (batch, n_slots))

    @property
    def n_slots(self) -> int:
        return self.data.shape[1]

    def put(self, x: Tensor, step: Step) -> None:
        """x [B, S, G, D] behind what there is, S <= `memory.STEP`; from position 0 any S."""
        x = x.flatten(0, 1)
        if step.is_prefill:
            self._flat.copy_(x.index_select(0, step.get_initial_ring_tokens(self.n_slots)))
        else:
            self._flat.index_copy_(0, step.get_ring_indices(self.n_slots), x)

    def read(self, indices: Tensor) -> Tensor:
        """Tokens at `places`, int64 [B * n] as `Step` gives them -> [B, n, G, D]."""
        return self._flat.index_select(0, indices).unflatten(0, (len(self.data), -1))


class LatestTokens:
    """The tokens before new ones, as many as an n-gram reaches back."""

    def __init__(self, max_ngram: int, batch: int, lengths: Tensor) -> None:
        self._n_previous = max_ngram - 1
        self.ring = Ring(kv_cache_size.count_ngram_slots(max_ngram), 1, 1, batch, lengths.long())

    def read_previous(self, step: Step) -> Tensor | None:
        """int64 [B, n - 1]; of a sequence that has fewer, what stands in front of them is any. None: none has any."""
        if step.is_prefill:
            return None
        return self.ring.read(step.get_previous_ring_indices(self._n_previous, self.ring.n_slots))[..., 0, 0]

    def put(self, tokens: Tensor, step: Step) -> None:
        """tokens [B, S]"""
        self.ring.put(tokens[..., None, None], step)


class PreviousKeys:
    """Keys of the latest tokens as they came, before the convolution that mixes each with the one before."""

    def __init__(self, convolution: ShortConvolution, batch: int, like: Tensor) -> None:
        self._convolution = convolution
        _, self._branches, self._groups, width = convolution.weight.shape
        self.ring = Ring(kv_cache_size.count_previous_key_slots(), self._branches * self._groups, width, batch, like)

    @property
    def conv_weights(self) -> Tensor:
        """The convolution's weights, [2, branches G, D]."""
        return self._convolution.weight.flatten(1, 2)

    def read_previous(self, step: Step) -> Tensor | None:
        """Those of the token before new ones, [B, 1, branches, G, D]: zeros where a sequence has none; None: none has."""
        if step.is_prefill:
            return None
        kept = self.ring.read(step.get_previous_ring_indices(1, self.ring.n_slots)).unflatten(
            2, (self._branches, self._groups)
        )
        return kept.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)

    def put(self, k_before_conv: Tensor | None, step: Step) -> None:
        """unmixed [B, S, branches, G, D], as the layer gives them."""
        if k_before_conv is not None:
            self.ring.put(k_before_conv.flatten(2, 3), step)
