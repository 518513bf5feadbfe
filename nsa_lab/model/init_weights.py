"""Weight initialization."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nsa_lab.attention.compression import BlockMap, BlockPool
from nsa_lab.model.attention_layers import DenseAttention, SparseAttention
from nsa_lab.model.indexer import Indexer
from nsa_lab.model.layers import RMSNorm, ShortConvolution


@torch.no_grad()
def initialize_weights(
    root: nn.Module, residual_scale: float, generator: torch.Generator | None = None, name: str = ""
) -> None:
    """Initialize linear layers from a normal distribution with standard deviation fan_in**-0.5. `name`: that of `root`.

    Layers that write into the residual stream are scaled by `residual_scale`. Gates use Xavier, not zeros: a gate of zero
    has no gradient for its input. The head has a standard deviation of 1/dim, so that the first loss is close to ln V,
    as preflight checks (`nsa_lab.train.preflight.initial_loss`). With fan_in**-0.5 it is 9% higher.
    For induction-initialized heads and indexers see `_init_induction_heads` and `init_indexer`.
    """
    for module_name, module in root.named_modules(prefix=name):
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.02, generator=generator)
        elif isinstance(module, ShortConvolution | BlockPool):
            module.reset_parameters()
        elif isinstance(module, BlockMap):
            module.position.normal_(std=0.02, generator=generator)
        elif isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if module_name == "head":
                std = 1.0 / module.in_features
            elif module_name.endswith(("attention.out", "mlp.down")):
                std *= residual_scale
            elif module_name.endswith("attention.gate"):
                std = (2.0 / (module.in_features + module.out_features)) ** 0.5
            module.weight.normal_(std=std, generator=generator)
    for module in root.modules():
        if isinstance(module, SparseAttention | DenseAttention) and module.config.matching_heads:
            _init_induction_heads(module)
        if isinstance(module, SparseAttention) and module.indexer:
            init_indexer(module, module.indexer)


def _init_induction_heads(layer: SparseAttention | DenseAttention) -> None:
    """Copy the first set of keys to all sets, and the first group's keys to its first query heads."""
    queries, keys = _get_qk_weights(layer)
    keys[1:] = keys[0].clone()
    queries[: layer.config.matching_heads] = keys[0, 0]


def init_indexer(layer: SparseAttention, indexer: Indexer) -> None:
    """Copy each group's first query heads to the indexer's queries, and the selected branch's keys to its keys.

    Queries of the indexer beyond the number of heads are copied again; a shared key is the first group's. If the indexer is
    n times narrower than a head, copy every nth RoPE pair and every nth unrotated channel.
    """
    c, half = layer.config, layer.config.rotary_width // 2
    queries, keys = _get_qk_weights(layer)
    index_queries, index_keys = indexer.qk.weight.view(-1, c.index_width, c.dim).split([c.n_index_queries, c.index_groups])
    stride = c.d_k // c.index_width
    pairs = torch.arange(0, half, stride)
    channels = torch.cat([pairs, half + pairs, torch.arange(2 * half, c.d_k, stride)])
    heads = torch.arange(c.n_kv_groups)[:, None] * c.heads_per_group + torch.arange(c.indexer_heads) % c.heads_per_group
    index_queries.copy_(queries[heads.flatten()][:, channels])
    index_keys.copy_(keys[cast(int, c.get_kv_set("sel"))][: c.index_groups, channels])


def _get_qk_weights(layer: SparseAttention | DenseAttention) -> tuple[Tensor, Tensor]:
    """Return views of the query weights, [H, d_k, C], and of the key weights, [sets, G, d_k, C]."""
    c, n_keys = layer.config, len(layer.config.kv_sets) * layer.config.n_kv_groups
    queries, keys, _ = layer.qkv.weight.split([c.n_heads * c.d_k, n_keys * c.d_k, n_keys * c.d_v])
    return queries.view(c.n_heads, c.d_k, c.dim), keys.view(-1, c.n_kv_groups, c.d_k, c.dim)
