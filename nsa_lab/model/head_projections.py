"""Queries, keys and values of a layer: one projection, split into heads, convolved keys, and RoPE.

Induction-initialized heads (`ModelConfig.matching_heads`): a short convolution over the keys starts as a shift by one token
in the first group, and some query heads of this group start with the weights of its keys. Such a head attends to positions
whose previous token equals the current one, and reads the token that followed. It copies before any training
(docs/science/retrieval.md). Key convolutions, partial key offsets and smeared keys are related.

Shape suffixes: B batch, T time, H query heads, G key/value groups, C model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.config import ModelConfig
from nsa_lab.model.layers import Rotary, ShortConvolution, convolve_keys, rotate


class ProjectedHeads(NamedTuple):
    """Rotated heads of x [B, T, C]. Branches of one set share keys and values (`ModelConfig.kv_sets`)."""

    q: Tensor
    """[B, T, H, d_k]"""
    keys: tuple[Tensor, ...]
    """[B, T, G, d_k] per set, before compression."""
    values: tuple[Tensor, ...]
    """[B, T, G, d_v] per set."""
    k_before_conv: Tensor | None
    """[B, T, sets, G, d_k], keys before the convolution. The last token's row is the next call's `previous_k`.

    None without induction-initialized heads (`matching_heads`).
    """


class UnrotatedHeads(NamedTuple):
    """Heads before the rotation."""

    qk: Tensor
    """[B, T, H + sets G, d_k]: queries, then the keys of every set."""
    values: Tensor
    """[B, T, sets G, d_v]"""
    k_before_conv: Tensor | None
    """As in `ProjectedHeads`."""


def split_heads(
    qkv: Tensor,
    config: ModelConfig,
    convolution: ShortConvolution | None,
    is_document_start: Tensor | None,
    previous_k: Tensor | None,
) -> UnrotatedHeads:
    """Split the output of a layer's projection, [B, T, H d_k + sets G (d_k + d_v)], and convolve the keys.

    `is_document_start`: as in `Layout`; None: one document. `previous_k`: `k_before_conv` of the token before,
    [B, 1, sets, G, d_k]; None: x starts the sequence.
    """
    qk, values = split_projection(qkv, config)
    k_before_conv = None
    if convolution:
        q, k = qk.split([config.n_heads, values.shape[2]], dim=2)
        k_before_conv = k.unflatten(2, (len(config.kv_sets), config.n_kv_groups))
        qk = torch.cat([q, convolve_keys(convolution, k_before_conv, is_document_start, previous_k).flatten(2, 3)], dim=2)
    return UnrotatedHeads(qk, values, k_before_conv)


def split_projection(qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return queries and keys [B, T, H + sets G, d_k] and values [B, T, sets G, d_v] of a projection's output."""
    c, n_keys = config, len(config.kv_sets) * config.n_kv_groups
    qk, values = qkv.split([(c.n_heads + n_keys) * c.d_k, n_keys * c.d_v], dim=-1)
    return qk.unflatten(-1, (c.n_heads + n_keys, c.d_k)), values.unflatten(-1, (n_keys, c.d_v))


def rotate_heads(unrotated: UnrotatedHeads, config: ModelConfig, rotary: Rotary) -> ProjectedHeads:
    """Apply RoPE at the positions of `rotary` and split the keys and values by set."""
    # Queries and all keys are adjacent in the projection, so one call rotates them all.
    q, *keys = rotate(unrotated.qk, rotary).split([config.n_heads, *[config.n_kv_groups] * len(config.kv_sets)], dim=2)
    return ProjectedHeads(q, tuple(keys), unrotated.values.split(config.n_kv_groups, dim=2), unrotated.k_before_conv)


def make_projections(config: ModelConfig) -> tuple[nn.Linear, ShortConvolution | None, nn.Linear]:
    """Return the projection to queries, keys and values, the convolution of keys, and the output projection of a layer."""
    H, G, d_k, d_v, n_sets = config.n_heads, config.n_kv_groups, config.d_k, config.d_v, len(config.kv_sets)
    qkv = nn.Linear(config.dim, H * d_k + n_sets * G * (d_k + d_v), bias=False)
    convolution = ShortConvolution(n_sets, G, d_k) if config.matching_heads else None
    return qkv, convolution, nn.Linear(H * d_v, config.dim, bias=False)
