"""Timing of callables: captured CUDA graphs on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile

# Calls per round of interleaved timing. The warm-up evicts what the other callables left in the caches.
N_ROUNDS, N_WARMUP, N_TIMED = 4, 3, 6
N_REPEATS = 10  # minimum number of timed calls on a GPU
RANGES = ("nsa_lab::", "nccl:", "DistributedDataParallel.", "FSDP::")
# Long calls reach the power limit of the GPU, whose control varies the clock by several percent about once per second. A
# median over less time than this would measure a peak or a dip.
LONG_MS, SUSTAINED_MS = 5, 2000


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of `run` in milliseconds, after warm-up.

    On a GPU it is captured once and replayed with a cold L2.
    """
    return _time_graph(run) if device.type == "cuda" else _time_by_clock(run)


def time_eager_ms(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the median time of `run` in milliseconds with its host launches and a cold L2 on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    from triton.testing import do_bench

    run()
    return do_bench(run, warmup=20, rep=100, return_mode="median")


def time_interleaved_ms(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median wall-clock time of each callable in milliseconds.

    The callables alternate in rounds, so that other load on the machine affects all of them equally.
    """
    times_by_name: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(N_ROUNDS):
        for name, run in runs.items():
            round_times = [_time_once_ms(run, device) for _ in range(N_WARMUP + N_TIMED)]
            times_by_name[name] += round_times[N_WARMUP:]
    return {name: statistics.median(times) for name, times in times_by_name.items()}


def _time_once_ms(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for the work of a CUDA device; a CPU has none in flight."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_refusal(reason: RuntimeError, warned: Sequence[str] = ()) -> str:
    """Return a short note that explains why an implementation does not run at a shape.

    Raises `reason` itself for a device fault, after which no measurement would be valid. `warned`: the warnings during the
    call. If SDPA has no kernel, the reason is in a warning, among others that head a list or name disabled kernels.
    """
    if "CUDA error" in str(reason):
        raise reason
    headers = "because:", "has been runtime disabled."
    reasons = [warning for warning in warned if not warning.split(" (Triggered")[0].endswith(headers)]
    return f"does not run: {([*reasons, *str(reason).splitlines()] or [type(reason).__name__])[0][:90]}"


def make_profiler() -> profile:
    """Return a profiler of one cycle. Without `acc_events`, torch warns that it drops the events of earlier cycles."""
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)


def record_kernels(run: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """Return name, start and end (microseconds) of every kernel that `run` launches; empty on a CPU."""
    if device.type != "cuda":
        return []
    torch.cuda.synchronize(device)
    with make_profiler() as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.events()
    assert events is not None, "a profiler has events after its `with` block"
    # Ranges of registered operators, of collectives and of a wrapped model are reported as kernels, too.
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(RANGES)]
    return [(e.name, e.time_range.start, e.time_range.end) for e in kernels]


def measure_kernel_us(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return microseconds per call of each kernel, summed over its launches.

    The mean of `N_REPEATS` calls after a warm-up.
    """
    run()
    time_by_kernel = defaultdict[str, float](float)
    for name, start, end in record_kernels(lambda: [run() for _ in range(N_REPEATS)], device):
        time_by_kernel[name] += (end - start) / N_REPEATS
    return dict(time_by_kernel)


def make_forward_backward(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Return a callable that computes the gradients of the inputs that require them, for a fixed output gradient."""
    leaves, d_out = [x for x in inputs if x.requires_grad], torch.randn_like(run(*inputs))
    return lambda: torch.autograd.grad(run(*inputs), leaves, d_out)


def measure_peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak device memory of `run` in MiB, in excess of the memory allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _time_graph(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    single_ms = do_bench(graph.replay, warmup=10, rep=1)
    # The first calls after a pause run at a higher clock than the calls of a training step.
    rep = max(SUSTAINED_MS if single_ms > LONG_MS else 40, N_REPEATS * single_ms)
    ms = do_bench(graph.replay, warmup=max(10, 3 * single_ms), rep=rep, return_mode="median")
    del graph
    torch.cuda.empty_cache()
    return ms


def measure_matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product: width 8,192 on a GPU, 1,024 on a CPU.

    The best of `N_ROUNDS` rounds, because disturbances (a library being loaded, a GPU leaving its idle state) only ever
    slow a round down.
    """
    n, n_products = (8192, 20) if device.type == "cuda" else (1024, 3)
    a, b, product = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))

    def run_round() -> None:
        for _ in range(n_products):
            torch.mm(a, b, out=product)

    return 2 * n**3 * n_products * 1e3 / min(_time_once_ms(run_round, device) for _ in range(N_ROUNDS))


def get_memory_bytes_per_s(device: torch.device) -> float | None:
    """Return the memory bandwidth of a GPU, from its memory clock and bus width; None on a CPU."""
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
