"""The cache of a whole model: its layers', and how long each sequence is; B is the batch."""

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
    """What a model keeps of `batch` sequences of at most `capacity` tokens; `backend` is `cached_attention`'s, by default
    triton for a model whose layers run on these kernels, and torch for any other.

    Raises ValueError where that is more memory than there is, and says how many sequences would fit; as `resolve_backend`
    where the backend cannot run, or does not take the model's shapes.
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
        longest = model.config.ngrams
        self.latest_tokens = LatestTokens(longest, batch, self.lengths) if longest else None
        self.layers = [
            _make_attention_cache(cast(Block, block).attention, capacity, batch, like, backend) for block in model.blocks
        ]

    def make_step(self, width: int, counts: Sequence[int]) -> Step:
        """The next `width` tokens of every sequence, of which `counts` are no padding."""
        told = torch.tensor(counts, dtype=torch.int64).to(self.lengths.device, non_blocking=True)
        return self._build_step(self.starts, width, told)

    def make_graph_step(self, counts: Tensor) -> Step:
        """The next token of every sequence, or padding, as `counts` say, int64 [B] of 1 and 0: nothing that the host would
        do depends on the lengths or on `counts`."""
        return self._build_step(None, 1, counts)

    def embed(self, model: NSATransformer, tokens: Tensor, step: Step) -> Tensor:
        """What enters the first layer of new tokens int64 [B, S], [B, S, C]; what n-grams reach back to is kept."""
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
        """Every sequence is so many tokens longer; `on_device`: there, too, where a recorded step has done it itself."""
        self.starts = tuple(start + count for start, count in zip(self.starts, counts, strict=True))
        if update_lengths:
            # In place: a captured step looks for them where they are.
            self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens of every sequence; everything that grows with them is copied."""
        self.capacity = capacity
        for layer in self.layers:
            layer.grow(capacity)

    def reorder(self, rows: Sequence[int]) -> None:
        """Sequence i becomes what sequence rows[i] was, as a search with beams asks for."""
        self.starts = tuple(self.starts[row] for row in rows)
        index = torch.tensor(rows, device=self.lengths.device)
        for kept in (self.lengths, *self.tensors()):
            kept.copy_(kept[index])

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is kept of the sequences, one in every row."""
        if self.latest_tokens:
            yield self.latest_tokens.ring.data
        for layer in self.layers:
            yield from layer.tensors()


def _get_default_backend(model: NSATransformer) -> str:
    """triton where all that a layer computes is by triton, and for a dense model on a GPU, if our kernels take it."""
    if model.config.attention == "nsa":
        ours = all(choice.backend == "triton" for choice in model.backends.values())
    else:
        ours = model.head.weight.is_cuda and not any(_find_dense_limits(model))
    return "triton" if ours and not kernels.find_decoding_problem() else "torch"


def _check_backend(model: NSATransformer, backend: str) -> None:
    """Raises what `resolve_backend` raises; for a dense model, too."""
    c, like, limit = model.config, model.head.weight, None
    if c.attention == "nsa" or backend != "triton":
        resolve_backend(like.device, like.dtype, c.nsa, c, backend)
    else:
        absent, limit = _find_dense_limits(model)
        if absent:
            raise BackendError(f"backend = 'triton' cannot run: {absent}")
    if backend == "triton" and (limit := limit or kernels.find_decoding_problem()):
        raise NotImplementedError(f"decoding, backend = 'triton': {limit}; backend = 'torch' takes it as it is")


def _find_dense_limits(model: NSATransformer) -> tuple[str | None, str | None]:
    """Why our kernels cannot run here, and why they do not take this dense model's heads."""
    c, like = model.config, model.head.weight
    return kernels.find_device_problem(like.device, like.dtype), kernels.find_width_problem(c.d_k, c.d_v)


def _make_attention_cache(
    attention: object, capacity: int, batch: int, like: Tensor, backend: str
) -> NSACache | DenseCache:
    if isinstance(attention, SparseAttention):
        return NSACache(attention, capacity, batch, like, backend)
    return DenseCache(cast(DenseAttention, attention), capacity, batch, like, backend)
