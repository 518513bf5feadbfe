"""A pass over new tokens: the model calls its modules, and these take keys and values from the cache.

The modules are called as in a forward pass, so everything that lives on them takes part: hooks, adapters, quantization.
Only where all weights are plain do fused kernels read them instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from nsa_lab.attention import kernels
from nsa_lab.inference.cache.attention_cache import DenseCache, NSACache
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.model_cache import Cache
from nsa_lab.inference.fused_linear import add_mlp, apply_linears
from nsa_lab.inference.plain_weights import is_plain
from nsa_lab.model import Block, DenseAttention, NSATransformer, Rotary, SparseAttention
from nsa_lab.model.cache_protocols import CachedPass
from nsa_lab.model.ngrams import HASH_CONSTANTS


class ModelPass(CachedPass):
    """A pass of a whole model over the tokens of `step`. `get_rotary`: device -> RoPE tables of all positions."""

    def __init__(self, cache: Cache, step: Step, get_rotary: Callable[[torch.device], Rotary]) -> None:
        self._cache, self._step, self._get_rotary = cache, step, get_rotary
        self._use_kernels = cache.backend == "triton" and not step.is_prefill
        self.selected_blocks: Tensor | None = None  # of the last layer that has been computed

    def embed(self, model: NSATransformer, tokens: Tensor | None, embeddings: Tensor | None) -> Tensor:
        """Return the embedding [B, S, C] of new tokens int64 [B, S], and cache the tokens that later n-grams need."""
        latest = self._cache.latest_tokens
        if latest is None or tokens is None:
            return model.embed(tokens, embeddings=embeddings)
        ngrams, like = model.ngrams, self._cache.like
        can_fuse = self._use_kernels and embeddings is None and kernels.has_few_rows(tokens[..., None])
        if can_fuse and ngrams is not None and is_plain(ngrams, like) and is_plain(model.embedding, like):
            return kernels.embed_ngrams(
                tokens,
                latest.ring.rows[:, :, 0, 0],
                self._step.lengths,
                model.embedding.weight,
                ngrams.table.weight,
                ngrams.out.weight,
                ngrams.rows_per_length,
                HASH_CONSTANTS,
                model.config.norm_eps if model.config.embedding_norm else None,
            )
        x = model.embed(tokens, self._step.positions, latest.read_previous(self._step), embeddings)
        latest.put(tokens, self._step)
        return x

    def get_layer(self, index: int) -> LayerPass:
        layer = self._cache.layers[index]
        device = layer.like.device
        return LayerPass(self, layer, self._step.to(device), self._get_rotary(device), self._use_kernels)

    def compute_logits(self, model: NSATransformer, x: Tensor) -> Tensor:
        """Return the logits [B, n, V] of outputs x [B, n, C] of the last block."""
        if self._cache.backend == "triton" and is_plain(model.norm, x) and is_plain(model.head, x):
            return apply_linears(x, (model.head, ""), norm=model.norm)[0]
        return model.head(model.norm(x))


class LayerPass:
    """A pass of one layer over the tokens of `step`. `rotary_table`: RoPE tables of all positions, [capacity, R/2]."""

    def __init__(
        self,
        model_pass: ModelPass,
        layer: NSACache | DenseCache,
        step: Step,
        rotary_table: Rotary,
        use_kernels: bool,
    ) -> None:
        self._model_pass, self._layer = model_pass, layer
        self._step, self._rotary_table, self._use_kernels = step, rotary_table, use_kernels

    def run_block(self, block: Block, x: Tensor) -> Tensor:
        """Return the output of the block for new tokens x [B, S, C]."""
        if self._can_fuse(x, block.attention_norm, block.attention):
            attention = cast(Any, block.attention)  # of the class of the cache
            arguments = attention, block.attention_norm, x, self._rotary_table, self._step
            x, self._model_pass.selected_blocks = self._layer.add_fused_attention(
                *arguments, self._model_pass.selected_blocks
            )
        else:
            rotary = self._step.select_rotary(self._rotary_table)
            x = x + block.attention(block.attention_norm(x), rotary, cache=self)[0]
        if self._can_fuse(x, block.mlp_norm, block.mlp):
            return add_mlp(block, x)
        return x + block.mlp(block.mlp_norm(x))

    def attend(self, attention: SparseAttention | DenseAttention, x: Tensor) -> Tensor:
        """Cache the keys and values of x [B, S, C] and return the attention output of all heads, [B, S, H d_v]."""
        layer = cast(Any, self._layer)  # of the class of the attention
        attended, self._model_pass.selected_blocks = layer.attend(
            attention, x, self._rotary_table, self._step, self._model_pass.selected_blocks
        )
        return attended

    def _can_fuse(self, x: Tensor, *modules: nn.Module) -> bool:
        """Return True if kernels may read the weights of `modules` for an input x."""
        like = self._layer.like
        is_like_cache = x.dtype is like.dtype and x.device == like.device
        return self._use_kernels and is_like_cache and all(is_plain(module, like) for module in modules)
