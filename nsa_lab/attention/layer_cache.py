"""Key/value cache of one layer, as torch decoding and the decoding kernels use it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CacheWriteBuffers(NamedTuple):
    """Buffers for the new keys and values of each branch; None for branches that a layer does not have."""

    k_raw: Tensor | None = None
    """[B, R, G, d_k], ring of tokens that are not compressed yet."""
    v_raw: Tensor | None = None
    k_sel: Tensor | None = None
    """[B, capacity, G, d_k]; this and the rest as in `LayerCache`."""
    v_sel: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None


PoolWeights = tuple[Tensor, Tensor]
"""Weights of phi = pool: score [D, D] and place [D, l]."""


class LayerCache(NamedTuple):
    """Key/value cache of one NSA layer for B sequences. Rows beyond a sequence's length are never read and may be NaN."""

    k_cmp: Tensor
    """[B, N_max, G, d_k], block i covers tokens i*d .. i*d+l-1."""
    v_cmp: Tensor
    """[B, N_max, G, d_v]"""
    k_sel: Tensor
    """[B, capacity, G, d_k]"""
    v_sel: Tensor
    """[B, capacity, G, d_v]"""
    k_win: Tensor
    """[B, R, G, d_k], a ring: position p is in slot p % R, and R >= w + S - 1 for S new tokens."""
    v_win: Tensor
    """[B, R, G, d_v]"""
    k_index: Tensor | None = None
    """[B, N_index_max, G, index width], the indexer's compressed keys."""

    def slice_batch(self, rows: slice) -> LayerCache:
        """Return views of the sequences in `rows`."""
        if rows == slice(0, len(self.k_sel)):
            return self
        index = None if self.k_index is None else self.k_index[rows]
        raw = self.k_sel[rows], self.v_sel[rows], self.k_win[rows], self.v_win[rows]
        return LayerCache(self.k_cmp[rows], self.v_cmp[rows], *raw, index)
