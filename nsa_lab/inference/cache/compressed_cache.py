"""Compressed blocks of the cached tokens, and the raw tokens that later blocks need.

Shape suffixes: B batch, S new tokens, G key/value groups, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa_lab.attention import compress, geometry
from nsa_lab.attention.compression import BlockPool
from nsa_lab.attention.layer_cache import PoolWeights
from nsa_lab.config import NSAConfig
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.storage import Ring, TokenRows


class CompressedCache:
    """Blocks compressed with the settings `nsa`, and a ring of the raw tokens that incomplete blocks need."""

    KERNEL_PHI = ("avg", "pool")
    """Values of phi that `kernels.update_compressed` supports."""

    def __init__(self, nsa: NSAConfig, capacity: int, groups: int, width: int, batch: int, like: Tensor) -> None:
        self.nsa, self.dtype = nsa, like.dtype
        self.blocks = TokenRows(geometry.num_compressed(capacity, nsa), groups, width, batch, like)
        self.raw_tokens = Ring(kv_cache_size.count_raw_slots(nsa), groups, width, batch, like)

    def put(self, x: Tensor, phi: nn.Module | None, step: Step) -> None:
        """Write new tokens [B, S, G, D] and the blocks that they complete, compressed by `phi`."""
        self.raw_tokens.put(x, step)
        if step.is_prefill:
            self._put_blocks(compress(x, self.nsa, phi), step)
        else:
            self.complete_blocks(phi, step, x.dtype)

    def complete_blocks(self, phi: nn.Module | None, step: Step, dtype: torch.dtype) -> None:
        """Compress, in `dtype`, and write the blocks completed by new tokens, which must already be in the ring."""
        if n_new := self._count_completed_blocks(step):
            tokens = self.raw_tokens.read(step.get_block_token_indices(self.nsa, n_new, self.raw_tokens.n_slots))
            self._put_blocks(compress(tokens.to(dtype), self.nsa, phi), step)

    def _put_blocks(self, blocks: Tensor, step: Step) -> None:
        self.blocks.put(blocks, step.get_block_indices(self.nsa, blocks.shape[1], self.blocks.capacity))

    def grow(self, capacity: int) -> None:
        self.blocks.grow(self._count_blocks(capacity))

    def _count_completed_blocks(self, step: Step) -> int:
        """Return the largest number of blocks that a sequence completes.

        Other sequences may then compute blocks before these are complete. No query sees such a block, and it is computed
        again when it is complete.
        """
        if step.starts is None:
            return -(-step.width // self.nsa.d)
        return max(self._count_blocks(start + step.width) - self._count_blocks(start) for start in step.starts)

    def _count_blocks(self, length: int) -> int:
        return geometry.num_compressed(length, self.nsa)


def get_pool_weights(phi: nn.Module | None) -> PoolWeights | None:
    """Return the weights of phi if it is "pool", otherwise None."""
    return (phi.score, phi.place) if isinstance(phi, BlockPool) else None
