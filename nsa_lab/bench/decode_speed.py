"""`nsa-lab bench decode`: time per token against context length for NSA and dense attention, after a parity check.

Two levels. Operator: attention of one query per sequence over a full cache, compared with the fastest dense attention here,
both as CUDA graphs on a GPU (`decode_attention`). Model: a decode step of a model and of its dense baseline, with all
weights and caches. Caches hold random numbers, because the time of a step does not depend on them. Bytes read are those of
the formula N(S) + n_sel * l_sel + w, not those that a kernel actually loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from nsa_lab.bench.decode_attention import HeadSizes, QueryStep, check_decode_parity, time_contenders
from nsa_lab.bench.harness import PARITY_FAILED, Benchmark, Output, RowColumn, Setup, format_number, make_record
from nsa_lab.bench.timing import N_ROUNDS, N_TIMED, N_WARMUP, get_memory_bytes_per_s, time_interleaved_ms
from nsa_lab.config import ModelConfig
from nsa_lab.inference import Decoder, kv_cache_size
from nsa_lab.model import NSATransformer

CPU_LENGTHS = (4096, 16_384, 65_536, 131_072)
GPU_LENGTHS = (8192, 65_536, 131_072)


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
    picture: Path | None = None,
    console: Console | None = None,
) -> list[StepTime]:
    """Measure every length at each batch size. Print a table and replace the JSON file per batch size; plot at the end.

    Defaults on a GPU: bf16, 64 heads of width 128 in 4 groups, the twelve layers of the production model, and triton. On a
    CPU: float32, the heads of that model, two of its layers, and torch. `backend`: that of `cached_attention`.
    """
    setup = Setup.resolve(device)
    lengths = sorted(lengths or setup.select(gpu=GPU_LENGTHS, cpu=CPU_LENGTHS))
    heads = heads or setup.select(gpu=HeadSizes(64, 4, 128), cpu=HeadSizes(12, 2, 64))
    config = (config or ModelConfig()).model_copy(update={"n_layers": layers or setup.select(gpu=12, cpu=2)})
    backend = backend or setup.select(gpu="triton", cpu="torch")
    parity = check_decode_parity(heads, config.nsa, setup.dtype, setup.device, backend)
    bandwidth = get_memory_bytes_per_s(setup.device)
    record = make_record(
        setup,
        machine=setup.describe_machine(),
        threads=torch.get_num_threads(),
        dtype=str(setup.dtype),
        heads=asdict(heads),
        model=config.model_dump(),
        backend=backend,
        parity=parity,
    )

    def measure_batch_size(batch: int) -> list[StepTime]:
        steps = (QueryStep(heads, config.nsa, length, batch, setup.dtype, setup.device) for length in lengths)
        rows = _add_shares([row for step in steps for row in _measure_operator(step, backend, parity["passed"])])
        if parity["passed"]:
            rows += time_models(config, lengths, batch=batch, dtype=setup.dtype, device=setup.device, backend=backend)
        for row in rows:
            if bandwidth and row.ms:
                row.of_memory = row.read_bytes / row.ms * 1e3 / bandwidth
        return rows

    checked = f"parity error {parity['error']:.1e} of {parity['limit']:.1e} allowed"
    benchmark = replace(BENCHMARK, title=f"{BENCHMARK.title}; {checked}")
    return benchmark.run(list(batches), measure_batch_size, Output(json_path, picture, console), record)


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
    device = torch.device(device)
    configs = {kind: config.model_copy(update={"attention": kind}) for kind in ("nsa", "dense")}
    models = {
        kind: NSATransformer(of_kind, device=device, dtype=dtype, seed=0).to(dtype).eval()
        for kind, of_kind in configs.items()
    }
    level = f"model, {config.n_layers} layers"
    rows: list[StepTime] = []
    for length in lengths:
        decoders = {kind: _make_full_decoder(model, length, batch, backend) for kind, model in models.items()}
        token = torch.zeros(batch, 1, dtype=torch.int64)  # on the CPU, as from a sampler on the CPU
        runs = {kind: (lambda decoder=decoder: decoder.last(token)) for kind, decoder in decoders.items()}  # noqa: B023
        times = time_interleaved_ms(runs, device)
        for kind, of_kind in configs.items():
            read_bytes = batch * kv_cache_size.compute_read_bytes(of_kind, length, dtype.itemsize)
            rows.append(StepTime(level, kind, length, batch, times[kind], read_bytes))
    return _add_shares(rows)


def _measure_operator(step: QueryStep, backend: str, has_passed: bool) -> list[StepTime]:
    """Return the time of NSA and of the fastest dense attention."""
    contenders, heads = time_contenders(step, backend, has_passed), step.heads
    config = ModelConfig(n_layers=1, n_heads=heads.H, n_kv_groups=heads.G, d_k=heads.D, d_v=heads.D, nsa=step.nsa)
    rows: list[StepTime] = []
    for kind in ("nsa", "dense"):
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
    decoder = Decoder(model, length + 1, batch, backend=backend)
    for cached in decoder.cache.tensors():
        if cached.is_floating_point():
            cached.normal_()
    decoder.cache.advance([length - N_ROUNDS * (N_WARMUP + N_TIMED)] * batch)
    return decoder


def _add_shares(rows: list[StepTime]) -> list[StepTime]:
    """Add the fractions `of_dense` and `of_shortest` to rows of one level and batch size."""
    dense = {row.tokens: row.ms for row in rows if row.by == "dense"}
    shortest = {row.by: row.ms for row in rows if row.tokens == min(dense)}
    for row in rows:
        if row.ms and (dense_ms := dense[row.tokens]):
            row.of_dense = row.ms / dense_ms
        if row.ms and (shortest_ms := shortest[row.by]):
            row.of_shortest = row.ms / shortest_ms
    return rows


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


BENCHMARK = Benchmark[StepTime](
    title="Decode step: ms, tokens/s",
    columns=(
        RowColumn("level", align="left"),
        RowColumn("by", lambda row: f"{row.by}, {row.kernel}" if row.kernel else row.by, "left"),
        RowColumn("tokens", lambda row: f"{row.tokens:,}"),
        RowColumn("batch"),
        RowColumn("ms", lambda row: format_number(row.ms) or PARITY_FAILED),
        RowColumn("tokens/s", "tokens_per_s"),
        RowColumn("MB read", lambda row: format_number(row.read_bytes / 1e6)),
        RowColumn("GB/s", "gb_per_s"),
        RowColumn("of memory", lambda row: "" if row.of_memory is None else f"{row.of_memory:.0%}"),
        RowColumn("of dense", "of_dense"),
        RowColumn("of the shortest", "of_shortest"),
    ),
    is_bold=lambda row, rows: row.by == "nsa",
    plot=plot_speeds,
    to_json=_to_json,
)
