"""`nsa-lab bench decode`: parity first, then the time of one more token against context, of NSA and of dense attention.

Two levels. *Operator*: attention of one query per sequence over a full cache, against the best dense one here. *Model*: a
step of a model and of its dense twin, weights, caches and all. Caches hold random numbers: what a step costs does not
depend on them. Bytes read are those of the formula N(S) + n_sel * l_sel + w, never what a kernel happened to load.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nsa_lab.attention import Span, compress, geometry, reference
from nsa_lab.attention.decoding import LayerCache, cached_attention, cached_dense_attention
from nsa_lab.bench import records
from nsa_lab.bench.attention import machine, number
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.inference import Decoder, memory
from nsa_lab.model import NSATransformer

CPU_LENGTHS = (4096, 16_384, 65_536, 131_072)
GPU_LENGTHS = (8192, 65_536, 131_072)
PARITY_LENGTHS = (1999, 700, 3)  # tokens before the new one, of three sequences in one batch
PARITY_LIMIT = 2.0  # of the error that the same mathematics makes in plain torch at the same dtype
# Steps of a turn: one model alone, as when it writes, once what the other one left in the caches is gone.
ROUNDS, UNTIMED, TIMED = 4, 3, 6
TABLE_WIDTH = 120


@dataclass(frozen=True)
class HeadSizes:
    """Of the operator's level: H query heads, G groups, head width D."""

    H: int
    G: int
    D: int

    def __str__(self) -> str:
        return f"H{self.H} G{self.G} d{self.D}"


@dataclass
class StepTime:
    """One contender at one length and batch; `ms` is of one token of every sequence, None where parity failed."""

    level: str
    by: str
    tokens: int
    batch: int
    ms: float | None
    read_bytes: int
    of_dense: float | None = None
    """Time as a share of dense attention's."""
    of_shortest: float | None = None
    """Time as a share of the same contender's at the shortest length."""

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
    backend: str = "torch",
    device: torch.device | str | None = None,
    heads: HeadSizes | None = None,
    config: ModelConfig | None = None,
    picture: Path | None = None,
    console: Console | None = None,
) -> list[StepTime]:
    """Measure every length and batch; print a table, and write JSON and a picture where asked.

    Defaults: a GPU, bf16, 64 heads of 128 channels in 4 groups and the twelve layers of the production model; or a CPU,
    float32, that model's own heads and two of its layers. `backend` is `cached_attention`'s.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lengths = sorted(lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS))
    heads = heads or (HeadSizes(64, 4, 128) if on_gpu else HeadSizes(12, 2, 64))
    config = (config or ModelConfig()).model_copy(update={"n_layers": layers or (12 if on_gpu else 2)})
    found = parity(heads, config.nsa, dtype, device, backend)
    rows: list[StepTime] = []
    for batch in batches:
        level = _operator_level(heads, config.nsa, lengths, batch, dtype, device, backend, found["passed"])
        rows += _with_shares(level) + time_models(config, lengths, batch=batch, dtype=dtype, device=device)
    report = {
        **records.origin(records.device_name() if on_gpu else str(device)),
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "heads": asdict(heads),
        "model": config.model_dump(),
        "backend": backend,
        "parity": found,
        "rows": [asdict(row) | {"tokens_per_s": row.tokens_per_s, "gb_per_s": row.gb_per_s} for row in rows],
    }
    (console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)).print(
        _table(rows, found), records.code_text(report)
    )
    if json_path:
        records.write(json_path, report)
    if picture:
        draw(rows, picture)
    return rows


def parity(heads: HeadSizes, nsa: NSAConfig, dtype: torch.dtype, device: torch.device, backend: str) -> dict[str, Any]:
    """The largest error of `cached_attention` against the definition in float64, and what is allowed."""
    make = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).to(device, dtype)

    batch, longest = len(PARITY_LENGTHS), max(PARITY_LENGTHS) + 1
    q, gates = normal(batch, 1, heads.H, heads.D), normal(batch, 1, heads.H, 3).sigmoid()
    raw = [normal(batch, longest, heads.G, heads.D) for _ in range(4)]
    compressed = [compress(normal(batch, longest, heads.G, heads.D), nsa) for _ in range(2)]
    rings = [_ring(x, nsa.w) for x in raw[2:]]
    lengths = torch.tensor(PARITY_LENGTHS, dtype=torch.int32, device=device)
    found = cached_attention(q, gates, LayerCache(*compressed, *raw[:2], *rings), lengths, nsa, backend=backend)
    ours = plain = 0.0
    for b, length in enumerate(PARITY_LENGTHS):
        blocks = geometry.num_compressed(length + 1, nsa)
        cut = [*(x[b : b + 1, :blocks] for x in compressed), *(x[b : b + 1, : length + 1] for x in raw)]
        inputs, span = [q[b : b + 1], *cut, gates[b : b + 1]], Span.chunk(length, 1)
        true = _by_definition([x.double() for x in inputs], nsa, span)
        ours = max(ours, (found[b : b + 1] - true).abs().max().item())
        plain = max(plain, (_by_definition(inputs, nsa, span) - true).abs().max().item())
    # The definition computes float32 in float64, and then makes no error to speak of.
    limit = PARITY_LIMIT * plain + 8 * torch.finfo(torch.float32).eps
    return {"error": ours, "limit": limit, "passed": ours <= limit}


def _by_definition(inputs: Sequence[Tensor], nsa: NSAConfig, span: Span) -> Tensor:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    return reference.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, span=span)


def _ring(x: Tensor, w: int) -> Tensor:
    """The ring of w slots that sequences of `PARITY_LENGTHS` leave of x [B, T, G, D]."""
    ring = torch.empty_like(x[:, :w])
    for b, length in enumerate(PARITY_LENGTHS):
        for position in range(length + 1):
            ring[b, position % w] = x[b, position]
    return ring


def _operator_level(
    heads: HeadSizes,
    nsa: NSAConfig,
    lengths: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    passed: bool,
) -> list[StepTime]:
    config = ModelConfig(n_layers=1, n_heads=heads.H, n_kv_groups=heads.G, d_k=heads.D, d_v=heads.D, nsa=nsa)
    rows: list[StepTime] = []
    for length in lengths:

        def room(tokens: int) -> Tensor:
            return torch.randn(batch, tokens, heads.G, heads.D, device=device, dtype=dtype)

        k, v, blocks = room(length), room(length), geometry.num_compressed(length, nsa)
        cache = LayerCache(room(blocks), room(blocks), k, v, room(nsa.w), room(nsa.w))
        q = torch.randn(batch, 1, heads.H, heads.D, device=device, dtype=dtype)
        gates = torch.rand(batch, 1, heads.H, 3, device=device, dtype=dtype)
        before = torch.full((batch,), length - 1, dtype=torch.int32, device=device)
        runs: dict[str, Callable[[], object]] = {"dense": lambda: cached_dense_attention(q, k, v, before)}  # noqa: B023
        if passed:
            runs["nsa"] = lambda: cached_attention(q, gates, cache, before, nsa, backend=backend)  # noqa: B023
        rows += _rows(f"operator, {heads}", runs, config, length, batch, dtype, device)
    return rows


def time_models(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[StepTime]:
    """A step of a model of `config` and of its dense twin, of random weights, at each number of tokens before it."""
    device = torch.device(device)
    models = {
        kind: NSATransformer(config.model_copy(update={"attention": kind}), device=device, dtype=dtype, seed=0)
        .to(dtype)
        .eval()
        for kind in ("nsa", "dense")
    }
    rows: list[StepTime] = []
    for length in lengths:
        decoders = {kind: _full(model, length, batch) for kind, model in models.items()}
        token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        runs = {kind: (lambda decoder=decoder: decoder.last(token)) for kind, decoder in decoders.items()}  # noqa: B023
        rows += _rows(f"model, {config.n_layers} layers", runs, config, length, batch, dtype, device)
    return _with_shares(rows)


def _full(model: NSATransformer, length: int, batch: int) -> Decoder:
    """A decoder that has read `length` tokens of every sequence but for those that are timed."""
    decoder = Decoder(model, length + 1, batch)
    for layer in decoder.cache.layers:
        for kept in layer.tensors():
            kept.normal_()
    decoder.cache.advance([length - ROUNDS * (UNTIMED + TIMED)] * batch)
    return decoder


def _rows(
    level: str,
    runs: Mapping[str, Callable[[], object]],
    config: ModelConfig,
    length: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[StepTime]:
    took = _times(runs, device)
    rows: list[StepTime] = []
    for kind in ("nsa", "dense"):
        of_kind = config.model_copy(update={"attention": kind})
        read = batch * memory.read_bytes(of_kind, length, dtype.itemsize)
        rows.append(StepTime(level, kind, length, batch, took.get(kind), read))
    return rows


def _times(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median milliseconds of each. They take turns, so that what else the machine does meets all alike."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            steps = [_time(run, device) for _ in range(UNTIMED + TIMED)]
            took[name] += steps[UNTIMED:]
    return {name: statistics.median(times) for name, times in took.items()}


def _time(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return (time.perf_counter() - begin) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_shares(rows: list[StepTime]) -> list[StepTime]:
    """Rows of one level and batch, compared."""
    dense = {row.tokens: row.ms for row in rows if row.by == "dense"}
    first = {row.by: row.ms for row in rows if row.tokens == min(dense)}
    for row in rows:
        if row.ms and (whole := dense[row.tokens]):
            row.of_dense = row.ms / whole
        if row.ms and (least := first[row.by]):
            row.of_shortest = row.ms / least
    return rows


def draw(rows: list[StepTime], path: Path) -> None:
    """Tokens per second against context, a panel per level and batch, as a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row.level, row.batch) for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 4.5 * len(panels), 4.5), squeeze=False)
    for ax, (level, batch) in zip(axes[0], panels, strict=True):
        for kind, colour in (("nsa", "#0072B2"), ("dense", "#D55E00")):
            line = [
                (row.tokens, row.tokens_per_s) for row in rows if (row.level, row.batch, row.by) == (level, batch, kind)
            ]
            known = [(tokens, speed) for tokens, speed in line if speed]
            ax.plot(*zip(*known, strict=True), marker="o", label=kind, color=colour) if known else None
        ax.set(title=f"{level}, batch {batch}", xlabel="tokens before", ylabel="tokens/s", xscale="log")
        ax.set_ylim(bottom=0)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _table(rows: list[StepTime], found: Mapping[str, Any]) -> Table:
    checked = f"error {found['error']:.1e} of {found['limit']:.1e} allowed"
    table = Table(title=f"One more token: ms, tokens/s; parity of attention over a cache: {checked}")
    for name in ("level", "by", "tokens", "batch", "ms", "tokens/s", "MB read", "GB/s", "of dense", "of the shortest"):
        table.add_column(name, justify="left" if name in ("level", "by") else "right")
    for row in rows:
        table.add_row(
            row.level,
            row.by,
            f"{row.tokens:,}",
            str(row.batch),
            number(row.ms) or "FAILED PARITY: no speed",
            number(row.tokens_per_s),
            number(row.read_bytes / 1e6),
            number(row.gb_per_s),
            number(row.of_dense),
            number(row.of_shortest),
            style="bold" if row.by == "nsa" else None,
        )
    return table
