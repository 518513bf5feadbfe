"""Compressed blocks of the cached tokens.

Shape suffixes: B batch, S new tokens, G key/value groups, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nsa_lab.attention import compress, geometry
from nsa_lab.attention.compression import BlockPool
from nsa_lab.attention.layer_cache import PoolWeights
from nsa_lab.config import NSAConfig
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.storage import TokenRows, TokenStorage

FinishBlocks = Callable[[Tensor, Tensor], Tensor]
"""(compressed blocks [B, n, G, D], positions of their first tokens int64 [B, n]) -> the rows that are stored."""


class CompressedCache:
    """Blocks of `raw` tokens, compressed with the settings `nsa`. The owner of `raw` writes new tokens there first.

    `row_format`: width and dtype of a stored block; None: like the tokens.
    """

    KERNEL_PHI = ("avg", "pool")
    """Values of phi that `kernels.update_compressed` supports."""

    def __init__(
        self,
        nsa: NSAConfig,
        capacity: int,
        raw: TokenStorage,
        like: Tensor,
        row_format: tuple[int, torch.dtype] | None = None,
    ) -> None:
        batch, _, groups, token_width = raw.rows.shape
        width, dtype = row_format or (token_width, like.dtype)
        self.nsa, self.raw = nsa, raw
        self.blocks = TokenRows(geometry.num_compressed(capacity, nsa), groups, width, batch, like, dtype)

    def put(self, x: Tensor, phi: nn.Module | None, step: Step, finish: FinishBlocks | None = None) -> None:
        """Write the blocks that new tokens x [B, S, G, D] complete, compressed by `phi`. `raw` has the tokens already.

        `finish`: converts compressed blocks to stored rows.
        """
        if step.is_prefill:
            self._put_blocks(compress(x, self.nsa, phi), step, finish)
        else:
            self.complete_blocks(phi, step, x.dtype, finish)

    def complete_blocks(
        self, phi: nn.Module | None, step: Step, dtype: torch.dtype, finish: FinishBlocks | None = None
    ) -> None:
        """Compress, in `dtype`, and write the blocks completed by new tokens, which must already be in `raw`."""
        if n_new := self._count_completed_blocks(step):
            tokens = self.raw.read(step.get_block_token_indices(self.nsa, n_new, self.raw.n_slots))
            self._put_blocks(compress(tokens.to(dtype), self.nsa, phi), step, finish)

    def _put_blocks(self, blocks: Tensor, step: Step, finish: FinishBlocks | None) -> None:
        n_blocks = blocks.shape[1]
        if finish is not None:
            blocks = finish(blocks, step.get_block_positions(self.nsa, n_blocks))
        self.blocks.put_rows(blocks, step.get_block_indices(self.nsa, n_blocks, self.blocks.capacity))

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
