"""A model that reads on: new tokens cost what they read, not the whole past.

Invariant: the logits of a token are those of a full forward pass over its sequence up to it; neither how the tokens were
split into calls nor what else is in the batch enters.
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

# Tokens of all sequences together that are read at once while nothing stands before them: what a layer holds of them grows
# with their number.
MAX_PREFILL_TOKENS = 2**16


class Decoder:
    """Feeds a model with the tokens of `batch` sequences, at most `capacity` each, and keeps what it needs of them.

    `backend` is that of tokens behind the first chunk, torch or triton; None: triton for a model whose layers run on our
    kernels, torch for any other. The first chunk is read by the layers' own. With triton a step of one token per sequence
    is recorded as a CUDA graph when it first comes, and replayed from then on.

    Raises what `Cache` raises: ValueError where it does not fit, BackendError where the backend cannot run.
    """

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, *, backend: str | None = None) -> None:
        self._model, self.cache = model, Cache(model, capacity, batch, backend)
        self._rotary = self._build_rotary_table()
        self._decode_graph: DecodeGraph | None = None

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens of every sequence, by copying what there is."""
        self.cache.grow(capacity)
        self._rotary = self._build_rotary_table()
        self._decode_graph = None

    @torch.no_grad()
    def append(self, tokens: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Logits [B, n, V] of the tokens int64 [B, n] that follow those given before.

        tokens: on any device. Their ids are looked at first, which for tokens on a GPU waits until they are there: whoever
        draws them on the CPU does better to leave them there.
        counts: how many tokens of each row belong to its sequence, from the left; the rest is padding, whose logits mean
        nothing. None: all. Raises ValueError for what is not this, for ids that the model does not have, for another batch
        than the cache's and for sequences that would be longer than its capacity.
        """
        counts = self._check_tokens(tokens, counts)
        replayed = self._replay_graph(tokens, counts)
        if replayed is not None:
            return replayed
        return self._compute_logits(torch.cat([hidden for hidden, _ in self._forward_chunks(tokens, counts)], dim=1))

    @torch.no_grad()
    def last(self, tokens: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Logits [B, V] of each sequence's last token in `tokens`; `append` says the rest. Counts are at least 1."""
        counts = self._check_tokens(tokens, counts)
        if min(counts) < 1:
            raise ValueError(f"counts = {counts}: expected at least 1 token of each sequence to tell the next one")
        replayed = self._replay_graph(tokens, counts)
        if replayed is not None:
            return replayed[:, 0]
        found: dict[int, Tensor] = {}
        for hidden, within in self._forward_chunks(tokens, counts):
            found |= {row: hidden[row, end] for row, end in within.items()}
        return self._compute_logits(torch.stack([found[row] for row in range(len(found))])[:, None])[:, 0]

    def _build_rotary_table(self) -> Rotary:
        c = self._model.config
        return get_rotary_table(self.cache.capacity, c.rotary_width, c.rope_theta, self._model.head.weight.device)

    def _replay_graph(self, tokens: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Logits [B, 1, V] of one token of each sequence by the recorded step; None where a step cannot be recorded."""
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
        """What leaves the layers, [B, n, C], some tokens at a time, and the rows that end in them, with the place."""
        tokens, at = tokens.to(self.cache.lengths.device), 0
        while at < tokens.shape[1]:
            width = (
                kv_cache_size.MAX_STEP_TOKENS
                if any(self.cache.starts)
                else max(MAX_PREFILL_TOKENS // len(tokens), kv_cache_size.MAX_STEP_TOKENS)
            )
            part = tokens[:, at : at + width]
            own = [min(max(count - at, 0), part.shape[1]) for count in counts]
            hidden = self._forward_layers(part, self.cache.make_step(part.shape[1], own))
            self.cache.advance(own)
            yield hidden, {row: count - at - 1 for row, count in enumerate(counts) if at < count <= at + part.shape[1]}
            at += part.shape[1]

    def _forward_layers(self, tokens: Tensor, step: Step) -> Tensor:
        model = self._model
        x, by_kernels = self.cache.embed(model, tokens, step), self.cache.backend == "triton" and not step.is_prefill
        for block, layer in zip(cast("list[Block]", model.blocks), self.cache.layers, strict=True):
            x = layer.attend(x, block.attention_norm, self._rotary, step)
            x = apply_mlp(block, x, use_kernels=by_kernels)
        return x

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """[B, n, V] of what leaves the layers, [B, n, C]."""
        model, by_kernels = self._model, self.cache.backend == "triton"
        return apply_linears(hidden, (model.head, ""), norm=model.norm, use_kernels=by_kernels)[0]

    def _check_tokens(self, tokens: Tensor, counts: Sequence[int] | None) -> list[int]:
        """`counts`, of every row; ValueError for what `append` refuses."""
        cache, vocab_size = self.cache, self._model.config.vocab_size
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.shape[1]:
            raise ValueError(f"tokens: expected int64 [B, n], n >= 1, got {tokens.dtype} {tuple(tokens.shape)}")
        counts = [tokens.shape[1]] * len(tokens) if counts is None else list(counts)
        if len(tokens) != cache.batch or len(counts) != cache.batch:
            raise ValueError(
                f"tokens: {len(tokens)} rows, {len(counts)} counts for a decoder of {cache.batch} sequences; give one of "
                "each for every sequence, or build a decoder of that batch"
            )
        if min(counts) < 0 or max(counts) != tokens.shape[1]:
            raise ValueError(
                f"counts = {list(counts)}: expected numbers from 0 to {tokens.shape[1]}, the longest row's; cut padding "
                "that no row needs"
            )
        least, most = (int(end) for end in tokens.aminmax())
        if least < 0 or most >= vocab_size:
            raise ValueError(f"tokens: ids lie in {least}..{most}, and the model has 0..{vocab_size - 1}")
        end = max(start + count for start, count in zip(cache.starts, counts, strict=True))
        if end > cache.capacity:
            raise ValueError(f"{end} tokens do not fit into a decoder of capacity {cache.capacity}; make it larger")
        return counts
