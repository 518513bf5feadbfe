"""Token by token with a cache: a forward pass over one new token reads what NSA reads, not the whole past.

Invariant: the logits of a token are those of a full forward pass over everything up to it; how the tokens were split into
`append` calls does not enter.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from nsa_lab.inference.cache import DenseCache, NSACache
from nsa_lab.model import Block, DenseAttention, NSATransformer, SparseAttention, rotary_table


class Decoder:
    """Feeds a model token by token. Holds the caches of `batch` sequences of at most `capacity` tokens."""

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1) -> None:
        self._model, self.capacity, self.position = model, capacity, 0
        config, weight = model.config, model.head.weight
        self._blocks = [cast(Block, block) for block in model.blocks]
        self._caches = [_cache_of(block.attention, capacity, batch, weight) for block in self._blocks]
        self._rotary = rotary_table(capacity, config.rotary_width, config.rope_theta, weight.device)

    @torch.no_grad()
    def append(self, tokens: Tensor) -> Tensor:
        """Logits [B, n, V] of the tokens int64 [B, n] that follow those given before. Raises ValueError past `capacity`.

        The first call runs them all at once; later ones run one after the other.
        """
        end = self.position + tokens.shape[1]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a decoder of capacity {self.capacity}; make it larger")
        if self.position == 0:
            return self._advance(tokens)
        return torch.cat([self._advance(one) for one in tokens.split(1, dim=1)], dim=1)

    def _advance(self, tokens: Tensor) -> Tensor:
        model, end = self._model, self.position + tokens.shape[1]
        cos, sin = (table[self.position : end] for table in self._rotary)
        x = model.embedding(tokens)
        for block, cache in zip(self._blocks, self._caches, strict=True):
            x = x + cache.attend(block.attention_norm(x), (cos, sin), self.position)
            x = x + block.mlp(block.mlp_norm(x))
        self.position = end
        return model.head(model.norm(x))


def _cache_of(
    attention: SparseAttention | DenseAttention, capacity: int, batch: int, like: Tensor
) -> NSACache | DenseCache:
    if isinstance(attention, SparseAttention):
        return NSACache(attention, capacity, batch, like)
    return DenseCache(attention, capacity, batch, like)
