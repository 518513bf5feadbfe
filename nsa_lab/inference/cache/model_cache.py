"""Cache of a model: the caches of its layers and the length of each sequence. B is the batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from nsa_lab.attention import BackendError, kernels, resolve_backend
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.attention_cache import DenseCache, NSACache
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.storage import LatestTokens
from nsa_lab.model import Block, DenseAttention, NSATransformer, SparseAttention


class Cache:
    """Cache of `batch` sequences of at most `capacity` tokens each.

    backend: of `cached_attention`, "torch" or "triton". Default: triton for a model whose layers use the Triton kernels,
    otherwise torch.

    Raises ValueError if the cache does not fit in memory, with the number of sequences that would fit, and the errors of
    `resolve_backend` if the backend cannot run or does not support the shapes of the model.
    """

    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, backend: str | None = None) -> None:
        like = model.head.weight
        backend = self.backend = backend or _get_default_backend(model)
        _check_backend(model, backend)
        kv_cache_size.check_cache_fits(model.config, capacity, batch, like.device, like.element_size())
        self.capacity, self.batch = capacity, batch
        self.starts = (0,) * batch
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=like.device)
        self._rows = torch.arange(batch, device=like.device)[:, None]
        max_ngram = model.config.ngrams
        self.latest_tokens = LatestTokens(max_ngram, batch, self.lengths) if max_ngram else None
        self.layers = [
            _make_attention_cache(cast(Block, block).attention, capacity, batch, like, backend) for block in model.blocks
        ]

    def make_step(self, width: int, counts: Sequence[int]) -> Step:
        """Return the step of the next `width` tokens of every sequence; `counts` of them are not padding."""
        counts_on_device = torch.tensor(counts, dtype=torch.int64).to(self.lengths.device, non_blocking=True)
        return self._build_step(self.starts, width, counts_on_device)

    def make_graph_step(self, counts: Tensor) -> Step:
        """Return the step of the next token of every sequence, for capture in a CUDA graph.

        counts: int64 [B], 1 for a token and 0 for padding. No work on the host depends on it or on the lengths.
        """
        return self._build_step(None, 1, counts)

    def embed(self, model: NSATransformer, tokens: Tensor, step: Step) -> Tensor:
        """Return the embedding [B, S, C] of new tokens int64 [B, S], and cache the tokens that later n-grams need."""
        if not self.latest_tokens:
            return model.embed(tokens)
        x = model.embed(tokens, step.positions, self.latest_tokens.read_previous(step))
        self.latest_tokens.put(tokens, step)
        return x

    def _build_step(self, starts: tuple[int, ...] | None, width: int, counts: Tensor) -> Step:
        positions = self.lengths.long()[:, None]
        if width > 1:
            positions = positions + torch.arange(width, device=self.lengths.device)
        return Step(starts, self.lengths, positions, counts, self._rows)

    def advance(self, counts: Sequence[int], *, update_lengths: bool = True) -> None:
        """Add `counts` to the lengths. `update_lengths=False`: a graph replay has already updated them on the device."""
        self.starts = tuple(start + count for start, count in zip(self.starts, counts, strict=True))
        if update_lengths:
            # In place: a captured graph reads this memory.
            self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens per sequence. Tensors that depend on it are copied."""
        self.capacity = capacity
        for layer in self.layers:
            layer.grow(capacity)

    def reorder(self, rows: Sequence[int]) -> None:
        """Replace sequence i with sequence rows[i], as beam search needs."""
        self.starts = tuple(self.starts[row] for row in rows)
        index = torch.tensor(rows, device=self.lengths.device)
        for tensor in (self.lengths, *self.tensors()):
            tensor.copy_(tensor[index])

    def tensors(self) -> Iterator[Tensor]:
        """Yield all cached tensors; dimension 0 is the sequence."""
        if self.latest_tokens:
            yield self.latest_tokens.ring.data
        for layer in self.layers:
            yield from layer.tensors()


def _get_default_backend(model: NSATransformer) -> str:
    """Return "triton" if all parts of an NSA layer use it, or for a dense model that the kernels support on a GPU."""
    if model.config.attention == "nsa":
        use_triton = all(resolved.backend == "triton" for resolved in model.backends.values())
    else:
        use_triton = model.head.weight.is_cuda and not any(_find_dense_limits(model))
    return "triton" if use_triton and not kernels.find_decoding_problem() else "torch"


def _check_backend(model: NSATransformer, backend: str) -> None:
    """Raise the errors of `resolve_backend`, also for a dense model."""
    c, like, limit = model.config, model.head.weight, None
    if c.attention == "nsa" or backend != "triton":
        resolve_backend(like.device, like.dtype, c.nsa, c, backend)
    else:
        device_problem, limit = _find_dense_limits(model)
        if device_problem:
            raise BackendError(f"backend = 'triton' cannot run: {device_problem}")
    if backend == "triton" and (limit := limit or kernels.find_decoding_problem()):
        raise NotImplementedError(f"decoding, backend = 'triton': {limit}; use backend = 'torch'")


def _find_dense_limits(model: NSATransformer) -> tuple[str | None, str | None]:
    """Return why the kernels cannot run on this device, and why they do not support the head widths; None if they do."""
    c, like = model.config, model.head.weight
    return kernels.find_device_problem(like.device, like.dtype), kernels.find_width_problem(c.d_k, c.d_v)


def _make_attention_cache(
    attention: object, capacity: int, batch: int, like: Tensor, backend: str
) -> NSACache | DenseCache:
    if isinstance(attention, SparseAttention):
        return NSACache(attention, capacity, batch, like, backend)
    return DenseCache(cast(DenseAttention, attention), capacity, batch, like, backend)
