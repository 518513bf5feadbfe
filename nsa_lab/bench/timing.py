"""How a callable is timed: captured CUDA graphs on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

# Steps of a turn: one alone, as when a model writes, once what the other one left in the caches is gone.
N_ROUNDS, N_WARMUP, N_TIMED = 4, 3, 6
N_REPEATS = 10  # of a call on a GPU, at least
# Long calls meet the card's power limit, whose control lets the clock swing by several per cent about once a second: a
# median over less time than this is that of a peak or of a dip.
LONG_MS, SUSTAINED_MS = 5, 2000


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of `run`, warmed up. On a GPU it is captured once and replayed, with a cold L2 each time."""
    return _time_graph(run) if device.type == "cuda" else _time_by_clock(run)


def time_eager_ms(run: Callable[[], object], device: torch.device) -> float | None:
    """Median milliseconds of `run` with its launches, as the host makes them, on a GPU, with a cold L2; None on a CPU."""
    if device.type != "cuda":
        return None
    from triton.testing import do_bench

    run()
    return do_bench(run, warmup=20, rep=100, return_mode="median")


def time_interleaved_ms(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median milliseconds of each by the clock. They take turns, so that what else the machine does meets all alike."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(N_ROUNDS):
        for name, run in runs.items():
            steps = [_time_once_ms(run, device) for _ in range(N_WARMUP + N_TIMED)]
            took[name] += steps[N_WARMUP:]
    return {name: statistics.median(times) for name, times in took.items()}


def _time_once_ms(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_refusal(reason: RuntimeError, warned: Sequence[str] = ()) -> str:
    """Why a contender does not run at a shape, in a note's few words. Raises `reason` itself for a fault of the device:
    nothing that was measured after one would be true.

    `warned`: what was warned of meanwhile. Where SDPA has no kernel it says so in the error, and why in a warning, among
    others that head a list or name the kernels that were switched off.
    """
    if "CUDA error" in str(reason):
        raise reason
    why = [told for told in warned if not told.split(" (Triggered")[0].endswith(("because:", "has been runtime disabled."))]
    return f"does not run: {([*why, *str(reason).splitlines()] or [type(reason).__name__])[0][:90]}"


def make_profiler() -> profile:
    """Of one cycle; torch warns into the report that it drops events of earlier ones unless told to keep them."""
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)


def record_kernels(run: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of every kernel that `run` launches; none on a CPU."""
    if device.type != "cuda":
        return []
    torch.cuda.synchronize(device)
    with make_profiler() as recorded:
        run()
        torch.cuda.synchronize(device)
    events = recorded.events()
    assert events is not None, "a profiler has events from the end of its `with` block on"
    # A registered operator's range is reported as if it were a kernel, too.
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith("nsa_lab::")]
    return [(e.name, e.time_range.start, e.time_range.end) for e in kernels]


def measure_kernel_us(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Microseconds of each kernel in a call, all its launches together: the mean of `REPEATS` calls after one."""
    run()
    spent = defaultdict[str, float](float)
    for name, start, end in record_kernels(lambda: [run() for _ in range(N_REPEATS)], device):
        spent[name] += (end - start) / N_REPEATS
    return dict(spent)


def measure_peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
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
    rep = max(SUSTAINED_MS if once > LONG_MS else 40, N_REPEATS * once)
    ms = do_bench(graph.replay, warmup=max(10, 3 * once), rep=rep, return_mode="median")
    del graph
    torch.cuda.empty_cache()
    return ms


def measure_matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here: 8,192 wide on a GPU, 1,024 on a CPU. The best of `ROUNDS` turns, since what
    disturbs one (a library that loads, a card that wakes up) only ever makes it slower."""
    n, times = (8192, 20) if device.type == "cuda" else (1024, 3)
    a, b, product = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))

    def turn() -> None:
        for _ in range(times):
            torch.mm(a, b, out=product)

    return 2 * n**3 * times * 1e3 / min(_time_once_ms(turn, device) for _ in range(N_ROUNDS))


def get_memory_bytes_per_s(device: torch.device) -> float | None:
    """What the memory of a GPU can give, by its clock and the width of its bus; None on a CPU."""
    if device.type != "cuda":
        return None
    from triton.testing import get_dram_gbps  # pyright: ignore[reportAttributeAccessIssue]

    return get_dram_gbps(torch.cuda.current_device() if device.index is None else device.index) * 1e9


def _time_by_clock(run: Callable[[], object], repeats: int = 3) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
