"""`nsa-lab bench decode`: parity first, then the time of one more token against context, of NSA and of dense attention.

Two levels. *Operator*: attention of one query per sequence over a full cache, against the fastest dense one here, on a GPU
both as CUDA graphs (decode_operator.py). *Model*: a
step of a model and of its dense twin, weights, caches and all. Caches hold random numbers: what a step costs does not
depend on them. Bytes read are those of the formula N(S) + n_sel * l_sel + w, never what a kernel happened to load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nsa_lab.bench import records
from nsa_lab.bench.attention_speed import describe_machine, format_number
from nsa_lab.bench.decode_attention import PARITY_FAILED, HeadSizes, QueryStep, check_decode_parity, time_contenders
from nsa_lab.bench.timing import N_ROUNDS, N_TIMED, N_WARMUP, get_memory_bytes_per_s, time_interleaved_ms
from nsa_lab.config import ModelConfig
from nsa_lab.inference import Decoder, kv_cache_size
from nsa_lab.model import NSATransformer

CPU_LENGTHS = (4096, 16_384, 65_536, 131_072)
GPU_LENGTHS = (8192, 65_536, 131_072)
TABLE_WIDTH = 120


@dataclass
class StepTime:
    """One contender at one length and batch; `ms` is of one token of every sequence, None where parity failed."""

    level: str
    by: str
    tokens: int
    batch: int
    ms: float | None
    read_bytes: int
    kernel: str = ""
    """What computed it, of the operator's level: a backend, or the fastest dense attention."""
    error: float | None = None
    limit: float | None = None
    others: dict[str, float | str] = field(default_factory=dict)
    """Slower ones' ms, or why they have none."""
    of_dense: float | None = None
    """Time as a share of dense attention's."""
    of_shortest: float | None = None
    """Time as a share of the same contender's at the shortest length."""

    of_memory: float | None = None
    """Bytes read per second as a share of what the GPU's memory can give."""

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
    """Measure every length and batch; print a table, and write JSON and a picture where asked.

    Defaults: a GPU, bf16, 64 heads of 128 channels in 4 groups and the twelve layers of the production model; or a CPU,
    float32, that model's own heads and two of its layers. `backend` is `cached_attention`'s: triton on a GPU, else torch.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lengths = sorted(lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS))
    heads = heads or (HeadSizes(64, 4, 128) if on_gpu else HeadSizes(12, 2, 64))
    config = (config or ModelConfig()).model_copy(update={"n_layers": layers or (12 if on_gpu else 2)})
    backend = backend or ("triton" if on_gpu else "torch")
    found = check_decode_parity(heads, config.nsa, dtype, device, backend)
    rows: list[StepTime] = []
    for batch in batches:
        steps = (QueryStep(heads, config.nsa, length, batch, dtype, device) for length in lengths)
        rows += _add_shares([row for step in steps for row in _measure_operator(step, backend, found["passed"])])
        if found["passed"]:
            rows += time_models(config, lengths, batch=batch, dtype=dtype, device=device, backend=backend)
    _add_bandwidth_share(rows, get_memory_bytes_per_s(device))
    report = {
        **records.origin(records.device_name() if on_gpu else str(device), records.DECODING),
        "machine": describe_machine(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "heads": asdict(heads),
        "model": config.model_dump(),
        "backend": backend,
        "parity": found,
        "rows": [asdict(row) | {"tokens_per_s": row.tokens_per_s, "gb_per_s": row.gb_per_s} for row in rows],
    }
    (console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)).print(
        _make_table(rows, found), records.code_text(report)
    )
    if json_path:
        records.write(json_path, report)
    if picture:
        plot_speeds(rows, picture)
    return rows


def _measure_operator(step: QueryStep, backend: str, passed: bool) -> list[StepTime]:
    """NSA, and the fastest dense attention of all that there are."""
    found, heads = time_contenders(step, backend, passed), step.heads
    config = ModelConfig(n_layers=1, n_heads=heads.H, n_kv_groups=heads.G, d_k=heads.D, d_v=heads.D, nsa=step.nsa)
    rows: list[StepTime] = []
    for kind in ("nsa", "dense"):
        mine = sorted((one for one in found if one.kind == kind), key=lambda one: one.ms or float("inf"))
        read = step.batch * kv_cache_size.compute_read_bytes(
            config.model_copy(update={"attention": kind}), step.length, step.dtype.itemsize
        )
        first, others = mine[0], {one.name: one.ms or one.note for one in mine[1:]}
        checked = {"kernel": first.name, "error": first.error, "limit": first.limit, "others": others}
        rows.append(StepTime(f"operator, {heads}", kind, step.length, step.batch, first.ms, read, **checked))
    return rows


def time_models(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "torch",
) -> list[StepTime]:
    """A step of a model of `config` and of its dense twin, of random weights, at each number of tokens before it.

    `backend` is that of attention over the cache, of both.
    """
    device = torch.device(device)
    models = {
        kind: NSATransformer(config.model_copy(update={"attention": kind}), device=device, dtype=dtype, seed=0)
        .to(dtype)
        .eval()
        for kind in ("nsa", "dense")
    }
    rows: list[StepTime] = []
    for length in lengths:
        decoders = {kind: _make_full_decoder(model, length, batch, backend) for kind, model in models.items()}
        token = torch.zeros(batch, 1, dtype=torch.int64)  # as whoever draws on the CPU hands it over
        runs = {kind: (lambda decoder=decoder: decoder.last(token)) for kind, decoder in decoders.items()}  # noqa: B023
        rows += _measure_models(f"model, {config.n_layers} layers", runs, config, length, batch, dtype, device)
    return _add_shares(rows)


def _make_full_decoder(model: NSATransformer, length: int, batch: int, backend: str) -> Decoder:
    """A decoder that has read `length` tokens of every sequence but for those that are timed."""
    decoder = Decoder(model, length + 1, batch, backend=backend)
    for kept in decoder.cache.tensors():
        if kept.is_floating_point():
            kept.normal_()
    decoder.cache.advance([length - N_ROUNDS * (N_WARMUP + N_TIMED)] * batch)
    return decoder


def _measure_models(
    level: str,
    runs: Mapping[str, Callable[[], object]],
    config: ModelConfig,
    length: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[StepTime]:
    took = time_interleaved_ms(runs, device)
    rows: list[StepTime] = []
    for kind in ("nsa", "dense"):
        of_kind = config.model_copy(update={"attention": kind})
        read = batch * kv_cache_size.compute_read_bytes(of_kind, length, dtype.itemsize)
        rows.append(StepTime(level, kind, length, batch, took.get(kind), read))
    return rows


def _add_shares(rows: list[StepTime]) -> list[StepTime]:
    """Rows of one level and batch, compared."""
    dense = {row.tokens: row.ms for row in rows if row.by == "dense"}
    first = {row.by: row.ms for row in rows if row.tokens == min(dense)}
    for row in rows:
        if row.ms and (whole := dense[row.tokens]):
            row.of_dense = row.ms / whole
        if row.ms and (least := first[row.by]):
            row.of_shortest = row.ms / least
    return rows


def _add_bandwidth_share(rows: list[StepTime], bytes_per_s: float | None) -> None:
    for row in rows:
        if bytes_per_s and row.ms:
            row.of_memory = row.read_bytes / row.ms * 1e3 / bytes_per_s


def plot_speeds(rows: list[StepTime], path: Path) -> None:
    """Tokens per second against context, a panel per level and batch, as a picture file."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.level, row.batch) for row in rows))
    across = 1 if len(panels) == 1 else 2
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.5 * across, 3.2 * down), layout="constrained")
    for ax, (level, batch) in zip(figure.subplots(down, across, squeeze=False).flat, panels, strict=False):
        mine = [row for row in rows if (row.level, row.batch) == (level, batch)]
        for kind, name, colour, marker in (("nsa", "NSA", "#0072B2", "o"), ("dense", "dense", "#D55E00", "s")):
            known = [(row.tokens, row.tokens_per_s) for row in mine if row.by == kind and row.tokens_per_s]
            ax.plot(*zip(*known, strict=True), marker=marker, label=name, color=colour) if known else None
        lengths = sorted({row.tokens for row in mine})
        ax.set(xscale="log", xlabel="tokens before the new one", ylabel="tokens per second")
        ax.set_title(f"{level}; {batch} sequence{'s' * (batch > 1)}", fontsize=10)
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        ax.set_xticks([], minor=True)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:,.9g}")
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _make_table(rows: list[StepTime], found: Mapping[str, Any]) -> Table:
    checked = f"error {found['error']:.1e} of {found['limit']:.1e} allowed"
    table = Table(title=f"One more token: ms, tokens/s; parity of attention over a cache: {checked}")
    columns = ("tokens", "batch", "ms", "tokens/s", "MB read", "GB/s", "of memory", "of dense", "of the shortest")
    for name in ("level", "by", *columns):
        table.add_column(name, justify="left" if name in ("level", "by") else "right")
    for row in rows:
        table.add_row(
            row.level,
            f"{row.by}, {row.kernel}" if row.kernel else row.by,
            f"{row.tokens:,}",
            str(row.batch),
            format_number(row.ms) or PARITY_FAILED,
            format_number(row.tokens_per_s),
            format_number(row.read_bytes / 1e6),
            format_number(row.gb_per_s),
            "" if row.of_memory is None else f"{row.of_memory:.0%}",
            format_number(row.of_dense),
            format_number(row.of_shortest),
            style="bold" if row.by == "nsa" else None,
        )
    return table
