"""Cache of a model: the caches of its layers and the length of each sequence. B is the batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nsa_lab.attention import BackendError, kernels, resolve_backend
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache.attention_cache import DenseCache, NSACache
from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.storage import LatestTokens
from nsa_lab.model import NSATransformer
from nsa_lab.model.placement import Placement, check_weights_in_memory, find_placement


class Cache:
    """Cache of `batch` sequences of at most `capacity` tokens each.

    backend: of `cached_attention`, "torch" or "triton". Default: triton for a model whose layers use the Triton kernels,
    otherwise torch.

    Raises ValueError for weights on the meta device; ConfigError if the cache does not fit in memory, with the number of
    sequences that would fit; the errors of `resolve_backend` if the backend cannot run or does not support the shapes.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def __init__(self, model: NSATransformer, capacity: int, batch: int = 1, backend: str | None = None) -> None:
        check_weights_in_memory(model)
        placement = find_placement(model)
        device, dtype = placement
        backend = self.backend = backend or _get_default_backend(model, placement)
        _check_backend(model, placement, backend)
        kv_cache_size.check_cache_fits(model.config, capacity, batch, device, dtype.itemsize)
        self.capacity, self.batch = capacity, batch
        self.like = torch.empty(0, device=device, dtype=dtype)  # has the device and dtype of the embeddings
        self.starts = self._written = (0,) * batch
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(batch, device=device)[:, None]
        max_ngram = model.config.ngrams
        self.latest_tokens = LatestTokens(max_ngram, batch, self.lengths) if max_ngram else None
        cache_class = NSACache if model.config.attention == "nsa" else DenseCache
        # Layers may be on different devices.
        self.layers = [
            cache_class(
                model.config, capacity, batch, torch.empty(0, device=placed.device, dtype=placed.dtype), backend, index
            )
            for index, placed in enumerate(map(find_placement, model.blocks))
        ]

    def make_step(self, width: int, counts: Sequence[int]) -> Step:
        """Return the step of the next `width` tokens of every sequence; `counts` of them are not padding."""
        counts_on_device = torch.tensor(counts, dtype=torch.int64).to(self.lengths.device, non_blocking=True)
        return Step(self.starts, self.lengths, width, counts_on_device, self._rows)

    def make_graph_step(self, counts: Tensor) -> Step:
        """Return the step of the next token of every sequence, for capture in a CUDA graph.

        counts: int64 [B], 1 for a token and 0 for padding. No work on the host depends on it or on the lengths.
        """
        return Step(None, self.lengths, 1, counts, self._rows)

    def advance(self, counts: Sequence[int], *, width: int = 1, update_lengths: bool = True) -> None:
        """Add `counts` to the lengths, after a step of `width` tokens per sequence, padding included.

        `update_lengths=False`: a graph replay has already updated them on the device.
        """
        is_prefill = not any(self.starts)  # which writes no padding to the rings
        ends = counts if is_prefill else (start + width for start in self.starts)
        self._written = tuple(map(max, self._written, ends))
        self._set_lengths([start + count for start, count in zip(self.starts, counts, strict=True)], update_lengths)

    def crop(self, counts: Sequence[int]) -> None:
        """Remove the last counts[i] tokens of sequence i.

        Later tokens overwrite them, except in the rings, where they have replaced earlier tokens. Raises ValueError if a
        sequence is shorter, NotImplementedError if the rings no longer have the tokens before the removed ones.
        """
        starts = [start - count for start, count in zip(self.starts, counts, strict=True)]
        if min(counts) < 0 or min(starts) < 0:
            raise ValueError(
                f"crop: expected 0 to {list(self.starts)} tokens, which the sequences have, got {list(counts)}"
            )
        n_overwritten = max(
            (written - start for written, start in zip(self._written, starts, strict=True) if start), default=0
        )
        if n_overwritten > kv_cache_size.MAX_STEP_TOKENS:
            raise NotImplementedError(
                f"crop: expected at most {kv_cache_size.MAX_STEP_TOKENS} tokens, because the rings of the window and of "
                f"incomplete blocks keep no more, got {n_overwritten}, padding included; use a new cache"
            )
        self._set_lengths(starts)

    def restore_lengths(self) -> None:
        """Set the lengths on the device to those on the host, after graph replays whose tokens are not kept."""
        self._set_lengths(self.starts)

    def _set_lengths(self, starts: Sequence[int], update_lengths: bool = True) -> None:
        self.starts = tuple(starts)
        if update_lengths:
            # In place: a captured graph reads this memory.
            self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)

    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens per sequence. Tensors that depend on it are copied."""
        self.capacity = capacity
        for layer in self.layers:
            layer.grow(capacity)

    def reorder(self, rows: Sequence[int]) -> None:
        """Replace sequence i with sequence rows[i], as beam search needs."""
        self.starts, self._written = (tuple(counts[row] for row in rows) for counts in (self.starts, self._written))
        index = torch.tensor(rows)
        for tensor in (self.lengths, *self.tensors()):
            # fp8 cannot be indexed on every device.
            stored = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            stored.copy_(stored[index.to(tensor.device)])

    def tensors(self) -> Iterator[Tensor]:
        """Yield all cached tensors; dimension 0 is the sequence."""
        if self.latest_tokens:
            yield self.latest_tokens.ring.rows
        for layer in self.layers:
            yield from layer.tensors()


def _get_default_backend(model: NSATransformer, placement: Placement) -> str:
    """Return "triton" if all parts of an NSA layer use it, or for a dense model that the kernels support on a GPU."""
    if model.config.attention == "nsa":
        use_triton = all(resolved.backend == "triton" for resolved in model.backends.values())
    else:
        use_triton = placement.device.type == "cuda" and not any(_find_dense_limits(model, placement))
    return "triton" if use_triton and not kernels.find_decoding_problem() else "torch"


def _check_backend(model: NSATransformer, placement: Placement, backend: str) -> None:
    """Raise the errors of `resolve_backend`, also for a dense model."""
    c, limit = model.config, None
    if c.attention == "nsa" or backend != "triton":
        resolve_backend(*placement, c.nsa, c, backend)
    else:
        device_problem, limit = _find_dense_limits(model, placement)
        if device_problem:
            raise BackendError(f"backend = 'triton' cannot run: {device_problem}")
    if backend == "triton" and (limit := limit or kernels.find_decoding_problem()):
        raise NotImplementedError(f"decoding, backend = 'triton': {limit}; use backend = 'torch'")


def _find_dense_limits(model: NSATransformer, placement: Placement) -> tuple[str | None, str | None]:
    """Return why the kernels cannot run on this device, and why they do not support the head widths; None if they do."""
    c = model.config
    return kernels.find_device_problem(*placement), kernels.find_width_problem(c.d_k, c.d_v)
