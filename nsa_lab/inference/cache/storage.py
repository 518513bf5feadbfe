"""Where tokens are kept: rows for every token of a sequence, rings for the latest.

Shape suffixes: B batch, S new tokens, R slots of a ring, G key/value groups, D head width.
"""

from __future__ import annotations

from torch import Tensor

from nsa_lab.inference import memory
from nsa_lab.inference.cache.step import Step
from nsa_lab.model import ShortConvolution


class TokenRows:
    """[B, capacity, G, D], and one row more, where padding past the capacity goes. Made and written without gradients."""

    def __init__(self, capacity: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self._lay_out(capacity, like.new_zeros(batch * capacity + 1, groups, width), batch)

    def _lay_out(self, capacity: int, kept: Tensor, batch: int) -> None:
        self.capacity, self._kept = capacity, kept
        self.rows = kept[:-1].unflatten(0, (batch, capacity))

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens; what is there stays."""
        there, batch = self.rows, len(self.rows)
        self._lay_out(capacity, there.new_zeros(batch * capacity + 1, *there.shape[2:]), batch)
        self.rows[:, : there.shape[1]] = there

    def put(self, x: Tensor, places: Tensor) -> None:
        """x [B, S, G, D] at `places`, as `Step` gives them."""
        self._kept.index_copy_(0, places, x.flatten(0, 1))


class Ring:
    """[B, R, G, D]: the token at position p lies in slot p % R."""

    def __init__(self, slots: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self._flat = like.new_zeros(batch * slots, groups, width)
        self.kept = self._flat.unflatten(0, (batch, slots))

    @property
    def slots(self) -> int:
        return self.kept.shape[1]

    def put(self, x: Tensor, step: Step) -> None:
        """x [B, S, G, D] behind what there is, S <= `memory.STEP`; from position 0 any S."""
        x = x.flatten(0, 1)
        if step.begins:
            self._flat.copy_(x.index_select(0, step.beginning_of_ring(self.slots)))
        else:
            self._flat.index_copy_(0, step.in_ring(self.slots), x)

    def read(self, places: Tensor) -> Tensor:
        """Tokens at `places`, int64 [B * n] as `Step` gives them -> [B, n, G, D]."""
        return self._flat.index_select(0, places).unflatten(0, (len(self.kept), -1))


class Latest:
    """The tokens before new ones, as many as an n-gram reaches back."""

    def __init__(self, longest: int, batch: int, lengths: Tensor) -> None:
        self._reach = longest - 1
        self.ring = Ring(memory.latest_slots(longest), 1, 1, batch, lengths.long())

    def before(self, step: Step) -> Tensor | None:
        """int64 [B, n - 1]; of a sequence that has fewer, what stands in front of them is any. None: none has any."""
        if step.begins:
            return None
        return self.ring.read(step.before_in_ring(self._reach, self.ring.slots))[..., 0, 0]

    def put(self, tokens: Tensor, step: Step) -> None:
        """tokens [B, S]"""
        self.ring.put(tokens[..., None, None], step)


class Past:
    """Keys of the latest tokens as they came, before the convolution that mixes each with the one before."""

    def __init__(self, convolution: ShortConvolution, batch: int, like: Tensor) -> None:
        self._convolution = convolution
        _, self._branches, self._groups, width = convolution.weight.shape
        self.ring = Ring(memory.past_slots(), self._branches * self._groups, width, batch, like)

    @property
    def mix(self) -> Tensor:
        """The convolution's weights, [2, branches G, D]."""
        return self._convolution.weight.flatten(1, 2)

    def before(self, step: Step) -> Tensor | None:
        """Those of the token before new ones, [B, 1, branches, G, D]: zeros where a sequence has none; None: none has."""
        if step.begins:
            return None
        kept = self.ring.read(step.before_in_ring(1, self.ring.slots)).unflatten(2, (self._branches, self._groups))
        return kept.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)

    def put(self, unmixed: Tensor | None, step: Step) -> None:
        """unmixed [B, S, branches, G, D], as the layer gives them."""
        if unmixed is not None:
            self.ring.put(unmixed.flatten(2, 3), step)
