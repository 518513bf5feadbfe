"""Indexer of a converted layer, and its initial weights: the layer's own first query heads and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa_lab.config import ModelConfig
from nsa_lab.model import Indexer
from nsa_lab.model.layers import rms_normalize
from nsa_lab.model.placement import find_placement


class HeadNorm(nn.Module):
    """RMSNorm of each head of x [B, T, heads * D], with a weight [heads, D]."""

    def __init__(self, n_heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        heads = rms_normalize(x.unflatten(-1, self.weight.shape), self.eps)
        return (heads * self.weight.to(heads.dtype)).flatten(-2)


class ConvertedIndexer(Indexer):
    """`Indexer` with a bias and with norms of queries and keys if the projections of the layer have them."""

    def __init__(self, config: ModelConfig, *, has_bias: bool, has_norm: bool) -> None:
        super().__init__(config)
        n_heads = config.n_index_queries + config.index_groups
        if has_bias or has_norm:
            self.qk = nn.Linear(config.dim, n_heads * config.index_width, bias=has_bias)
        if has_norm:
            self.qk = nn.Sequential(self.qk, HeadNorm(n_heads, config.index_width, config.norm_eps))


def make_indexer(attention: nn.Module, config: ModelConfig) -> ConvertedIndexer:
    """Return an indexer for a layer's attention, on its device and in its dtype, with PyTorch's initial weights."""
    layer: Any = attention
    has_bias = any(getattr(projection, "bias", None) is not None for projection in (layer.q_proj, layer.k_proj))
    indexer = ConvertedIndexer(config, has_bias=has_bias, has_norm=hasattr(layer, "q_norm"))
    return indexer.to(**find_placement(attention)._asdict())


@torch.no_grad()
def copy_first_heads(attention: nn.Module, indexer: ConvertedIndexer, config: ModelConfig) -> None:
    """Copy each group's first query heads to the indexer's queries, and the layer's keys to its keys.

    Queries of the indexer beyond the number of heads are copied again; a shared key is the first group's. If the indexer is
    n times narrower than a head, copy every nth RoPE pair. The projections are called, so adapters and quantization count.
    """
    layer: Any = attention
    c, half = config, config.d_k // 2
    pairs = torch.arange(0, half, c.d_k // c.index_width)
    channels = torch.cat([pairs, half + pairs])
    heads = torch.arange(c.n_kv_groups)[:, None] * c.heads_per_group + torch.arange(c.indexer_heads) % c.heads_per_group
    parts = []
    for projection, selected in ((layer.q_proj, heads.flatten()), (layer.k_proj, torch.arange(c.index_groups))):
        # Rows of the identity give the columns of the weight, and a row of zeros gives the bias.
        like = next(indexer.parameters())
        inputs = torch.cat([torch.zeros(1, c.dim), torch.eye(c.dim)]).to(like)
        outputs = projection(inputs).unflatten(-1, (-1, c.d_k))[:, selected][:, :, channels]
        parts.append(torch.cat([outputs[:1], outputs[1:] - outputs[:1]]))
    outputs = torch.cat(parts, dim=1).flatten(1)  # [1 + C, heads * D]
    linear: Any = indexer.qk[0] if isinstance(indexer.qk, nn.Sequential) else indexer.qk
    linear.weight.copy_(outputs[1:].T)
    if linear.bias is not None:
        linear.bias.copy_(outputs[0])
    if isinstance(indexer.qk, nn.Sequential):
        q_weight, k_weight = (norm.weight[channels.to(norm.weight.device)] for norm in (layer.q_norm, layer.k_norm))
        weights = [q_weight.expand(c.n_index_queries, -1), k_weight.expand(c.index_groups, -1)]
        norm: Any = indexer.qk[1]
        norm.weight.copy_(torch.cat(weights))
