"""CUDA graph of a decode step. Without it, launching the kernels from Python takes many times their run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa_lab.inference.cache import Cache, Step

# Runs before the capture. They compile kernels and allocate library workspaces, which cannot be captured.
WARMUP_RUNS = 2


def can_capture(cache: Cache) -> bool:
    """Return True if a step can be captured: the kernels never wait for the host, attention in PyTorch does."""
    return cache.backend == "triton" and cache.lengths.is_cuda


class DecodeGraph:
    """CUDA graph of one token per sequence of `cache`, captured once and replayed at any lengths.

    run: maps tokens int64 [B, 1] and a `Step` to logits [B, 1, V]. The logits of a call are overwritten by the next call.
    A cache that grows gets new tensors and needs a new graph.
    """

    def __init__(self, run: Callable[[Tensor, Step], Tensor], cache: Cache) -> None:
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.lengths.device)
        # Warm up with padding only: its values are beyond every length, and later tokens overwrite them.
        self._last_counts: Sequence[int] = [0] * cache.batch
        self._counts = torch.zeros(cache.batch, dtype=torch.int64, device=cache.lengths.device)

        def step() -> Tensor:
            logits = run(self._tokens, cache.make_graph_step(self._counts))
            cache.lengths.add_(self._counts)
            return logits

        self.replay, self._logits = capture_graph(step)

    def __call__(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Return logits [B, 1, V] of tokens int64 [B, 1]. `counts`: 1 for a token, 0 for padding.

        The replay updates the lengths on the device; call `Cache.advance` with update_lengths=False. The host does not wait
        for the GPU.
        """
        if tokens.device.type == "cpu" and self._tokens.is_cuda:
            # A copy from pinned memory does not block. PyTorch does not reuse this memory before the copy has ended.
            tokens = torch.empty_like(tokens, pin_memory=True).copy_(tokens)
        self._tokens.copy_(tokens, non_blocking=True)
        if counts != self._last_counts:  # a host-to-device copy takes longer than a layer
            self._counts.copy_(torch.tensor(counts, dtype=torch.int64), non_blocking=True)
            self._last_counts = list(counts)
        self.replay()
        return self._logits


def capture_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture `run`. Return a function that replays it and the tensor that each replay overwrites."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARMUP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result
