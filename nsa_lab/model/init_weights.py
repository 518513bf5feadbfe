"""How weights start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa_lab.attention.compression import BlockMap, BlockPool
from nsa_lab.model.attention_layers import DenseAttention, SparseAttention
from nsa_lab.model.indexer import Indexer
from nsa_lab.model.layers import RMSNorm, ShortConvolution


@torch.no_grad()
def initialize_weights(root: nn.Module, residual_scale: float, generator: torch.Generator | None = None) -> None:
    """Normal weights of deviation fan_in**-0.5; those into the residual stream times `into_residual`.

    Gates start at Xavier, never at zero: a zero gate gives its own input no gradient. The head starts at 1/dim, so that the
    first loss is within .5 % of ln V, of which preflight allows 2 % (fan_in**-0.5 puts it 9 % above, a deviation of .02
    2.7 %). Matching heads and indexers start as `nsa_lab.model.attention_layers` and `nsa_lab.model.indexer` say.
    """
    for name, module in root.named_modules():
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
            if name == "head":
                std = 1.0 / module.in_features
            elif name.endswith(("attention.out", "mlp.down")):
                std *= residual_scale
            elif name.endswith("attention.gate"):
                std = (2.0 / (module.in_features + module.out_features)) ** 0.5
            module.weight.normal_(std=std, generator=generator)
    for module in root.modules():
        if isinstance(module, SparseAttention | DenseAttention) and module.config.matching_heads:
            _init_induction_heads(module)
        if isinstance(module, SparseAttention) and module.indexer:
            _init_indexer(module, module.indexer)


def _init_induction_heads(layer: SparseAttention | DenseAttention) -> None:
    """The keys of all branches start the same, and the first heads of the first group ask with the keys' own weights."""
    queries, keys = _get_qk_weights(layer)
    keys[1:] = keys[0].clone()
    queries[: layer.config.matching_heads] = keys[0, 0]


def _init_indexer(layer: SparseAttention, indexer: Indexer) -> None:
    """The indexer starts with the queries of each group's first head and with the selected branch's keys.

    Where it is n times narrower, with every nth pair of the channels that are turned, and every nth of the others.
    """
    c, half = layer.config, layer.config.rotary_width // 2
    queries, keys = _get_qk_weights(layer)
    asked, found = indexer.qk.weight.view(2, c.n_kv_groups, c.index_width, c.dim)
    every = c.d_k // c.index_width
    pairs = torch.arange(0, half, every)
    channels = torch.cat([pairs, half + pairs, torch.arange(2 * half, c.d_k, every)])
    asked.copy_(queries[:: c.heads_per_group, channels])
    found.copy_(keys[1][:, channels])


def _get_qk_weights(layer: SparseAttention | DenseAttention) -> tuple[Tensor, Tensor]:
    """The weights of the queries, [H, d_k, C], and of the keys, [branches, G, d_k, C]."""
    c, keys = layer.config, layer.N_BRANCHES * layer.config.n_kv_groups
    queries, rows, _ = layer.qkv.weight.split([c.n_heads * c.d_k, keys * c.d_k, keys * c.d_v])
    return queries.view(c.n_heads, c.d_k, c.dim), rows.view(layer.N_BRANCHES, c.n_kv_groups, c.d_k, c.dim)
