"""`nsa-lab bench train`: tokens/s of NSA and of its dense baseline at each length, in one run, on real batches.

Both are trained by the trainer's own step (compiled, fused AdamW, clipping), so the measurement is representative of a run.
A row is a length and a micro-batch. The result is the ratio within a row; absolute numbers hold only for the device.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nsa_lab.bench.harness import Benchmark, Output, RowColumn, Setup, make_record, make_table
from nsa_lab.bench.step_breakdown import compute_breakdown
from nsa_lab.bench.timing import measure_matmul_flops_per_s
from nsa_lab.config import DataConfig, ModelConfig, NSAConfig, RunConfig, RuntimeConfig, TrainConfig
from nsa_lab.data import Batch, prepare
from nsa_lab.train.build import Builders, TrainContext, build_context
from nsa_lab.train.distributed import World

# (T, micro-batch) -> target ratio of NSA's tokens/s to the dense baseline's (docs/benchmarks/README.md).
TARGETS = {(2048, 32): 0.80, (8192, 8): 1.12, (32768, 2): 2.45, (65536, 1): 3.9}
# At this batch size and below, the host is slower than the GPU, and a step is replayed as a CUDA graph.
SMALL_SHAPE, SMALL_TARGET = (2048, 4), 300_000  # tokens/s
GPU_SHAPES = (*TARGETS, SMALL_SHAPE)
CPU_SHAPES = ((128, 2), (256, 1))
N_TURNS = 4  # timed intervals per model, alternating
CPU_MODEL = ModelConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, nsa=NSAConfig(l=16, d=8, l_sel=16, n_sel=4, w=32)
)
KINDS = ("nsa", "dense")


@dataclass
class StepMeasurement:
    """One model at one shape: seconds, bytes, and FLOP/s. Field names are keys of the record."""

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
    device: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure NSA and its dense baseline at `shapes` (tokens, sequences per forward pass) and return the record.

    On a GPU the default is the production model at the shapes of `TARGETS`, in bf16 and compiled. On a CPU it is a tiny
    model in float32, which tests the code and gives no meaningful speed. Raises ConfigError for an unusable shape.
    """
    setup = Setup.resolve(device)
    base = model or setup.select(gpu=ModelConfig(), cpu=CPU_MODEL)
    peak = measure_matmul_flops_per_s(setup.device, torch.bfloat16) if setup.is_gpu else None
    record = make_record(
        setup, what="training step, NSA and its dense baseline", gemm_flops_per_s=peak, model=base.model_dump()
    )

    def measure_shape(shape: tuple[int, int]) -> list[dict[str, Any]]:
        configs = {kind: make_bench_config(base, kind, *shape, setup.is_gpu, data) for kind in KINDS}
        pair = measure_configs(configs, steps)
        row = {
            "seq_len": shape[0],
            "micro_batch": shape[1],
            "ratio": pair["nsa"].tokens_per_s / pair["dense"].tokens_per_s,
            "bar": None if model else TARGETS.get(shape),
            **{kind: asdict(pair[kind]) for kind in KINDS},
        }
        return [row]

    rows = _make_benchmark(record).run(
        shapes or setup.select(gpu=GPU_SHAPES, cpu=CPU_SHAPES),
        measure_shape,
        Output(json_path, picture, console),
        record,
        label=format_shape,
        extra_tables=lambda rows: [make_table("Share of a step's wall time", BREAKDOWN_COLUMNS, _split_row_lines(rows))],
    )
    return record | {"rows": rows}


def measure_configs(configs: Mapping[str, RunConfig], steps: int) -> dict[str, StepMeasurement]:
    """Return the median step time of each configuration after warm-up, and a profile of two more steps.

    The configurations alternate in intervals of `steps` in total, so that other load affects all of them equally. All of
    them are in memory at the same time.
    """
    runs = {name: _TimedRun.create_warmed_up(config) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(N_TURNS):
        for name, run in runs.items():
            times[name].append(run.time_steps(max(steps // N_TURNS, 1)))
    measurements = {name: run.make_measurement(statistics.median(times[name])) for name, run in runs.items()}
    runs.clear()
    _free_memory()
    return measurements


@dataclass
class _TimedRun:
    """A model, its optimizer and its batches for the timed steps.

    `peak_bytes`: peak memory of the warm-up steps, this run only.
    """

    config: RunConfig
    parts: TrainContext
    loaded_batches: list[Batch]
    batches: Iterator[Batch]
    peak_bytes: int

    @classmethod
    def create_warmed_up(cls, config: RunConfig) -> _TimedRun:
        device, allocated_before = torch.device("cuda" if config.runtime.device == "cuda" else "cpu"), 0
        if device.type == "cuda":
            allocated_before = torch.cuda.memory_allocated()
            # Reset before the build: the memory of a captured graph is allocated only during its capture.
            torch.cuda.reset_peak_memory_stats()
        dataset = prepare(config.data, config.model.vocab_size, config.train.seq_len)
        parts = build_context(config, World(), device, dataset, Builders())
        loaded_batches = _load_batches(parts)
        run = cls(config, parts, loaded_batches, itertools.cycle(loaded_batches), 0)
        run.time_steps(5)
        run.peak_bytes = torch.cuda.max_memory_allocated() - allocated_before if device.type == "cuda" else 0
        return run

    def step(self) -> None:
        batch = next(self.batches)
        self.parts.stepper.step(*batch[:2], lr=1e-4, poll=lambda: None, weights=batch.weights, documents=batch.documents)

    def time_steps(self, steps: int) -> float:
        """Return the mean time of `steps` consecutive steps in seconds."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

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
            compute_breakdown(self.step, self.parts.device),
            _compute_documents_per_row(self.loaded_batches),
        )


def make_bench_config(
    base: ModelConfig, kind: str, seq_len: int, micro: int, is_gpu: bool, data: DataConfig | None, *, graph: bool = True
) -> RunConfig:
    """Return a run without checkpoints and evaluations. `graph`: replay a CUDA graph if a run of this size would."""
    runtime = RuntimeConfig(device="cpu")
    if is_gpu:
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
    """Return whether a run of this shape replays CUDA graphs, because the host is slower than the GPU."""
    return seq_len * micro <= SMALL_SHAPE[0] * SMALL_SHAPE[1]


def _load_batches(parts: TrainContext) -> list[Batch]:
    """Load batches to the device in advance, so that loading is not timed. Document starts stay on the CPU."""
    return [_move_to_device(parts.batches.weighted_batch(step), parts.device) for step in range(4)]


def _compute_documents_per_row(batches: list[Batch]) -> float:
    masked = [(len(batch.documents) - 1) / len(batch.inputs) for batch in batches if batch.documents is not None]
    return statistics.fmean(masked) if masked else 1.0


def _move_to_device(batch: Batch, device: torch.device) -> Batch:
    inputs, targets, weights = (x if x is None else x.to(device) for x in batch[:3])
    assert inputs is not None and targets is not None, "a batch has both"
    return Batch(inputs, targets, weights, batch.documents)


Line = tuple[dict[str, Any], dict[str, Any]]
"""A row of the record and one of its measurements: two table lines per row."""


def _split_row(row: dict[str, Any]) -> list[Line]:
    return [(row, row[kind]) for kind in KINDS]


def _split_row_lines(rows: Iterable[dict[str, Any]]) -> list[Line]:
    return [line for row in rows for line in _split_row(row)]


def format_shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def _format_target(row: dict[str, Any]) -> str:
    if (row["seq_len"], row["micro_batch"]) == SMALL_SHAPE:
        return f"{SMALL_TARGET:,}/s"
    return f"{row['bar']}" if row["bar"] else ""


def _measurement_column(name: str, format_cell: Callable[[dict[str, Any]], str]) -> RowColumn:
    return RowColumn(name, lambda line: format_cell(line[1]))


def _ratio_column(name: str, format_cell: Callable[[dict[str, Any]], str]) -> RowColumn:
    """Return a column that is shown in the NSA line of a row."""
    return RowColumn(name, lambda line: format_cell(line[0]) if line[1]["kind"] == "nsa" else "")


SHAPE_COLUMN = _measurement_column("T x micro", lambda m: format_shape((m["seq_len"], m["micro_batch"])))
KIND_COLUMN = _measurement_column("model", lambda m: m["kind"])
BREAKDOWN_COLUMNS = (
    SHAPE_COLUMN,
    KIND_COLUMN,
    _measurement_column("parts", lambda m: ", ".join(f"{part} {share:.1%}" for part, share in m["breakdown"].items())),
)


def _make_benchmark(record: dict[str, Any]) -> Benchmark[dict[str, Any]]:
    """Return the benchmark for a device whose matmul peak is in the record."""
    peak = record["gemm_flops_per_s"]
    peak_text = f", bf16 matmul peak {peak / 1e12:.0f} TFLOP/s" if peak else ""
    return Benchmark(
        title=f"Training step on {record['device']}{peak_text}",
        columns=(
            SHAPE_COLUMN,
            KIND_COLUMN,
            _measurement_column("tokens/s", lambda m: f"{m['tokens_per_s']:,.0f}"),
            _ratio_column("ratio", lambda row: f"{row['ratio']:.3f}"),
            _ratio_column("target", _format_target),
            _measurement_column("graph", lambda m: "yes" if m["cuda_graph"] else ""),
            _measurement_column("TFLOP/s (6N + dense)", lambda m: f"{m['flops_6n'] / 1e12:.1f}"),
            _measurement_column("TFLOP/s (actual)", lambda m: f"{m['flops_actual'] / 1e12:.1f}"),
            _measurement_column(
                "of peak", lambda m: f"{m['flops_6n'] / peak:.0%} / {m['flops_actual'] / peak:.0%}" if peak else ""
            ),
            _measurement_column("peak GB", lambda m: f"{m['memory_peak_bytes'] / 1e9:.2f}"),
            _measurement_column("backends", lambda m: ", ".join(sorted(set(m["backends"].values())))),
        ),
        plot=lambda rows, path: plot_speeds(record | {"rows": rows}, path),
        has_table_per_case=False,
        split_row=_split_row,
        to_json=lambda row: row,
    )


def plot_speeds(report: dict[str, Any], path: Path) -> None:
    """Plot tokens/s against length, one line per model and batch size in tokens, with the ratio above each pair."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    rows_by_tokens: dict[int, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        rows_by_tokens.setdefault(row["seq_len"] * row["micro_batch"], []).append(row)
    for (n_tokens, rows), style in zip(rows_by_tokens.items(), itertools.cycle(("-", "--", ":", "-.")), strict=False):
        rows = sorted(rows, key=lambda row: row["seq_len"])
        for kind, color, marker in (("nsa", "#0072B2", "o"), ("dense", "#D55E00", "s")):
            axes.plot(
                [row["seq_len"] for row in rows],
                [row[kind]["tokens_per_s"] for row in rows],
                marker=marker,
                markerfacecolor=color if style == "-" else "white",
                color=color,
                linestyle=style,
                label=f"{kind}, batch of {n_tokens:,} tokens",
            )
    for row in report["rows"]:
        top = max(row[kind]["tokens_per_s"] for kind in KINDS)
        axes.annotate(f"{row['ratio']:.2f}x", (row["seq_len"], top), textcoords="offset points", xytext=(0, 7), ha="center")
    axes.set(
        xscale="log",
        xlabel="sequence length (tokens)",
        ylabel="training speed (tokens/s)",
        title=f"NSA and its dense baseline on {report['device']}, {report['when'][:10]}",
    )
    lengths = sorted({row["seq_len"] for row in report["rows"]})
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.legend()
    figure.savefig(path, dpi=150)


def _free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
