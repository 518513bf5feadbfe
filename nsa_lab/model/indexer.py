"""An indexer: a query and a key per group that choose the selected branch's blocks.

In the paper the compressed branch's scores choose (eq. 8, 9), so its keys serve two masters: what the branch itself reads,
and where the selected branch should look. Here the choice has a query and a key of its own (as DeepSeek-V3.2's indexer,
arXiv 2512.02556, there for single tokens). Few tokens share a key, and it is their weighted mean that starts as the mean
(`phi: pool`): the one token that a query looks for drowns in the mean of many (docs/science/retrieval.md). The selection
loss alone teaches them, and they pass no gradient on, so that the loss costs the rest of the model nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span, compress
from nsa_lab.attention.compression import PackedBlockIndices, compress_packed, make_phi
from nsa_lab.config import ModelConfig
from nsa_lab.model.layers import Rotary, ShortConvolution, rotate, subsample_rotary


class IndexerOutput(NamedTuple):
    """What an indexer makes of x [B, T, C], rotated; D is its own width."""

    q: Tensor
    """[B, T, G, D]"""
    k: Tensor
    """[B, T, G, D], before compression."""
    k_before_conv: Tensor | None
    """With matching heads, keys before the convolution, [B, T, 1, G, D]; a token's are the next one's `before`."""


class Indexer(nn.Module):
    """x [B, T, C] -> `Index`, without a gradient for x.

    It starts as the first head of each group looks; where it is narrower than a head, with some of that head's channels.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        G, D = config.n_kv_groups, config.index_width
        self.config, self.nsa = config, config.selection_nsa
        self.rotary_width = config.rotary_width * D // config.d_k
        self.qk = nn.Linear(config.dim, 2 * G * D, bias=False)
        self.convolution = ShortConvolution(1, G, D) if config.matching_heads else None
        self.phi = make_phi(self.nsa, D)

    def forward(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> IndexerOutput:
        """`rotary` is the heads', for x's positions; `begins` and `before` are as in `unturned_heads`."""
        return self.split_and_rotate(self.qk(x.detach()), rotary, is_document_start, previous_k)

    def split_and_rotate(
        self, qk: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> IndexerOutput:
        """`Index` of what its linear map gives, [B, T, 2 G D]."""
        G = self.config.n_kv_groups
        q, k = qk.unflatten(-1, (2 * G, self.config.index_width)).split(G, dim=2)
        unmixed = None
        if self.convolution:
            unmixed = k.unsqueeze(2)
            k = self.convolution(unmixed, is_document_start, previous_k).squeeze(2)
        q, k = rotate(torch.cat([q, k], dim=2), subsample_rotary(rotary, self.rotary_width)).split(G, dim=2)
        return IndexerOutput(q, k, unmixed)

    def compress(self, k: Tensor, span: Span | None = None, packed_indices: PackedBlockIndices | None = None) -> Tensor:
        """k [B, T, G, D] -> [B, N, G, D]; `rows` are those of packed documents."""
        if packed_indices is not None:
            return compress_packed(k, self.nsa, self.phi, packed_indices)
        return compress(k, self.nsa, self.phi, span=span)
