"""A decoding step as a CUDA graph. Launched one by one from Python, its kernels take many times as long as they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa_lab.inference.cache import Cache, Step

# Runs before a recording: kernels are compiled and libraries take their workspaces, neither of which can be recorded.
WARMUP_RUNS = 2


def can_capture(cache: Cache) -> bool:
    """Whether nothing in a step waits on the host: the kernels do not, attention in torch does."""
    return cache.backend == "triton" and cache.lengths.is_cuda


class DecodeGraph:
    """One more token of every sequence of `cache`, recorded once and replayed at whatever lengths they have by then.

    `run` takes tokens int64 [B, 1] and a `Step` and gives logits [B, 1, V]; those of a call are overwritten by the
    next. A cache that grows has other tensors, and needs another recording.
    """

    def __init__(self, run: Callable[[Tensor, Step], Tensor], cache: Cache) -> None:
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.lengths.device)
        # Rehearsed with padding alone: what it leaves lies beyond every length, and is overwritten by what comes.
        self._last_counts: Sequence[int] = [0] * cache.batch
        self._counts = torch.zeros(cache.batch, dtype=torch.int64, device=cache.lengths.device)

        def step() -> Tensor:
            logits = run(self._tokens, cache.make_graph_step(self._counts))
            cache.lengths.add_(self._counts)
            return logits

        self._replay, self._logits = capture_graph(step)

    def __call__(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits [B, 1, V] of tokens int64 [B, 1], of which `counts` (1 or 0) are no padding.

        The cache's lengths on the device are then those after this step: `Cache.advance` is not to write them again.
        """
        self._tokens.copy_(tokens)
        if counts != self._last_counts:  # a copy from the host takes longer than a layer
            self._counts.copy_(torch.tensor(counts, dtype=torch.int64), non_blocking=True)
            self._last_counts = list(counts)
        self._replay()
        return self._logits


def capture_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What replays `run`, and the tensor that every replay fills anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result
