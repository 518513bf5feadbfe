"""One decoding step of one layer, through a cache, beside the fastest dense one that runs here; parity first.

Every contender is timed as a CUDA graph of as many layers as fit, each with a cache of its own, from a cold L2 cache: what
a model's step is. A step is bound by the bytes that it has to read, so these are told, and which share of an H200's 4.8
TB/s they come to. Bytes are those of the keys and values that the definition reads, never of partial results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import geometry, reference
from nsa_lab.attention.decoding import LayerCache, cached_attention
from nsa_lab.bench import records
from nsa_lab.bench.attention import TABLE_WIDTH, machine, number
from nsa_lab.bench.attention_parity import OUTPUT_FACTOR, error_and_allowed
from nsa_lab.bench.timing import time_ms
from nsa_lab.config import NSAConfig

PEAK = 4.8e12  # bytes per second that an H200's memory is said to give
# How many times faster than dense: (sequences, tokens), at the default heads.
BARS = {(1, 8192): 1.0, (1, 65536): 2.5, (1, 131072): 4.0, (32, 8192): 2.7, (32, 65536): 6.5, (32, 131072): 8.5}
LAYERS, TOKENS = 8, 2**21  # layers in a graph, and tokens of all their caches, at most


@dataclass(frozen=True)
class Step:
    """A new token at the end of each of B sequences of T tokens, itself included."""

    T: int
    B: int
    H: int = 64
    G: int = 4
    D: int = 128

    def __str__(self) -> str:
        return f"{self.T}x{self.B} H{self.H} G{self.G} d{self.D}"

    @property
    def layers(self) -> int:
        return max(1, min(LAYERS, TOKENS // (self.B * self.T)))

    def read_bytes(self, keys: int, dtype: torch.dtype) -> int:
        return self.B * keys * self.G * 2 * self.D * dtype.itemsize


# Those with a bar first: time may run out.
GPU_STEPS = tuple(Step(T, B) for T in (131072, 65536, 8192, 32768) for B in (32, 1))
CPU_STEPS = (Step(300, 2, 6, 2, 32),)


@dataclass
class Reading:
    """One contender at one shape; `ms` is None where it did not run or failed parity. `ratio` is to the fastest dense."""

    shape: str
    by: str
    ms: float | None = None
    ratio: float | None = None
    bar: float | None = None
    read_mb: float = 0.0
    share: float | None = None
    parity: list[float] = field(default_factory=list)
    note: str = ""

    def timed(self, ms: float, read: int) -> Reading:
        self.ms, self.read_mb, self.share = ms, read / 1e6, read / (ms * 1e-3) / PEAK
        return self


def run_decode_bench(
    steps: tuple[Step, ...] | None = None,
    json_path: Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    nsa: NSAConfig | None = None,
    seconds: float = float("inf"),
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure every shape; print a table, write JSON where asked, and return the record.

    Defaults: the GPU, bf16 and 8K to 128K tokens, or a CPU, float32 and one tiny shape. After `seconds` no other shape is
    begun; the table says which were left out.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if gpu else torch.float32)
    bench = DecodeBench(nsa or NSAConfig(), device, dtype, backend or ("triton" if gpu else "torch"))
    end, readings = time.monotonic() + seconds, list[Reading]()
    for step in steps or (GPU_STEPS if gpu else CPU_STEPS):
        if time.monotonic() > end:
            readings.append(Reading(str(step), "all", note="left out: no time"))
        else:
            readings += bench.readings(step, end)
    (console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)).print(_table(readings))
    record = {
        "what": "one decoding step of one layer",
        **records.origin(records.device_name() if gpu else str(device)),
        "machine": machine(device),
        "dtype": str(dtype),
        "backend": bench.backend,
        "nsa": bench.nsa.model_dump(),
        "rows": [asdict(reading) for reading in readings],
    }
    if json_path:
        records.write(json_path, record)
    return record


@dataclass
class DecodeBench:
    nsa: NSAConfig
    device: torch.device
    dtype: torch.dtype
    backend: str

    def readings(self, step: Step, end: float) -> list[Reading]:
        sparse = self._sparse(step)
        dense = list(self._dense(step, end))
        best = min((reading.ms for reading in dense if reading.ms is not None), default=None)
        for reading in (sparse, *dense):
            reading.ratio = best / reading.ms if best and reading.ms else None
        return [*dense, sparse]

    def _sparse(self, step: Step) -> Reading:
        layers = [self._inputs(step) for _ in range(step.layers)]
        bar = BARS.get((step.B, step.T)) if (step.H, step.G, step.D) == (64, 4, 128) else None
        reading = Reading(str(step), f"NSA, {self.backend}", bar=bar, parity=self._parity(*layers[-1]))
        if not reading.parity[0] <= reading.parity[1]:
            reading.note = "FAILED PARITY: no speed"
            return reading
        ms = time_ms(lambda: [self._run(*layer) for layer in layers], self.device) / step.layers
        keys = geometry.decode_reads(step.T, self.nsa)
        return reading.timed(ms, step.read_bytes(sum(keys.values()), self.dtype))

    def _run(self, q: Tensor, gates: Tensor, cache: LayerCache, lengths: Tensor) -> Tensor:
        return cached_attention(q, gates, cache, lengths, self.nsa, backend=self.backend)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, LayerCache, Tensor]:
        rows = (geometry.num_compressed(step.T, self.nsa), step.T, self.nsa.w)
        cache = LayerCache(*(self._random(step.B, n, step.G, step.D) for n in rows for _ in "kv"))
        lengths = torch.full((step.B,), step.T - 1, dtype=torch.int32, device=self.device)
        gates = self._random(step.B, 1, step.H, 3).sigmoid()
        return self._random(step.B, 1, step.H, step.D), gates, cache, lengths

    def _parity(self, q: Tensor, gates: Tensor, cache: LayerCache, lengths: Tensor) -> list[float]:
        """Error and limit of the last sequence, the one at the highest addresses, choice of blocks included."""
        ours = self._run(q, gates, cache, lengths)[-1, 0]
        low = [q[-1, 0], gates[-1, 0], *(x[-1] for x in cache if x is not None)]
        wide = [x.double() for x in low]
        blocks = _choose(wide[0], wide[2], int(lengths[-1]), self.nsa)
        exact, rough = (_plain(x, blocks, int(lengths[-1]), self.nsa) for x in (wide, low))
        return error_and_allowed(ours, exact, rough, OUTPUT_FACTOR)

    def _dense(self, step: Step, end: float) -> Iterator[Reading]:
        kv = [[self._random(step.B, step.G, step.T, step.D) for _ in "kv"] for _ in range(step.layers)]
        layers = [(self._random(step.B, step.H, 1, step.D), *pair) for pair in kv]
        for name, run in _dense_steps(step, self.device):
            reading = Reading(str(step), name)
            if name == FLEX and time.monotonic() > end:
                reading.note = "left out: no time"
            else:
                self._time(reading, run, layers, step)
            yield reading

    def _time(self, reading: Reading, run: Callable[..., Tensor], layers: list[Any], step: Step) -> None:
        q, k, v = (x[-1:] for x in layers[-1])
        grouped = q.double().unflatten(1, (step.G, -1)).squeeze(3)
        exact = scaled_dot_product_attention(grouped, k.double(), v.double()).flatten(1, 2).unsqueeze(2)
        try:
            rough = scaled_dot_product_attention(grouped.to(k.dtype), k, v).flatten(1, 2).unsqueeze(2)
            reading.parity = error_and_allowed(run(*layers[-1])[-1:], exact, rough, OUTPUT_FACTOR)
            ms = time_ms(lambda: [run(*layer) for layer in layers], self.device) / step.layers
        except RuntimeError as error:  # a backend that does not take these shapes says so here
            reading.note = f"does not run: {str(error).splitlines()[0][:60]}"
            return
        reading.timed(ms, step.read_bytes(step.T, self.dtype))


FLEX = "FlexAttention"


def _dense_steps(step: Step, device: torch.device) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """(name, run) of dense attention of one query: q [B, H, 1, D], k and v [B, G, T, D] -> [B, H, 1, D].

    SDPA gets the heads of a group as that many queries of one head, which reads keys once; its own way with groups beside.
    """
    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    kinds["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    if device.type != "cuda":
        kinds = {"math": SDPBackend.MATH}
    for name, kind in kinds.items():
        for grouped in (True, False):
            yield f"SDPA {name}{'' if grouped else ', enable_gqa'}", _sdpa(kind, grouped)
    if device.type == "cuda":
        yield "these kernels, every key", _every_key(step, device)
        yield FLEX, _flex()


def _sdpa(kind: SDPBackend, grouped: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            if not grouped:
                return scaled_dot_product_attention(q, k, v, enable_gqa=True)
            rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
            return scaled_dot_product_attention(rows, k, v).reshape(q.shape)

    return run


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, enable_gqa=True)


def _every_key(step: Step, device: torch.device) -> Callable[..., Tensor]:
    """Dense attention as the compressed branch with a block for every token; a window of one token that no gate lets in."""
    from nsa_lab.attention.kernels.decoding import launch

    lengths = torch.full((step.B,), step.T - 1, dtype=torch.int32, device=device)
    gates = torch.tensor([1.0, 0.0, 0.0], device=device).expand(step.B, 1, step.H, 3)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        parts = launch.split(q, v, 0, 1)
        launch.compressed_and_window(q, k, v, k, v, lengths, None, parts, 1, 1, 1)
        return launch.merged(q, gates, parts).transpose(1, 2)

    return run


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [H, D], k [n, G, D], v [n, G, Dv] -> [H, Dv], in their dtype throughout."""
    grouped = q.view(k.shape[1], -1, q.shape[1])
    p = torch.softmax(torch.einsum("ghd,ngd->ghn", grouped, k) * q.shape[1] ** -0.5, -1)
    return torch.einsum("ghn,ngd->ghd", p, v).flatten(0, 1)


def _choose(q: Tensor, k_cmp: Tensor, position: int, nsa: NSAConfig) -> Tensor:
    """The blocks [G, n_sel] of one query, by the definition."""
    k = k_cmp[: geometry.num_compressed(position + 1, nsa)]
    grouped = q.view(k.shape[1], -1, q.shape[1])
    p = torch.softmax(torch.einsum("ghd,ngd->ghn", grouped, k) * q.shape[1] ** -0.5, -1).sum(1)
    carry = geometry.overlap(len(k), geometry.num_selection(position + 1, nsa), nsa, dtype=p.dtype, device=p.device)
    return reference.choose((p @ carry)[None, None].float(), nsa, position)[0, 0]


def _plain(inputs: list[Tensor], blocks: Tensor, position: int, nsa: NSAConfig) -> Tensor:
    """The gated sum [H, Dv] of one query through the cache of its sequence."""
    q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = inputs
    n = geometry.num_compressed(position + 1, nsa)
    tokens = blocks.long()[..., None] * nsa.l_sel + torch.arange(nsa.l_sel, device=q.device)
    read = (blocks[..., None] >= 0) & (tokens <= position)
    at = (
        torch.stack([one[mask] for one, mask in zip(tokens, read, strict=True)], 1),
        torch.arange(len(blocks), device=q.device),
    )
    near = torch.arange(max(0, position - nsa.w + 1), position + 1, device=q.device) % len(k_win)
    outs = _attend(q, k_cmp[:n], v_cmp[:n]), _attend(q, k_sel[at], v_sel[at]), _attend(q, k_win[near], v_win[near])
    return reference.combine(*outs, gates)


def _table(readings: list[Reading]) -> Table:
    table = Table(title="one decoding step of one layer; ms, times the fastest dense, MB that must be read, of 4.8 TB/s")
    for name in ("tokens x sequences", "by", "error/limit", "ms", "times", "bar", "MB", "of 4.8 TB/s"):
        table.add_column(name, justify="left" if name in ("tokens x sequences", "by") else "right")
    for reading in readings:
        table.add_row(
            reading.shape,
            reading.by,
            "/".join(f"{x:.1e}" for x in reading.parity),
            reading.note or f"{reading.ms:.4f}",
            number(reading.ratio),
            number(reading.bar),
            number(reading.read_mb),
            "" if reading.share is None else f"{reading.share:.0%}",
            style="bold" if reading.by.startswith("NSA") else None,
        )
    return table
