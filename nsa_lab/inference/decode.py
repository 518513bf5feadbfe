"""Incremental decoding with a cache.

Invariant: the logits of a token equal the logits of a full forward pass over its sequence. They do not depend on how the
tokens are split into calls or on the other sequences of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache import Cache, Step
from nsa_lab.inference.decode_graph import DecodeGraph, can_capture
from nsa_lab.inference.fused_linear import apply_linears, apply_mlp
from nsa_lab.model import Block, NSATransformer, Rotary, get_rotary_table

# Limit of the tokens of all sequences in one prefill pass. The activations of a layer grow with this number.
MAX_PREFILL_TOKENS = 2**16


class Decoder:
    """Run a model incrementally on `batch` sequences of at most `capacity` tokens each.

    backend: of the tokens after the first chunk, "torch" or "triton". Default: triton for a model whose layers use the
    Triton kernels, otherwise torch. The first chunk uses the backends of the layers. With triton on a GPU, the first step
    of one token per sequence is captured as a CUDA graph, which later steps replay.

    Raises the errors of `Cache`: ValueError if it does not fit in memory, BackendError if the backend cannot run.
    """

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, *, backend: str | None = None) -> None:
        self._model, self.cache = model, Cache(model, capacity, batch, backend)
        self._rotary = self._build_rotary_table()
        self._decode_graph: DecodeGraph | None = None

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens per sequence. The cache is copied."""
        self.cache.grow(capacity)
        self._rotary = self._build_rotary_table()
        self._decode_graph = None

    @torch.no_grad()
    def append(self, tokens: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Append tokens int64 [B, n] to the sequences and return their logits [B, n, V].

        tokens: on any device. Checking the ids of tokens on a GPU synchronizes with it; pass tokens sampled on the CPU as
            CPU tensors.
        counts: number of tokens of each row, from the left; the rest is padding, whose logits are undefined. None: all.

        Raises ValueError for other shapes and dtypes, for ids outside the vocabulary, for another batch size and for
        sequences longer than the capacity.
        """
        counts = self._check_tokens(tokens, counts)
        replayed = self._replay_graph(tokens, counts)
        if replayed is not None:
            return replayed
        return self._compute_logits(torch.cat([hidden for hidden, _ in self._forward_chunks(tokens, counts)], dim=1))

    @torch.no_grad()
    def last(self, tokens: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Append tokens like `append` and return the logits [B, V] of the last token per row. Counts are at least 1."""
        counts = self._check_tokens(tokens, counts)
        if min(counts) < 1:
            raise ValueError(f"counts = {counts}: expected at least 1 token per sequence")
        replayed = self._replay_graph(tokens, counts)
        if replayed is not None:
            return replayed[:, 0]
        last_hidden: dict[int, Tensor] = {}
        for hidden, last_index in self._forward_chunks(tokens, counts):
            last_hidden |= {row: hidden[row, end] for row, end in last_index.items()}
        return self._compute_logits(torch.stack([last_hidden[row] for row in range(len(last_hidden))])[:, None])[:, 0]

    def _build_rotary_table(self) -> Rotary:
        c = self._model.config
        return get_rotary_table(self.cache.capacity, c.rotary_width, c.rope_theta, self._model.head.weight.device)

    def _replay_graph(self, tokens: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Return logits [B, 1, V] of one token per sequence from the CUDA graph; None if the step cannot be captured."""
        if tokens.shape[1] > 1 or not any(self.cache.starts) or not can_capture(self.cache):
            return None
        if self._decode_graph is None:
            self._decode_graph = DecodeGraph(
                lambda tokens, step: self._compute_logits(self._forward_layers(tokens, step)), self.cache
            )
        logits = self._decode_graph(tokens, counts).clone()
        self.cache.advance(counts, update_lengths=False)
        return logits

    def _forward_chunks(self, tokens: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, dict[int, int]]]:
        """Yield layer outputs [B, n, C] in chunks, each with {row: index of its last token} for rows that end in it."""
        tokens, start = tokens.to(self.cache.lengths.device), 0
        while start < tokens.shape[1]:
            width = (
                kv_cache_size.MAX_STEP_TOKENS
                if any(self.cache.starts)
                else max(MAX_PREFILL_TOKENS // len(tokens), kv_cache_size.MAX_STEP_TOKENS)
            )
            chunk = tokens[:, start : start + width]
            chunk_counts = [min(max(count - start, 0), chunk.shape[1]) for count in counts]
            hidden = self._forward_layers(chunk, self.cache.make_step(chunk.shape[1], chunk_counts))
            self.cache.advance(chunk_counts)
            yield (
                hidden,
                {row: count - start - 1 for row, count in enumerate(counts) if start < count <= start + chunk.shape[1]},
            )
            start += chunk.shape[1]

    def _forward_layers(self, tokens: Tensor, step: Step) -> Tensor:
        model = self._model
        x, use_kernels = self.cache.embed(model, tokens, step), self.cache.backend == "triton" and not step.is_prefill
        for block, layer in zip(cast("list[Block]", model.blocks), self.cache.layers, strict=True):
            x = layer.attend(x, block.attention_norm, self._rotary, step)
            x = apply_mlp(block, x, use_kernels=use_kernels)
        return x

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, n, V] of layer outputs [B, n, C]."""
        model, use_kernels = self._model, self.cache.backend == "triton"
        return apply_linears(hidden, (model.head, ""), norm=model.norm, use_kernels=use_kernels)[0]

    def _check_tokens(self, tokens: Tensor, counts: Sequence[int] | None) -> list[int]:
        """Return the count of every row. Raises the errors of `append`."""
        cache, vocab_size = self.cache, self._model.config.vocab_size
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.shape[1]:
            raise ValueError(f"tokens: expected int64 [B, n], n >= 1, got {tokens.dtype} {tuple(tokens.shape)}")
        counts = [tokens.shape[1]] * len(tokens) if counts is None else list(counts)
        if len(tokens) != cache.batch or len(counts) != cache.batch:
            raise ValueError(
                f"tokens: expected {cache.batch} rows and counts, one per sequence, got {len(tokens)} rows and "
                f"{len(counts)} counts; or build a decoder with that batch size"
            )
        if min(counts) < 0 or max(counts) != tokens.shape[1]:
            raise ValueError(
                f"counts = {list(counts)}: expected numbers from 0 to {tokens.shape[1]}, and that number for the longest "
                "row; remove padding columns that no row needs"
            )
        least, most = (int(end) for end in tokens.aminmax())
        if least < 0 or most >= vocab_size:
            raise ValueError(f"tokens: expected ids in 0..{vocab_size - 1}, got {least}..{most}")
        end = max(start + count for start, count in zip(cache.starts, counts, strict=True))
        if end > cache.capacity:
            raise ValueError(f"{end} tokens do not fit in a decoder of capacity {cache.capacity}; increase the capacity")
        return counts
