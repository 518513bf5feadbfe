"""Incremental decoding with a cache.

Invariant: the logits of a token equal the logits of a full forward pass over its sequence. They do not depend on how the
tokens are split into calls or on the other sequences of the batch. A step calls the same modules as a forward pass, so this
also holds with hooks, adapters and quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache import Cache, ModelPass, Step
from nsa_lab.inference.decode_graph import DecodeGraph, can_capture
from nsa_lab.inference.plain_weights import WeightSnapshot, is_plain
from nsa_lab.model import NSATransformer, Rotary, get_rotary_table

# Limit of the tokens of all sequences in one prefill pass. The activations of a layer grow with this number.
MAX_PREFILL_TOKENS = 2**16


class NewTokens(NamedTuple):
    """New tokens int64 [B, n] of every sequence, or their embeddings [B, n, C]."""

    tokens: Tensor | None
    embeddings: Tensor | None = None

    @property
    def data(self) -> Tensor:
        return self.embeddings if self.tokens is None else self.tokens  # pyright: ignore[reportReturnType]

    @property
    def width(self) -> int:
        return self.data.shape[1]

    def select(self, start: int, end: int) -> NewTokens:
        """Return columns `start` .. `end` - 1."""
        return NewTokens(*(None if x is None else x[:, start:end] for x in self))

    def to(self, device: torch.device) -> NewTokens:
        return NewTokens(*(None if x is None else x.to(device) for x in self))


class Decoder:
    """Run a model incrementally on `batch` sequences of at most `capacity` tokens each.

    backend: of the tokens after the first chunk, "torch" or "triton". Default: triton for a model whose layers use the
    Triton kernels, otherwise torch. The first chunk uses the backends of the layers. With triton, fused kernels read the
    weights of plain modules, and other modules are called (`plain_weights`). With triton on a GPU, the first step of one
    token per sequence of a plain model is captured as a CUDA graph, which later steps replay.

    Raises the errors of `Cache`: ValueError for weights on the meta device or if the cache does not fit in memory,
    BackendError if the backend cannot run.
    """

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, *, backend: str | None = None) -> None:
        self._model, self.cache = model, Cache(model, capacity, batch, backend)
        self._rotary: dict[torch.device, Rotary] = {}
        self._decode_graph: DecodeGraph | None = None
        self._snapshot: WeightSnapshot | None = None  # of the weights that the graph reads

    def __getstate__(self) -> dict[str, object]:
        # A captured graph writes to the cache that it was captured for: a copy captures its own.
        return {**self.__dict__, "_decode_graph": None, "_snapshot": None}

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens per sequence. The cache is copied."""
        self.cache.grow(capacity)
        self._rotary.clear()
        self._decode_graph = None

    def repeat_step(self, n: int) -> bool:
        """Replay the captured step n times in a row, to time it without the host. Return False if no step was captured.

        The lengths do not change, but the contents of the cache are undefined afterwards. It must have room for n tokens.
        """
        if self._decode_graph is None:
            return False
        for _ in range(n):
            self._decode_graph.replay()
        self.cache.restore_lengths()
        return True

    def crop(self, n_tokens: int) -> None:
        """Remove the last `n_tokens` tokens of every sequence. Raises the errors of `Cache.crop`."""
        self.cache.crop([n_tokens] * self.cache.batch)

    @torch.no_grad()
    def append(
        self, tokens: Tensor | None, counts: Sequence[int] | None = None, *, embeddings: Tensor | None = None
    ) -> Tensor:
        """Append tokens int64 [B, n] to the sequences and return their logits [B, n, V].

        tokens: on any device. Checking the ids of tokens on a GPU synchronizes with it; pass tokens sampled on the CPU as
            CPU tensors.
        counts: number of tokens of each row, from the left; the rest is padding, whose logits are undefined. None: all.
        embeddings: [B, n, C] instead of tokens, as in `NSATransformer.forward`.

        Raises ValueError for other shapes and dtypes, for ids outside the vocabulary, for another batch size and for
        sequences longer than the capacity.
        """
        inputs = NewTokens(tokens, embeddings)
        counts = self._check_inputs(inputs, counts)
        replayed = self._replay_graph(inputs, counts)
        if replayed is not None:
            return replayed
        return torch.cat([logits for _, logits in self._run_chunks(inputs, counts)], dim=1)

    @torch.no_grad()
    def append_with_hidden(
        self, tokens: Tensor | None, counts: Sequence[int] | None = None, *, embeddings: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Append like `append`, and return the logits and the hidden states of `NSATransformer.forward` (output="all")."""
        inputs = NewTokens(tokens, embeddings)
        outputs = [output for _, output in self._run_chunks(inputs, self._check_inputs(inputs, counts), output="all")]
        logits, hidden_states = zip(*outputs, strict=True)
        return torch.cat(logits, dim=1), tuple(torch.cat(parts, dim=1) for parts in zip(*hidden_states, strict=True))

    @torch.no_grad()
    def last(self, tokens: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Append tokens like `append` and return the logits [B, V] of the last token per row. Counts are at least 1."""
        inputs = NewTokens(tokens, None)
        counts = self._check_inputs(inputs, counts)
        if min(counts) < 1:
            raise ValueError(f"counts = {counts}: expected at least 1 token per sequence")
        replayed = self._replay_graph(inputs, counts)
        if replayed is not None:
            return replayed[:, 0]
        last = None
        for is_last, logits in self._run_chunks(inputs, counts, only_last=True):
            last = logits if last is None else torch.where(is_last[:, None, None], logits, last)
        assert last is not None
        return last[:, 0]

    def _get_rotary(self, device: torch.device) -> Rotary:
        """Return the RoPE tables of all positions on `device`, built once."""
        if device not in self._rotary:
            c = self._model.config
            self._rotary[device] = get_rotary_table(
                self.cache.capacity, c.rotary_width, c.rope_theta, device, scaling=c.rope_scaling
            )
        return self._rotary[device]

    def _replay_graph(self, inputs: NewTokens, counts: Sequence[int]) -> Tensor | None:
        """Return logits [B, 1, V] of one token per sequence from the CUDA graph; None if the step cannot be captured."""
        if inputs.tokens is None or inputs.width > 1 or not any(self.cache.starts) or not can_capture(self.cache):
            return None
        is_new = self._decode_graph is None
        if self._decode_graph is None or self._snapshot is None:
            if not is_plain(self._model, self.cache.like):
                return None
            self._snapshot = WeightSnapshot(self._model, self.cache.like.device)
            with self._run_eagerly():
                self._decode_graph = DecodeGraph(lambda tokens, step: self._run(NewTokens(tokens), step), self.cache)
        logits = self._decode_graph(inputs.tokens, counts).clone()
        # Checked while the GPU computes. A replay with outdated weights leaves no trace: the step runs again and overwrites
        # its tokens.
        if not is_new and not self._snapshot.is_current():
            self._decode_graph = self._snapshot = None
            self.cache.restore_lengths()
            return self._replay_graph(inputs, counts)
        self.cache.advance(counts, width=1, update_lengths=False)
        return logits

    def _run_chunks(
        self,
        inputs: NewTokens,
        counts: Sequence[int],
        *,
        only_last: bool = False,
        output: Literal["logits", "all"] = "logits",
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield the rows whose last token is in each chunk, bool [B], and the output of the model for the chunk.

        `only_last`: the head is applied to one token per row, which is the last of those rows.
        """
        device = self.cache.lengths.device
        inputs, start = inputs.to(device), 0
        ends = torch.tensor(counts, dtype=torch.int64).to(device, non_blocking=True) if only_last else self.cache.lengths
        while start < inputs.width:
            width = (
                kv_cache_size.MAX_STEP_TOKENS
                if any(self.cache.starts)
                else max(MAX_PREFILL_TOKENS // len(counts), kv_cache_size.MAX_STEP_TOKENS)
            )
            chunk = inputs.select(start, start + width)
            chunk_counts = [min(max(count - start, 0), chunk.width) for count in counts]
            columns = (ends - start - 1).clamp(0, chunk.width - 1)[:, None] if only_last and chunk.width > 1 else None
            step = self.cache.make_step(chunk.width, chunk_counts)
            with self._run_eagerly():
                result = self._run(chunk, step, columns=columns, output=output)
            self.cache.advance(chunk_counts, width=chunk.width)
            yield (start < ends) & (ends <= start + chunk.width), result
            start += chunk.width

    def _run(self, inputs: NewTokens, step: Step, **options: Any) -> Any:
        """Return the output of the model for the new tokens of `step`."""
        tokens, embeddings = inputs
        cache = ModelPass(self.cache, step, self._get_rotary)
        return self._model(tokens, embeddings=embeddings, cache=cache, **options)

    def _run_eagerly(self) -> AbstractContextManager[object]:
        """Return a context in which compiled modules run eagerly: each step would be another graph."""
        is_compiled = any(
            module is not None and module._compiled_call_impl is not None for module in (self._model, *self._model.blocks)
        )
        return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()

    def _check_inputs(self, inputs: NewTokens, counts: Sequence[int] | None) -> list[int]:
        """Return the count of every row. Raises the errors of `append`."""
        cache, c, tokens = self.cache, self._model.config, inputs.data
        if (inputs.tokens is None) == (inputs.embeddings is None):
            raise ValueError("Decoder: expected either tokens or embeddings, got both or neither; pass one of them")
        if inputs.tokens is not None:
            if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.shape[1]:
                raise ValueError(f"tokens: expected int64 [B, n], n >= 1, got {tokens.dtype} {tuple(tokens.shape)}")
        elif tokens.ndim != 3 or tokens.shape[2] != c.dim or not tokens.shape[1]:
            raise ValueError(f"embeddings: expected [B, n, {c.dim}], n >= 1, got {tuple(tokens.shape)}")
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
        if inputs.tokens is not None:
            least, most = (int(end) for end in tokens.aminmax())
            if least < 0 or most >= c.vocab_size:
                raise ValueError(f"tokens: expected ids in 0..{c.vocab_size - 1}, got {least}..{most}")
        end = max(start + count for start, count in zip(cache.starts, counts, strict=True))
        if end > cache.capacity:
            raise ValueError(f"{end} tokens do not fit in a decoder of capacity {cache.capacity}; increase the capacity")
        return counts
