"""`nsa-lab bench decode`: time per token against context length for NSA and dense attention, after a parity check.

Two levels. Operator: attention of one query per sequence over a full cache, compared with the fastest dense attention here,
both as CUDA graphs on a GPU (`decode_attention`). Model: a decode step of a model and of its dense baseline, with all
weights and caches. Caches hold random numbers, because the time of a step does not depend on them. With `--preset`, only
a model is timed, after a parity check of its decode steps (`decode_parity`).

Bytes read and cached are planned (`kv_cache_size`), not measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from nsa_lab.attention.key_storage import encode_keys
from nsa_lab.bench.decode_attention import HeadSizes, QueryStep, check_decode_parity, time_contenders
from nsa_lab.bench.decode_parity import check_model_parity
from nsa_lab.bench.harness import (
    PARITY_FAILED,
    Benchmark,
    Output,
    RowColumn,
    Setup,
    format_number,
    make_record,
    make_table,
)
from nsa_lab.bench.step_breakdown import compute_breakdown
from nsa_lab.bench.timing import N_ROUNDS, N_TIMED, N_WARMUP, get_memory_bytes_per_s, time_interleaved_ms
from nsa_lab.config import ConfigError, ModelConfig
from nsa_lab.inference import Decoder, kv_cache_size
from nsa_lab.model import NSATransformer

CPU_LENGTHS = (4096, 16_384, 65_536, 131_072)
GPU_LENGTHS = (8192, 65_536, 131_072)
KINDS = ("nsa", "dense")
N_PROFILED = 2  # profiled steps on a GPU, after the timed ones
N_REPLAYS = 20  # replays in a row on a GPU


@dataclass
class StepTime:
    """One implementation (`by`: nsa or dense) at one context length and batch size. Field names are keys of the record.

    `ms`: time of one token for every sequence; None: parity failed.
    """

    level: str
    by: str
    tokens: int
    batch: int
    ms: float | None
    read_bytes: int
    kernel: str = ""
    """Backend or kernel that computed it, at the operator level."""
    error: float | None = None
    limit: float | None = None
    others: dict[str, float | str] = field(default_factory=dict)
    """Time of slower implementations in ms, or the reason why they have none."""
    of_dense: float | None = None
    """Time as a fraction of dense attention's."""
    of_shortest: float | None = None
    """Time as a fraction of the same implementation's at the shortest length."""
    of_memory: float | None = None
    """Bytes read per second as a fraction of the GPU's memory bandwidth."""
    read_of_dense: float | None = None
    """Bytes read as a fraction of dense attention's."""
    cached_bytes: int | None = None
    """Bytes cached per sequence, at the model level."""
    cached_of_dense: float | None = None
    """Bytes cached as a fraction of dense attention's."""
    graph_ms: float | None = None
    """Time of a step of a given model on a GPU without the host: of replays of its CUDA graph in a row."""
    parts: dict[str, float] = field(default_factory=dict)
    """Share of a step's time per part, for a given model on a GPU."""

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.ms is None else 1e3 * self.batch / self.ms

    @property
    def gb_per_s(self) -> float | None:
        return None if self.ms is None else self.read_bytes / self.ms / 1e6


def run_decode_bench(
    lengths: Sequence[int] | None = None,
    json_path: Path | None = None,
    *,
    batches: Sequence[int] = (1,),
    layers: int | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    heads: HeadSizes | None = None,
    config: ModelConfig | None = None,
    model: ModelConfig | None = None,
    baseline: ModelConfig | None = None,
    picture: Path | None = None,
    console: Console | None = None,
) -> list[StepTime]:
    """Measure every length at each batch size. Print a table and replace the JSON file per batch size; plot at the end.

    Defaults on a GPU: bf16, 64 heads of width 128 in 4 groups, the twelve layers of the production model, and triton. On a
    CPU: float32, the heads of that model, two of its layers, and torch. `backend`: that of `cached_attention`.

    `model`: time decode steps of this model and of `baseline` (default: `model` with dense attention) instead of the
    operator and the production model; `heads` and `config` are not used. `layers`: number of layers of both; default: their
    own. Raises ConfigError if `model` is dense or `baseline` is not.
    """
    setup = Setup.resolve(device)
    lengths = sorted(lengths or setup.select(gpu=GPU_LENGTHS, cpu=CPU_LENGTHS))
    backend = backend or setup.select(gpu="triton", cpu="torch")
    output = Output(json_path, picture, console)
    facts: dict[str, Any] = {
        "machine": setup.describe_machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(setup.dtype),
        "backend": backend,
    }
    if model is not None:
        return _run_model_bench(setup, make_pair(model, baseline, layers), lengths, batches, backend, output, facts)
    heads = heads or setup.select(gpu=HeadSizes(64, 4, 128), cpu=HeadSizes(12, 2, 64))
    config = (config or ModelConfig()).model_copy(update={"n_layers": layers or setup.select(gpu=12, cpu=2)})
    parity = check_decode_parity(heads, config.nsa, setup.dtype, setup.device, backend)
    record = make_record(setup, **facts, heads=asdict(heads), model=config.model_dump(), parity=parity)

    def measure_batch_size(batch: int) -> list[StepTime]:
        steps = (QueryStep(heads, config.nsa, length, batch, setup.dtype, setup.device) for length in lengths)
        rows = _add_shares([row for step in steps for row in _measure_operator(step, backend, parity["passed"])])
        if parity["passed"]:
            rows += time_models(config, lengths, batch=batch, dtype=setup.dtype, device=setup.device, backend=backend)
        return _add_memory_shares(rows, setup)

    benchmark = replace(BENCHMARK, title=f"{BENCHMARK.title}; {_format_parity(parity)}")
    return benchmark.run(list(batches), measure_batch_size, output, record)


def _run_model_bench(
    setup: Setup,
    configs: Mapping[str, ModelConfig],
    lengths: Sequence[int],
    batches: Sequence[int],
    backend: str,
    output: Output,
    facts: Mapping[str, Any],
) -> list[StepTime]:
    models = build_models(configs, setup.dtype, setup.device)
    parity = {kind: check_model_parity(model, backend) for kind, model in models.items()}
    record = make_record(
        setup,
        **facts,
        model=configs["nsa"].model_dump(mode="json"),
        baseline=configs["dense"].model_dump(mode="json"),
        parity=parity,
    )
    failed = [kind for kind, found in parity.items() if not found["passed"]]

    def measure_batch_size(batch: int) -> list[StepTime]:
        rows = time_model_pair(models, lengths, batch, backend, failed, has_parts=setup.is_gpu)
        return _add_memory_shares(rows, setup)

    checked = "; ".join(f"{kind}: {_format_parity(found)}" for kind, found in parity.items())
    benchmark = replace(BENCHMARK, title=f"{BENCHMARK.title}; {checked}")
    return benchmark.run(
        list(batches),
        measure_batch_size,
        output,
        record,
        extra_tables=lambda rows: [make_table("Share of a step's wall time", PART_COLUMNS, rows)] if setup.is_gpu else [],
    )


def make_pair(model: ModelConfig, baseline: ModelConfig | None = None, layers: int | None = None) -> dict[str, ModelConfig]:
    """Return the configurations of a model and its dense baseline by kind. See `run_decode_bench`."""
    if model.attention == "dense":
        raise ConfigError(
            "bench decode: expected a model with sparse attention, got model.attention = dense; give the sparse model "
            "first and a dense one second"
        )
    if baseline is not None and baseline.attention != "dense":
        raise ConfigError(
            f"bench decode: expected a baseline with model.attention = dense, got {baseline.attention}; omit it to compare "
            "with the same model with dense attention"
        )
    pair = {"nsa": model, "dense": baseline or model.model_copy(update={"attention": "dense"})}
    n_layers = {"n_layers": layers} if layers else {}
    return {kind: config.model_copy(update=n_layers) for kind, config in pair.items()}


def build_models(
    configs: Mapping[str, ModelConfig], dtype: torch.dtype, device: torch.device | str
) -> dict[str, NSATransformer]:
    """Return a model with random weights per configuration, by kind."""
    return {
        kind: NSATransformer(config, device=device, dtype=dtype, seed=0).to(dtype).eval()
        for kind, config in configs.items()
    }


def time_models(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "torch",
) -> list[StepTime]:
    """Time a decode step of a model of `config` and of its dense baseline at each context length, with random weights.

    `backend`: that of attention over the cache, for both.
    """
    return time_model_pair(build_models(make_pair(config), dtype, device), lengths, batch, backend)


def time_model_pair(
    models: Mapping[str, NSATransformer],
    lengths: Sequence[int],
    batch: int,
    backend: str,
    failed: Collection[str] = (),
    *,
    has_parts: bool = False,
) -> list[StepTime]:
    """Time a decode step of each model (by kind) at each context length; those that `failed` parity have no time.

    `has_parts`: also profile steps and time replays of their CUDA graphs, on a GPU.
    """
    parameter = next(models["nsa"].parameters())
    device, itemsize = parameter.device, parameter.dtype.itemsize
    depths = dict.fromkeys(model.config.n_layers for model in models.values())
    level = f"model, {' and '.join(map(str, depths))} layers"
    rows: list[StepTime] = []
    for length in lengths:
        decoders = {
            kind: _make_full_decoder(model, length, batch, backend) for kind, model in models.items() if kind not in failed
        }
        token = torch.zeros(batch, 1, dtype=torch.int64)  # on the CPU, as from a sampler on the CPU
        runs = {kind: (lambda decoder=decoder: decoder.last(token)) for kind, decoder in decoders.items()}  # noqa: B023
        times = time_interleaved_ms(runs, device)
        for kind, model in models.items():
            row = StepTime(
                level,
                kind,
                length,
                batch,
                times.get(kind),
                batch * kv_cache_size.compute_read_bytes(model.config, length, itemsize),
                cached_bytes=kv_cache_size.compute_sequence_bytes(model.config, length, itemsize),
            )
            if has_parts and kind in runs:
                row.graph_ms = _time_replays_ms(decoders[kind], device)
                row.parts = compute_breakdown(runs[kind], device, N_PROFILED)
            rows.append(row)
    return _add_shares(rows)


def _time_replays_ms(decoder: Decoder, device: torch.device) -> float | None:
    """Return the time of a replay of the captured step, as the mean of replays in a row; None if no step was captured."""
    decoder.crop(N_REPLAYS)  # room in the cache
    if not decoder.repeat_step(N_WARMUP):
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    decoder.repeat_step(N_REPLAYS)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / N_REPLAYS


def _measure_operator(step: QueryStep, backend: str, has_passed: bool) -> list[StepTime]:
    """Return the time of NSA and of the fastest dense attention."""
    contenders, heads = time_contenders(step, backend, has_passed), step.heads
    config = ModelConfig(n_layers=1, n_heads=heads.H, n_kv_groups=heads.G, d_k=heads.D, d_v=heads.D, nsa=step.nsa)
    rows: list[StepTime] = []
    for kind in KINDS:
        fastest, *slower = sorted((c for c in contenders if c.kind == kind), key=lambda c: c.ms or float("inf"))
        of_kind = config.model_copy(update={"attention": kind})
        rows.append(
            StepTime(
                f"operator, {heads}",
                kind,
                step.length,
                step.batch,
                fastest.ms,
                step.batch * kv_cache_size.compute_read_bytes(of_kind, step.length, step.dtype.itemsize),
                kernel=fastest.name,
                error=fastest.error,
                limit=fastest.limit,
                others={contender.name: contender.ms or contender.note for contender in slower},
            )
        )
    return rows


def _make_full_decoder(model: NSATransformer, length: int, batch: int, backend: str) -> Decoder:
    """Return a decoder with full random caches that has read `length` tokens, minus the number of steps to be timed."""
    decoder = Decoder(model, length + N_PROFILED, batch, backend=backend)
    for cached in decoder.cache.tensors():
        _fill_random(cached, model.config)
    decoder.cache.advance([length - N_ROUNDS * (N_WARMUP + N_TIMED)] * batch)
    return decoder


def _fill_random(cached: Tensor, config: ModelConfig) -> None:
    """Write random numbers to a tensor of a cache. Token ids stay 0. Index keys of few bits are equal in all sequences."""
    if cached.dtype.itemsize == 1:  # such keys are encoded: random bytes may be NaN
        keys = torch.randn(1, *cached.shape[1:-1], config.index_width, device=cached.device)
        cached.view(torch.uint8).copy_(encode_keys(keys, config.indexer_dtype).view(torch.uint8))
    elif cached.is_floating_point():
        cached.normal_()


def _add_shares(rows: list[StepTime]) -> list[StepTime]:
    """Add the fractions of dense attention and of the shortest length to rows of one level and batch size."""
    dense = {row.tokens: row for row in rows if row.by == "dense"}
    shortest = {row.by: row.ms for row in rows if row.tokens == min(dense)}
    for row in rows:
        baseline = dense[row.tokens]
        row.read_of_dense = row.read_bytes / baseline.read_bytes
        if row.cached_bytes and baseline.cached_bytes:
            row.cached_of_dense = row.cached_bytes / baseline.cached_bytes
        if row.ms and baseline.ms:
            row.of_dense = row.ms / baseline.ms
        if row.ms and (shortest_ms := shortest[row.by]):
            row.of_shortest = row.ms / shortest_ms
    return rows


def _add_memory_shares(rows: list[StepTime], setup: Setup) -> list[StepTime]:
    """Add `of_memory` to rows that were timed on a GPU."""
    bandwidth = get_memory_bytes_per_s(setup.device)
    for row in rows:
        if bandwidth and row.ms:
            row.of_memory = row.read_bytes / row.ms * 1e3 / bandwidth
    return rows


def _format_parity(parity: Mapping[str, Any]) -> str:
    return f"parity error {parity['error']:.1e} of {parity['limit']:.1e} allowed"


def plot_speeds(rows: list[StepTime], path: Path) -> None:
    """Plot tokens per second against context length, one panel per level and batch size, to a file."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.level, row.batch) for row in rows))
    n_columns = 1 if len(panels) == 1 else 2
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(4.5 * n_columns, 3.2 * n_rows), layout="constrained")
    for ax, (level, batch) in zip(figure.subplots(n_rows, n_columns, squeeze=False).flat, panels, strict=False):
        panel_rows = [row for row in rows if (row.level, row.batch) == (level, batch)]
        for kind, name, color, marker in (("nsa", "NSA", "#0072B2", "o"), ("dense", "dense", "#D55E00", "s")):
            points = [(row.tokens, row.tokens_per_s) for row in panel_rows if row.by == kind and row.tokens_per_s]
            ax.plot(*zip(*points, strict=True), marker=marker, label=name, color=color) if points else None
        lengths = sorted({row.tokens for row in panel_rows})
        ax.set(xscale="log", xlabel="context length (tokens)", ylabel="tokens per second")
        ax.set_title(f"{level}; {batch} sequence{'s' * (batch > 1)}", fontsize=10)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        ax.set_xticks([], minor=True)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:,.9g}")
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _to_json(row: StepTime) -> Mapping[str, object]:
    return asdict(row) | {"tokens_per_s": row.tokens_per_s, "gb_per_s": row.gb_per_s}


LEVEL_COLUMN = RowColumn("level", align="left")


def _format_times(row: StepTime) -> str:
    """Format the time of a step, and the time of its CUDA graph without the host if it was measured."""
    return format_number(row.ms) + (f" ({format_number(row.graph_ms)})" if row.graph_ms is not None else "")


KIND_COLUMN = RowColumn("by", lambda row: f"{row.by}, {row.kernel}" if row.kernel else row.by, "left")
TOKENS_COLUMN, BATCH_COLUMN = RowColumn("tokens", lambda row: f"{row.tokens:,}"), RowColumn("batch")
PART_COLUMNS = (
    KIND_COLUMN,
    TOKENS_COLUMN,
    BATCH_COLUMN,
    RowColumn("parts", lambda row: ", ".join(f"{part} {share:.1%}" for part, share in row.parts.items()), "left"),
)
BENCHMARK = Benchmark[StepTime](
    title="Decode step: ms, tokens/s",
    columns=(
        LEVEL_COLUMN,
        KIND_COLUMN,
        TOKENS_COLUMN,
        BATCH_COLUMN,
        RowColumn("ms (graph)", lambda row: _format_times(row) or PARITY_FAILED),
        RowColumn("tokens/s", "tokens_per_s"),
        RowColumn("of dense", "of_dense"),
        RowColumn("of the shortest", "of_shortest"),
        RowColumn("MB read", lambda row: format_number(row.read_bytes / 1e6)),
        RowColumn("read/dense", "read_of_dense"),
        RowColumn("GB/s", "gb_per_s"),
        RowColumn("of memory", lambda row: "" if row.of_memory is None else f"{row.of_memory:.0%}"),
        RowColumn("MB/seq.", lambda row: format_number(row.cached_bytes and row.cached_bytes / 1e6)),
        RowColumn("cached/dense", "cached_of_dense"),
    ),
    is_bold=lambda row, rows: row.by == "nsa",
    plot=plot_speeds,
    to_json=_to_json,
)
