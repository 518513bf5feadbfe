"""Indexer: queries and index keys that score the blocks for the selected branch.

In the paper, the compressed branch's attention scores select the blocks (eq. 8, 9). Its keys then have two uses: the
compressed branch attends to them, and block selection scores with them. The indexer separates the two. It has its own query
and key projections, like the indexer of DeepSeek-V3.2 (arXiv 2512.02556), which scores single tokens.

Each index key covers only a few tokens, as a weighted mean whose weights are equal at initialization (`phi: pool`). In a
mean over many tokens, the one token that matches the query is lost in the noise of the others (docs/science/retrieval.md).

`ModelConfig.indexer_order` names the steps from projected keys to index keys: RoPE, pooling and RMSNorm in any order. Keys
that are pooled first are rotated to the position of the first token of their block. The last step rounds the keys to the
values that the cache can store (`ModelConfig.indexer_dtype`).

Only the selection loss trains the indexer. Its input is detached, so this loss has no gradient for any other parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span
from nsa_lab.attention.compression import find_first_rows, make_phi
from nsa_lab.attention.exported import compress_traceable
from nsa_lab.attention.key_storage import round_keys
from nsa_lab.attention.layout import Layout
from nsa_lab.config import ModelConfig
from nsa_lab.model.layers import RMSNorm, Rotary, ShortConvolution, convolve_keys, rotate, subsample_rotary


class IndexerOutput(NamedTuple):
    """Index queries and keys of x [B, T, C]. D is the indexer's head width, `ModelConfig.index_width`."""

    q: Tensor
    """[B, T, G * heads, D], rotated; `ModelConfig.indexer_heads` queries per group."""
    k: Tensor
    """[B, T, index groups, D], one key per token, after the steps before pooling."""
    k_before_conv: Tensor | None
    """[B, T, 1, index groups, D], projected keys. The last token's row is the next call's `previous_k`.

    None without induction-initialized heads (`matching_heads`): the indexer then has no convolution.
    """


class Indexer(nn.Module):
    """Compute index queries and keys from x [B, T, C], with a stop-gradient on x.

    `nsa_lab.model.init_weights` copies the initial queries from the first query heads of each group, and the initial keys
    from the selected branch. If the indexer is n times narrower than a head, it copies every nth RoPE pair and every nth
    unrotated channel.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.index_width
        self.config, self.nsa = config, config.selection_nsa
        self.rotary_width = config.rotary_width * D // config.d_k
        pool_index = config.indexer_order.index("pool")
        self.steps_before_pool, self.steps_after_pool = (
            config.indexer_order[:pool_index],
            config.indexer_order[pool_index + 1 :],
        )
        self.qk = nn.Linear(config.dim, (config.n_index_queries + config.index_groups) * D, bias=False)
        self.convolution = ShortConvolution(1, config.index_groups, D) if config.matching_heads else None
        self.norm = RMSNorm(D, config.norm_eps) if "norm" in config.indexer_order else None
        self.phi = make_phi(self.nsa, D)

    def forward(
        self, x: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> IndexerOutput:
        """Project x [B, T, C] and return rotated index queries, and keys before pooling.

        `rotary`: the attention heads' RoPE tables at the positions of x.
        `is_document_start`: bool [T], True at the first token of each packed document; None: one document.
        `previous_k`: `k_before_conv` of the token before x, [B, 1, 1, index groups, D]; None: x starts the sequence.
        """
        return self.split_and_rotate(self.qk(x.detach()), rotary, is_document_start, previous_k)

    def split_and_rotate(
        self, qk: Tensor, rotary: Rotary, is_document_start: Tensor | None = None, previous_k: Tensor | None = None
    ) -> IndexerOutput:
        """Split the output of `qk` into queries and keys, convolve the keys, and apply the steps before pooling."""
        c = self.config
        q, k = qk.unflatten(-1, (-1, c.index_width)).split([c.n_index_queries, c.index_groups], dim=2)
        k_before_conv = None
        if self.convolution:
            k_before_conv = k.unsqueeze(2)
            k = convolve_keys(self.convolution, k_before_conv, is_document_start, previous_k).squeeze(2)
        if self.steps_before_pool[:1] == ("rotate",):
            # One call rotates both.
            rotary = subsample_rotary(rotary, self.rotary_width)
            q, k = rotate(torch.cat([q, k], dim=2), rotary).split([c.n_index_queries, c.index_groups], dim=2)
            return IndexerOutput(q, self._apply_steps(self.steps_before_pool[1:], k, rotary), k_before_conv)
        q = rotate(q, subsample_rotary(rotary, self.rotary_width))
        return IndexerOutput(q, self._apply_steps(self.steps_before_pool, k, rotary), k_before_conv)

    def split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Split the output of `qk` into queries [B, T, G * heads, D] and keys [B, T, index groups, D], not yet rotated."""
        c = self.config
        q, k = qk.unflatten(-1, (-1, c.index_width)).split([c.n_index_queries, c.index_groups], dim=2)
        return q, k

    def rotate_queries(self, q: Tensor, rotary: Rotary) -> Tensor:
        """Return `IndexerOutput.q` of queries from `split`."""
        return rotate(q, subsample_rotary(rotary, self.rotary_width))

    def prepare_keys(self, k: Tensor, rotary: Rotary, is_document_start: Tensor | None = None) -> Tensor:
        """Return `IndexerOutput.k` of keys from `split`, of all tokens of a text."""
        if self.convolution:
            k = convolve_keys(self.convolution, k.unsqueeze(2), is_document_start, None).squeeze(2)
        return self._apply_steps(self.steps_before_pool, k, rotary)

    def compress(self, k: Tensor, rotary: Rotary, span: Span | None = None, layout: Layout | None = None) -> Tensor:
        """Return the index keys [B, N, index groups, D] of `IndexerOutput.k`, [B, T, index groups, D].

        `rotary`: as in `forward`. `layout`: of a packed `span`, for `self.nsa`; None: build it.
        """
        pooled = compress_traceable(k, self.nsa, self.phi, span=span, layout=layout)
        if "rotate" not in self.steps_after_pool:
            return self.finish(pooled, rotary)
        if layout is None and span is not None and span.kind == "packed":
            layout = span.layout(self.nsa, k.device)
        rows = find_first_rows(pooled.shape[1], self.nsa, layout, k.device).clamp_max(rotary[0].shape[0] - 1)
        return self.finish(pooled, (rotary[0][rows], rotary[1][rows]))

    def finish(self, pooled: Tensor, rotary: Rotary) -> Tensor:
        """Return the index keys of pooled keys [B, N, index groups, D]: apply the steps after pooling and round.

        `rotary`: the attention heads' RoPE tables at the first tokens of the blocks, [N, R/2] or [B, N, R/2]. They are used
        only if keys are rotated after pooling.
        """
        return round_keys(self._apply_steps(self.steps_after_pool, pooled, rotary), self.config.indexer_dtype)

    def _apply_steps(self, steps: tuple[str, ...], k: Tensor, rotary: Rotary) -> Tensor:
        for step in steps:
            if step == "rotate":
                k = rotate(k, subsample_rotary(rotary, self.rotary_width))
            elif self.norm is not None:
                k = self.norm(k)
        return k


def is_indexer_weight(name: str) -> bool:
    """Return whether the weight `name` of a model belongs to an indexer."""
    return ".indexer." in name


def freeze_all_but_indexers(model: nn.Module) -> None:
    """Freeze all weights of a model except in its indexers."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_indexer_weight(name))
