"""Indexer: one query and one index key per GQA group that score the blocks for the selected branch.

In the paper, the compressed branch's attention scores select the blocks (eq. 8, 9). Its keys then have two uses: the
compressed branch attends to them, and block selection scores with them. The indexer separates the two. It has its own query
and key projections, like the indexer of DeepSeek-V3.2 (arXiv 2512.02556), which scores single tokens.

Each index key covers only a few tokens, as a weighted mean whose weights are equal at initialization (`phi: pool`). In a
mean over many tokens, the one token that matches the query is lost in the noise of the others (docs/science/retrieval.md).

Only the selection loss trains the indexer. Its input is detached, so this loss has no gradient for any other parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span, compress
from nsa_lab.attention.compression import make_phi
from nsa_lab.attention.layout import Layout
from nsa_lab.config import ModelConfig
from nsa_lab.model.layers import Rotary, ShortConvolution, convolve_keys, rotate, subsample_rotary


class IndexerOutput(NamedTuple):
    """Index queries and keys of x [B, T, C] after RoPE. D is the indexer's head width, `ModelConfig.index_width`."""

    q: Tensor
    """[B, T, G, D]"""
    k: Tensor
    """[B, T, G, D], one key per token, before compression."""
    k_before_conv: Tensor | None
    """[B, T, 1, G, D], keys before the short convolution and RoPE. The last token's row is the next call's `previous_k`.

    None without induction-initialized heads (`matching_heads`): the indexer then has no convolution.
    """


class Indexer(nn.Module):
    """Compute index queries and keys from x [B, T, C], with a stop-gradient on x.

    `nsa_lab.model.init_weights` copies the initial queries from the first query head of each group, and the initial keys
    from the selected branch. If the indexer is n times narrower than a head, it copies every nth RoPE pair and every nth
    unrotated channel.
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
        """Project x [B, T, C] and return rotated index queries and keys.

        `rotary`: the attention heads' RoPE tables at the positions of x.
        `is_document_start`: bool [T], True at the first token of each packed document; None: one document.
        `previous_k`: `k_before_conv` of the token before x, [B, 1, 1, G, D]; None: x starts the sequence.
        """
        return self.split_and_rotate(self.qk(x.detach()), rotary, is_document_start, previous_k)

    def split_and_rotate(
        self, qk: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> IndexerOutput:
        """Split the projection output qk [B, T, 2 G D] into queries and keys, convolve the keys, and apply RoPE to both."""
        G = self.config.n_kv_groups
        q, k = qk.unflatten(-1, (2 * G, self.config.index_width)).split(G, dim=2)
        k_before_conv = None
        if self.convolution:
            k_before_conv = k.unsqueeze(2)
            k = convolve_keys(self.convolution, k_before_conv, is_document_start, previous_k).squeeze(2)
        q, k = rotate(torch.cat([q, k], dim=2), subsample_rotary(rotary, self.rotary_width)).split(G, dim=2)
        return IndexerOutput(q, k, k_before_conv)

    def compress(self, k: Tensor, span: Span | None = None, layout: Layout | None = None) -> Tensor:
        """Compress keys k [B, T, G, D] to index keys [B, N, G, D]; `layout`: of a packed `span`, for `self.nsa`."""
        return compress(k, self.nsa, self.phi, span=span, layout=layout)
