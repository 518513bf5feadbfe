"""`nsa-lab bench attention --packed`: what documents in one row cost, beside batched calls of the same lengths.

Forward and backward of the whole operator, as a captured CUDA graph on a GPU. Parity first: a row whose documents do not
come out as they do alone gets no speed. What a line is held against:

* even: as many tokens in documents of one length; the batched call of these documents.
* corpus: lengths as documents of text have them, one very long; the sum over documents of their tokens times the time per
  token of a batched call, of as many tokens as `even` has, at the next power of two of the document's length.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nsa_lab.attention import Span, geometry
from nsa_lab.attention.dispatch import ResolvedBackend, nsa_attention, resolve_backend
from nsa_lab.bench import records
from nsa_lab.bench.attention_parity import GRADIENT_FACTOR, OUTPUT_FACTOR, compute_relative_error
from nsa_lab.bench.attention_speed import TABLE_WIDTH, describe_machine, format_number
from nsa_lab.bench.timing import measure_kernel_us, measure_peak_bytes, time_ms
from nsa_lab.config import NSAConfig

EVEN_TARGET, CORPUS_TARGET = 1.03, 1.15  # times what they are held against
MEDIAN_LENGTH, LOG_LENGTH_STD = 2400, 1.2  # of the corpus: bytes, and the standard deviation of their logarithm
MIN_BATCHED_LENGTH = 64  # length of a batched call


@dataclass(frozen=True)
class RowSizes:
    """`documents` of `length` tokens for even, and a corpus of `corpus` tokens, one document of which has `longest`."""

    documents: int
    length: int
    corpus: int
    longest: int
    H: int = 12
    G: int = 2
    D: int = 64


GPU_SIZES, CPU_SIZES = RowSizes(16, 2048, 131072, 65536), RowSizes(3, 24, 96, 48, 2, 1, 32)


@dataclass
class PackingRow:
    """One packing. Milliseconds are None where parity failed; `worst` is the worst error over what is allowed."""

    name: str
    tokens: int
    documents: int
    worst: float
    packed_ms: float | None = None
    beside_ms: float | None = None
    ratio: float | None = None
    bar: float | None = None
    peak_mib: float | None = None
    note: str = ""


def run_packed_bench(
    json_path: Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    nsa: NSAConfig | None = None,
    sizes: RowSizes | None = None,
    console: Console | None = None,
) -> list[PackingRow]:
    """Measure each packing; print a table, and write JSON where asked. Defaults: the GPU and bf16, or a CPU and float32.

    Raises what `resolve_backend` raises for a backend that cannot run, NotImplementedError for one that takes no documents.
    """
    nsa = nsa or NSAConfig()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    sizes = sizes or (GPU_SIZES if device.type == "cuda" else CPU_SIZES)
    even, corpus = [sizes.length] * sizes.documents, sample_corpus_lengths(sizes)
    choices = resolve_backend(device, dtype, nsa, backend=backend, span=_make_span(corpus))
    bench = _PackingTimer(sizes, nsa, choices, device, dtype)
    batched = bench.get_batched_ms(sizes.length)
    lines = [
        bench.measure_packing("even", even, None, batched, EVEN_TARGET),
        bench.measure_packing("even, capacity", even, 4 * sizes.documents, batched, EVEN_TARGET, longest=sizes.length),
        bench.measure_packing("corpus", corpus, None, sum(map(bench.get_document_ms, corpus)), CORPUS_TARGET),
        bench.measure_packing(
            "corpus, capacity", corpus, 4 * len(corpus), sum(map(bench.get_document_ms, corpus)), CORPUS_TARGET
        ),
    ]
    kernels = bench.measure_kernels(even)
    console = console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    console.print(_make_table(lines))
    if kernels:
        console.print(_make_kernel_table(kernels))
    if json_path:
        record = {
            "what": "documents in one row, beside batched calls",
            **records.origin(records.device_name() if device.type == "cuda" else str(device), records.OPERATOR),
            "machine": describe_machine(device),
            "dtype": str(dtype),
            "nsa": nsa.model_dump(),
            "backend": {part: asdict(choice) for part, choice in choices.items()},
            "sizes": asdict(sizes),
            "corpus": corpus,
            "batched_ms": bench.batched,
            "kernels_us": kernels,
            "lines": [asdict(line) for line in lines],
        }
        records.write(Path(json_path), record)
    return lines


def sample_corpus_lengths(sizes: RowSizes, seed: int = 0) -> list[int]:
    """Tokens of documents, `sizes.corpus` in all, one of them `longest` and somewhere in the middle."""
    draw = random.Random(seed)
    lengths: list[int] = []
    left = sizes.corpus - sizes.longest
    while left:
        median = min(MEDIAN_LENGTH, max(sizes.longest // 8, 1))
        lengths.append(min(max(round(draw.lognormvariate(math.log(median), LOG_LENGTH_STD)), 1), left))
        left -= lengths[-1]
    lengths.insert(len(lengths) // 2, sizes.longest)
    return lengths


def compute_worst_error(together: list[Tensor], alone: list[Tensor]) -> float:
    """Of an output, which is the first, and gradients: over what is allowed, the parity bar at its strictest."""
    factors = [OUTPUT_FACTOR, *[GRADIENT_FACTOR] * (len(alone) - 1)]
    found = [
        compute_relative_error(y, expected) / (factor * torch.finfo(y.dtype).eps)
        for y, expected, factor in zip(together, alone, factors, strict=True)
    ]
    return math.inf if any(map(math.isnan, found)) else max(found)


class _PackingTimer:
    """What all lines share."""

    def __init__(
        self,
        sizes: RowSizes,
        nsa: NSAConfig,
        choices: Mapping[str, ResolvedBackend],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.sizes, self.nsa, self.choices, self.device, self.dtype = sizes, nsa, choices, device, dtype
        self.batched: dict[int, float] = {}

    def measure_packing(
        self, name: str, lengths: list[int], capacity: int | None, beside_ms: float, bar: float, longest: int | None = None
    ) -> PackingRow:
        span = _make_span(lengths, capacity, longest)
        inputs = self.make_inputs(1, span.n_queries, span.num_compressed(self.nsa))
        d_out = torch.randn_like(inputs[0])
        line = PackingRow(
            name, span.n_queries, len(lengths), self.compute_parity_error(inputs, d_out, span), beside_ms=beside_ms, bar=bar
        )
        if not line.worst <= 1:
            line.note = "FAILED PARITY: no speed"
            return line
        run = lambda: self.run_forward_backward(inputs, d_out, span)  # noqa: E731
        line.packed_ms = time_ms(run, self.device)
        line.ratio = line.packed_ms / beside_ms
        peak = measure_peak_bytes(run, self.device)
        line.peak_mib = None if peak is None else peak / 2**20
        return line

    def compute_parity_error(self, inputs: list[Tensor], d_out: Tensor, span: Span) -> float:
        """`worst_error` of the row against its documents, one call each."""
        parts: list[list[Tensor]] = []
        for document, rows in zip(span.documents, span.compressed_rows(self.nsa), strict=True):
            own = [x[:, rows if i in (1, 2) else document.query_rows] for i, x in enumerate(inputs)]
            own = [x.detach().requires_grad_() for x in own]
            parts.append(self.run_forward_backward(own, d_out[:, document.query_rows], None))
        together = self.run_forward_backward(inputs, d_out, span)
        alone = [torch.cat(part, 1) for part in zip(*parts, strict=True)]
        return compute_worst_error([y[:, : x.shape[1]] for x, y in zip(alone, together, strict=True)], alone)

    def get_document_ms(self, length: int) -> float:
        """A document's share of a full batched call of the next power of two."""
        padded = max(1 << (length - 1).bit_length(), MIN_BATCHED_LENGTH)
        return length * self.get_batched_ms(padded) / (padded * self.count_sequences(padded))

    def count_sequences(self, length: int) -> int:
        return max(self.sizes.documents * self.sizes.length // length, 1)

    def get_batched_ms(self, length: int) -> float:
        """Of a call without documents, of sequences of `length` tokens."""
        if length not in self.batched:
            inputs = self.make_inputs(self.count_sequences(length), length, geometry.num_compressed(length, self.nsa))
            d_out = torch.randn_like(inputs[0])
            self.batched[length] = time_ms(lambda: self.run_forward_backward(inputs, d_out, None), self.device)
        return self.batched[length]

    def measure_kernels(self, lengths: list[int]) -> dict[str, tuple[float, float]]:
        """Microseconds of every kernel, in one row of documents of one length, and batched; none on a CPU."""
        span, length = _make_span(lengths), lengths[0]
        packed = self.make_inputs(1, span.n_queries, span.num_compressed(self.nsa))
        batched = self.make_inputs(len(lengths), length, geometry.num_compressed(length, self.nsa))
        us = [
            measure_kernel_us(lambda x=x, s=s: self.run_forward_backward(x, torch.ones_like(x[0]), s), self.device)
            for x, s in ((packed, span), (batched, None))
        ]
        return {name: (us[0].get(name, 0.0), us[1].get(name, 0.0)) for name in sorted({**us[0], **us[1]})}

    def run_forward_backward(self, inputs: list[Tensor], d_out: Tensor, span: Span | None) -> list[Tensor]:
        """The output, and the gradients of all inputs."""
        out = nsa_attention(*inputs, nsa=self.nsa, backend=self.choices, span=span)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

    def make_inputs(self, B: int, T: int, N: int) -> list[Tensor]:
        draw = torch.Generator(self.device).manual_seed(0)
        H, G, D = self.sizes.H, self.sizes.G, self.sizes.D
        shapes = [(B, T, H, D), *[(B, N, G, D)] * 2, *[(B, T, G, D)] * 4]
        x = [torch.randn(s, device=self.device, dtype=self.dtype, generator=draw) for s in shapes]
        gates = torch.rand(B, T, H, 3, device=self.device, generator=draw).to(self.dtype)
        return [y.requires_grad_() for y in (*x, gates)]


def _make_span(lengths: list[int], capacity: int | None = None, longest: int | None = None) -> Span:
    return Span.packed(torch.tensor([0, *lengths]).cumsum(0).int(), capacity, longest)


def _make_table(lines: list[PackingRow]) -> Table:
    table = Table(title="Documents in one row; forward + backward of the whole operator, ms")
    for name in ("packing", "tokens", "documents", "parity (of allowed)", "packed", "beside", "ratio", "bar", "peak MiB"):
        table.add_column(name, justify="left" if name == "packing" else "right")
    for line in lines:
        packed = line.note or format_number(line.packed_ms)
        ends = (
            packed,
            format_number(line.beside_ms),
            format_number(line.ratio),
            format_number(line.bar),
            format_number(line.peak_mib),
        )
        table.add_row(line.name, str(line.tokens), str(line.documents), format_number(line.worst), *ends)
    return table


def _make_kernel_table(kernels: Mapping[str, tuple[float, float]]) -> Table:
    table = Table(title="even, kernel by kernel, us; what documents add comes first")
    for name in ("kernel", "packed", "batched", "more"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for name, (packed, batched) in sorted(kernels.items(), key=lambda item: item[1][1] - item[1][0]):
        table.add_row(name[:60], *(f"{us:.1f}" for us in (packed, batched, packed - batched)))
    return table
