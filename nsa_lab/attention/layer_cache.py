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
    """Key/value cache of one NSA layer for B sequences; None for branches that do not exist.

    Rows beyond a sequence's length are never read and may be NaN.
    """

    k_cmp: Tensor | None = None
    """[B, N_max, G, d_k], block i covers tokens i*d .. i*d+l-1."""
    v_cmp: Tensor | None = None
    """[B, N_max, G, d_v]"""
    k_sel: Tensor | None = None
    """[B, capacity, G, d_k]"""
    v_sel: Tensor | None = None
    """[B, capacity, G, d_v]"""
    k_win: Tensor | None = None
    """[B, R, G, d_k], a ring: position p is in slot p % R, and R >= w + S - 1 for S new tokens, or R is the capacity."""
    v_win: Tensor | None = None
    """[B, R, G, d_v]"""
    k_index: Tensor | None = None
    """[B, N_index_max, G, .], compressed keys that only select blocks, in a format of `key_storage`."""

    def slice_batch(self, rows: slice) -> LayerCache:
        """Return views of the sequences in `rows`."""
        if rows == slice(0, next(len(x) for x in self if x is not None)):
            return self
        return LayerCache(*(None if x is None else x[rows] for x in self))
