"""How a callable is timed: captured CUDA graphs on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 10  # of a call on a GPU, at least
# Long calls meet the card's power limit, whose control lets the clock swing by several per cent about once a second: a
# median over less time than this is that of a peak or of a dip.
LONG_MS, SUSTAINED_MS = 5, 2000


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of `run`, warmed up. On a GPU it is captured once and replayed, with a cold L2 each time."""
    return _time_graph(run) if device.type == "cuda" else _time_clock(run)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Most device memory that `run` held at once beyond what was held before; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _time_graph(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    once = do_bench(graph.replay, warmup=10, rep=1)
    # The first calls after a pause run at a higher clock than those of a training step.
    rep = max(SUSTAINED_MS if once > LONG_MS else 40, REPEATS * once)
    ms = do_bench(graph.replay, warmup=max(10, 3 * once), rep=rep, return_mode="median")
    del graph
    torch.cuda.empty_cache()
    return ms


def _time_clock(run: Callable[[], object], repeats: int = 3) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
