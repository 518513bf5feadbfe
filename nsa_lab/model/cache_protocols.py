"""Interface between the modules of the model and the key/value cache, which `nsa_lab.inference.cache` implements.

The modules take part of a cache as an argument, so that a cached step calls the same modules as a forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from nsa_lab.model.attention_layers import DenseAttention, SparseAttention
    from nsa_lab.model.transformer import Block, NSATransformer


class CachedLayer(Protocol):
    """Cache of one layer in a pass over new tokens; see `nsa_lab.inference.cache`."""

    def run_block(self, block: Block, x: Tensor) -> Tensor:
        """Return the output of the block for new tokens x [B, S, C]."""
        ...

    def attend(self, attention: SparseAttention | DenseAttention, x: Tensor) -> Tensor:
        """Cache the keys and values of x [B, S, C] and return the attention output of all heads, [B, S, H d_v]."""
        ...


class CachedPass(Protocol):
    """A pass over new tokens with the cache of a model; see `nsa_lab.inference.cache`."""

    def embed(self, model: NSATransformer, tokens: Tensor | None, embeddings: Tensor | None) -> Tensor:
        """Return `NSATransformer.embed` of the new tokens at their positions, [B, S, C]."""
        ...

    def get_layer(self, index: int) -> CachedLayer: ...

    def compute_logits(self, model: NSATransformer, x: Tensor) -> Tensor:
        """Return the logits [B, n, V] of outputs x [B, n, C] of the last block."""
        ...
