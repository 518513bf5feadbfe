"""`nsa-lab bench train`: tokens/s of NSA and of its dense twin at each length, in one run, on real batches.

Both are trained by the trainer's own step (compiled, fused AdamW, clipping), so what is timed is what a run does. A row is
a length and a micro-batch; the ratio within a row is the result, absolute figures hold for the one device.
"""

from __future__ import annotations

import gc
import itertools
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nsa_lab.attention.kernels.kernel_names import get_kernel_part
from nsa_lab.bench import records
from nsa_lab.bench.timing import measure_matmul_flops_per_s, record_kernels
from nsa_lab.config import ConfigError, DataConfig, ModelConfig, NSAConfig, RunConfig, RuntimeConfig, TrainConfig
from nsa_lab.data import Batch, prepare
from nsa_lab.train.build import Builders, TrainContext, build_context
from nsa_lab.train.distributed import World

# T x micro-batch -> NSA's tokens/s over the dense twin's that the project set itself (docs/benchmarks/README.md).
TARGETS = {(2048, 32): 0.80, (8192, 8): 1.12, (32768, 2): 2.45, (65536, 1): 3.9}
# The global batch of the A100 report: the host is slower than the GPU, and a step is replayed as a CUDA graph.
SMALL_SHAPE, SMALL_TARGET = (2048, 4), 300_000  # tokens/s
GPU_SHAPES = (*TARGETS, SMALL_SHAPE)
CPU_SHAPES = ((128, 2), (256, 1))
N_TURNS = 4  # of each of what is compared
CPU_MODEL = ModelConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, nsa=NSAConfig(l=16, d=8, l_sel=16, n_sel=4, w=32)
)
KINDS = ("nsa", "dense")
TABLE_WIDTH = 170  # characters, where the output is no terminal

# What names of other libraries' kernels contain -> where the time goes; the first match counts.
OTHER_KERNELS = {
    "gemm": ("gemm", "nvjet", "cutlass", "splitk", "matmul", "xmma"),
    "dense attention": ("flash", "fmha", "sdpa", "attention"),
    "optimiser": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "copy": ("memcpy", "memset"),
}


@dataclass
class StepMeasurement:
    """One model at one shape. Times in seconds, sizes in bytes, rates in FLOP/s."""

    kind: str
    seq_len: int
    micro_batch: int
    tokens_per_s: float
    step_s: float
    flops_6n: float
    flops_actual: float
    memory_peak_bytes: int
    backends: dict[str, str]
    cuda_graph: bool = False
    breakdown: dict[str, float] = field(default_factory=dict)
    documents_per_row: float = 1.0


def run_train_bench(
    shapes: tuple[tuple[int, int], ...] | None = None,
    json_path: Path | None = None,
    *,
    steps: int = 20,
    model: ModelConfig | None = None,
    data: DataConfig | None = None,
    picture: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure NSA and dense at `shapes` (tokens, sequences a forward pass), print a table, write JSON and a picture.

    On a CUDA device the default is the production model at the four shapes of `BARS`, bf16 and compiled; on a CPU a tiny
    model in float32, which proves the path and measures nothing worth quoting. Raises ConfigError for an unusable shape.
    """
    cuda = torch.cuda.is_available()
    shapes = shapes or (GPU_SHAPES if cuda else CPU_SHAPES)
    base = model or (ModelConfig() if cuda else CPU_MODEL)
    console = console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    report: dict[str, Any] = {
        "what": "training step, NSA and its dense twin",
        **records.origin(records.device_name(), records.TRAINING),
        "gemm_flops_per_s": measure_matmul_flops_per_s(torch.device("cuda"), torch.bfloat16) if cuda else None,
        "model": base.model_dump(),
        "rows": [],
    }
    for seq_len, micro in shapes:
        pair = measure_configs({kind: make_bench_config(base, kind, seq_len, micro, cuda, data) for kind in KINDS}, steps)
        row = {
            "seq_len": seq_len,
            "micro_batch": micro,
            "ratio": pair["nsa"].tokens_per_s / pair["dense"].tokens_per_s,
            "bar": None if model else TARGETS.get((seq_len, micro)),
            **{kind: asdict(pair[kind]) for kind in KINDS},
        }
        report["rows"].append(row)
        console.print(
            f"T = {seq_len} x {micro}: NSA {row['nsa']['tokens_per_s']:,.0f}, "
            f"dense {row['dense']['tokens_per_s']:,.0f} tokens/s, ratio {row['ratio']:.3f}"
        )
    console.print(_make_speed_table(report), _make_breakdown_table(report), records.code_text(report))
    if json_path:
        records.write(json_path, report)
    if picture:
        plot_speeds(report, picture)
    return report


def measure_configs(configs: Mapping[str, RunConfig], steps: int) -> dict[str, StepMeasurement]:
    """Median time of an optimiser step of each after warm-up, over `steps` that they take in turns, so that what the clock
    or the machine does meets all alike; then a profile of two more. All of them are in memory together."""
    runs = {name: _TimedRun.create_warmed_up(config) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(N_TURNS):
        for name, run in runs.items():
            times[name].append(run.time_steps(max(steps // N_TURNS, 1)))
    found = {name: run.make_measurement(statistics.median(times[name])) for name, run in runs.items()}
    runs.clear()
    _free_memory()
    return found


@dataclass
class _TimedRun:
    """What takes the steps that are timed. `peak_bytes`: the most memory that it held in those before, alone."""

    config: RunConfig
    parts: TrainContext
    loaded_batches: list[Batch]
    batches: Iterator[Batch]
    peak_bytes: int

    @classmethod
    def create_warmed_up(cls, config: RunConfig) -> _TimedRun:
        device, before = torch.device("cuda" if config.runtime.device == "cuda" else "cpu"), 0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            # From the start: what a captured graph holds is allocated while it is captured, and no longer.
            torch.cuda.reset_peak_memory_stats()
        dataset = prepare(config.data, config.model.vocab_size, config.train.seq_len)
        parts = build_context(config, World(), device, dataset, Builders())
        ready = _load_batches(parts)
        run = cls(config, parts, ready, itertools.cycle(ready), 0)
        run.time_steps(5)
        run.peak_bytes = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        return run

    def step(self) -> None:
        batch = next(self.batches)
        self.parts.stepper.step(*batch[:2], lr=1e-4, poll=lambda: None, weights=batch.weights, documents=batch.documents)

    def time_steps(self, steps: int) -> float:
        """Mean seconds of so many steps in a row."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    def make_measurement(self, step_s: float) -> StepMeasurement:
        train, model = self.config.train, self.parts.model
        rate, flops = train.tokens_per_step / step_s, model.flops_per_token(train.seq_len)
        return StepMeasurement(
            self.config.model.attention,
            train.seq_len,
            train.micro_batch_size or train.batch_size,
            rate,
            step_s,
            rate * flops["dense"],
            rate * flops[self.config.model.attention],
            self.peak_bytes,
            {part: choice.backend for part, choice in model.backends.items()},
            self.config.runtime.cuda_graph,
            self._measure_breakdown() if self.parts.device.type == "cuda" else {},
            _compute_documents_per_row(self.loaded_batches),
        )

    def _measure_breakdown(self, steps: int = 2) -> dict[str, float]:
        """Share of the wall time of a step by part, and idle."""
        kernels = record_kernels(lambda: [self.step() for _ in range(steps)], self.parts.device)
        spent = _sum_time_by_part((classify_kernel(name), start, end) for name, start, end in kernels)
        wall = sum(spent.values())
        return {part: us / wall for part, us in sorted(spent.items(), key=lambda item: -item[1])}


def parse_shape(text: str) -> tuple[int, int]:
    """`"2048x32"` -> (2048, 32). Raises ConfigError."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(int(n) for n in match.groups()):
        raise ConfigError(f"--shape {text}: expected tokens x sequences, for example 2048x32")
    return int(match[1]), int(match[2])


def make_bench_config(
    base: ModelConfig, kind: str, seq_len: int, micro: int, cuda: bool, data: DataConfig | None, *, graph: bool = True
) -> RunConfig:
    """A run that saves and evaluates nothing. `graph`: replay a CUDA graph where a run of this size would."""
    runtime = RuntimeConfig(device="cpu")
    if cuda:
        runtime = RuntimeConfig(
            device="cuda", precision="bf16", compile=True, cuda_graph=graph and is_small(seq_len, micro)
        )
    return RunConfig(
        name="bench",
        model=base.model_copy(update={"attention": kind}),
        runtime=runtime,
        data=data or DataConfig(),
        train=TrainConfig(steps=1000, seq_len=seq_len, batch_size=micro, eval_every=0, save_every=0),
    )


def is_small(seq_len: int, micro: int) -> bool:
    """Whether a run of this shape replays CUDA graphs: the host is slower than the GPU."""
    return seq_len * micro <= SMALL_SHAPE[0] * SMALL_SHAPE[1]


def _load_batches(parts: TrainContext) -> list[Batch]:
    """Batches on the device already: loading is measured by a run, not here. Where documents begin is known on the CPU."""
    return [_move_to_device(parts.batches.weighted_batch(step), parts.device) for step in range(4)]


def _compute_documents_per_row(batches: list[Batch]) -> float:
    rows = [len(row) - 1 for batch in batches if batch.documents for row in batch.documents.row_bounds]
    return statistics.fmean(rows) if rows else 1.0


def _move_to_device(batch: Batch, device: torch.device) -> Batch:
    inputs, targets, weights = (x if x is None else x.to(device) for x in batch[:3])
    assert inputs is not None and targets is not None, "a batch has both"
    return Batch(inputs, targets, weights, batch.documents)


def classify_kernel(kernel: str) -> str:
    """Where the time of a kernel goes, by its name alone: a replayed graph knows no operators."""
    return get_kernel_part(kernel) or next(
        (part for part, words in OTHER_KERNELS.items() if any(word in kernel.lower() for word in words)), "elementwise"
    )


def _sum_time_by_part(kernels: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Time of each part, given (part, start, end) of each kernel.

    Kernels that run at the same time share it; where none runs, the time is that of `idle`.
    """
    edges = sorted((time, change, part) for part, *ends in kernels for time, change in zip(ends, (1, -1), strict=True))
    spent, running = defaultdict[str, float](float, idle=0.0), Counter[str]()
    for (start, change, part), (end, *_) in itertools.pairwise(edges):
        running[part] += change
        now = running if running.total() else {"idle": 1}
        for one, number in now.items():
            spent[one] += (end - start) * number / sum(now.values())
    return dict(spent)


def _make_speed_table(report: dict[str, Any]) -> Table:
    peak = report["gemm_flops_per_s"]
    table = Table(
        title=f"training step on {report['device']}" + (f", bf16 GEMM peak here {peak / 1e12:.0f} TFLOP/s" if peak else "")
    )
    for name in (
        "T x micro",
        "model",
        "tokens/s",
        "ratio",
        "bar",
        "graph",
        "TFLOP/s (6N + dense)",
        "TFLOP/s (actual)",
        "of peak",
        "peak GB",
        "backends",
    ):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        for kind in KINDS:
            m = row[kind]
            table.add_row(
                f"{m['seq_len']} x {m['micro_batch']}",
                kind,
                f"{m['tokens_per_s']:,.0f}",
                f"{row['ratio']:.3f}" if kind == "nsa" else "",
                _format_target(row) if kind == "nsa" else "",
                "yes" if m["cuda_graph"] else "",
                f"{m['flops_6n'] / 1e12:.1f}",
                f"{m['flops_actual'] / 1e12:.1f}",
                f"{m['flops_6n'] / peak:.0%} / {m['flops_actual'] / peak:.0%}" if peak else "",
                f"{m['memory_peak_bytes'] / 1e9:.2f}",
                ", ".join(sorted(set(m["backends"].values()))),
            )
    return table


def _format_target(row: dict[str, Any]) -> str:
    if (row["seq_len"], row["micro_batch"]) == SMALL_SHAPE:
        return f"{SMALL_TARGET:,}/s"
    return f"{row['bar']}" if row["bar"] else ""


def _make_breakdown_table(report: dict[str, Any]) -> Table:
    table = Table(title="share of a step's wall time")
    table.add_column("T x micro")
    table.add_column("model")
    table.add_column("parts")
    for row in report["rows"]:
        for kind in KINDS:
            parts = ", ".join(f"{part} {share:.1%}" for part, share in row[kind]["breakdown"].items())
            table.add_row(f"{row['seq_len']} x {row['micro_batch']}", kind, parts)
    return table


def plot_speeds(report: dict[str, Any], path: Path) -> None:
    """Tokens/s against length, both models, the ratio written above each pair."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = [row["seq_len"] for row in report["rows"]]
    for kind, colour, marker in (("nsa", "#0072B2", "o"), ("dense", "#D55E00", "s")):
        axes.plot(lengths, [row[kind]["tokens_per_s"] for row in report["rows"]], marker=marker, color=colour, label=kind)
    for row in report["rows"]:
        top = max(row[kind]["tokens_per_s"] for kind in KINDS)
        axes.annotate(f"{row['ratio']:.2f}x", (row["seq_len"], top), textcoords="offset points", xytext=(0, 7), ha="center")
    axes.set(
        xscale="log",
        xlabel="sequence length (tokens)",
        ylabel="training speed (tokens/s)",
        title=f"NSA and its dense twin on {report['device']}, {report['when'][:10]}",
    )
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.legend()
    figure.savefig(path, dpi=150)


def _free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
