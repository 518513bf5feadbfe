"""`nsa-lab bench attention --packed`: time of packed documents, compared with batched calls of the same lengths.

Forward and backward of the whole operator, as a captured CUDA graph on a GPU, after a parity check: each document in the
row must have the outputs and gradients of a separate call. Rows and their references:

* even: documents of one length; a batched call of these documents.
* corpus: document lengths as in text, one of them very long. The reference is the sum over documents of their tokens times
  the time per token of a batched call. That call has as many tokens as `even` and the next power of two as its length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from nsa_lab.attention import Span, geometry
from nsa_lab.attention.dispatch import ResolvedBackend, nsa_attention, resolve_backend
from nsa_lab.bench.attention_parity import GRADIENT_FACTOR, OUTPUT_FACTOR, compute_relative_error
from nsa_lab.bench.harness import (
    Benchmark,
    Output,
    RandomInputs,
    RowColumn,
    Setup,
    format_number,
    make_leaves,
    make_record,
    make_table,
    measure_if_correct,
)
from nsa_lab.bench.timing import measure_kernel_us, measure_peak_mib, time_ms
from nsa_lab.config import NSAConfig
from nsa_lab.runs.tables import Table

EVEN_TARGET, CORPUS_TARGET = 1.03, 1.15  # ratios to the reference
MEDIAN_LENGTH, LOG_LENGTH_STD = 2400, 1.2  # of corpus documents: bytes, and the standard deviation of the log length
MIN_BATCHED_LENGTH = 64  # minimum sequence length of a batched call


@dataclass(frozen=True)
class RowSizes:
    """Row `even` has `documents` of `length` tokens; row `corpus` has `corpus` tokens, with one document of `longest`."""

    documents: int
    length: int
    corpus: int
    longest: int
    H: int = 12
    G: int = 2
    D: int = 64


GPU_SIZES, CPU_SIZES = RowSizes(16, 2048, 131072, 65536), RowSizes(3, 24, 96, 48, 2, 1, 32)


@dataclass(frozen=True)
class Packing:
    """Documents of `lengths` in one row. `capacity` and `longest`: the arguments of `Span.packed`."""

    name: str
    lengths: list[int]
    capacity: int | None = None
    longest: int | None = None

    def make_span(self) -> Span:
        return Span.packed(torch.tensor([0, *self.lengths]).cumsum(0).int(), self.capacity, self.longest)


@dataclass
class PackingRow:
    """Result of one packing. Field names are keys of the record.

    Times are in milliseconds; None: parity failed. `worst`: the largest ratio of an error to its limit. `beside_ms`: the
    reference time, `ratio`: `packed_ms` over it, `bar`: the target of `ratio`.
    """

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


BENCHMARK = Benchmark[PackingRow](
    title="Packed documents: forward + backward of the whole operator, ms",
    columns=(
        RowColumn("packing", "name", "left"),
        RowColumn("tokens"),
        RowColumn("documents"),
        RowColumn("parity (error/limit)", "worst"),
        RowColumn("packed", lambda row: row.note or format_number(row.packed_ms)),
        RowColumn("reference", "beside_ms"),
        RowColumn("ratio"),
        RowColumn("target", "bar"),
        RowColumn("peak MiB", "peak_mib"),
    ),
    has_table_per_case=False,
    rows_key="lines",
)


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
    """Measure each packing. Print a table, and replace the JSON file after each packing.

    Raises as `resolve_backend` does for a backend that cannot run, or NotImplementedError for one without packing.
    """
    setup, nsa = Setup.resolve(device, dtype), nsa or NSAConfig()
    sizes = sizes or setup.select(gpu=GPU_SIZES, cpu=CPU_SIZES)
    even = Packing("even", [sizes.length] * sizes.documents)
    corpus = Packing("corpus", sample_corpus_lengths(sizes))
    backends = resolve_backend(setup.device, setup.dtype, nsa, backend=backend, span=corpus.make_span())
    timer = _PackingTimer(sizes, nsa, backends, setup)
    kernels = timer.measure_kernels(even)

    def measure_packing(packing: Packing) -> list[PackingRow]:
        if packing.lengths == even.lengths:
            return [timer.measure_packing(packing, timer.get_batched_ms(sizes.length), EVEN_TARGET)]
        return [timer.measure_packing(packing, sum(map(timer.get_document_ms, packing.lengths)), CORPUS_TARGET)]

    return BENCHMARK.run(
        [
            even,
            Packing("even, capacity", even.lengths, 4 * sizes.documents, sizes.length),
            corpus,
            Packing("corpus, capacity", corpus.lengths, 4 * len(corpus.lengths)),
        ],
        measure_packing,
        Output(json_path, console=console),
        make_record(
            setup,
            what="packed documents, compared with batched calls",
            machine=setup.describe_machine(),
            dtype=str(setup.dtype),
            nsa=nsa.model_dump(),
            backend={part: asdict(resolved) for part, resolved in backends.items()},
            sizes=asdict(sizes),
            corpus=corpus.lengths,
            kernels_us=kernels,
        ),
        label=lambda packing: packing.name,
        extra_tables=lambda rows: [_make_kernel_table(kernels)] if kernels else [],
        extra_facts=lambda: {"batched_ms": timer.batched_ms},
    )


def sample_corpus_lengths(sizes: RowSizes, seed: int = 0) -> list[int]:
    """Sample document lengths that sum to `sizes.corpus`. One document of `sizes.longest` is in the middle."""
    rng = random.Random(seed)
    lengths: list[int] = []
    n_remaining = sizes.corpus - sizes.longest
    while n_remaining:
        median = min(MEDIAN_LENGTH, max(sizes.longest // 8, 1))
        lengths.append(min(max(round(rng.lognormvariate(math.log(median), LOG_LENGTH_STD)), 1), n_remaining))
        n_remaining -= lengths[-1]
    lengths.insert(len(lengths) // 2, sizes.longest)
    return lengths


def compute_worst_error(packed: list[Tensor], separate: list[Tensor]) -> float:
    """Return the largest ratio of an error to the smallest limit of the parity check: the output first, then gradients."""
    factors = [OUTPUT_FACTOR, *[GRADIENT_FACTOR] * (len(separate) - 1)]
    ratios = [
        compute_relative_error(y, expected) / (factor * torch.finfo(y.dtype).eps)
        for y, expected, factor in zip(packed, separate, factors, strict=True)
    ]
    return math.inf if any(map(math.isnan, ratios)) else max(ratios)


class _PackingTimer:
    """Timing of packed rows and of the batched calls that they are compared with."""

    def __init__(self, sizes: RowSizes, nsa: NSAConfig, backends: Mapping[str, ResolvedBackend], setup: Setup) -> None:
        self.sizes, self.nsa, self.backends, self.setup = sizes, nsa, backends, setup
        self.batched_ms: dict[int, float] = {}
        """Time of a batched call, by sequence length."""

    def measure_packing(self, packing: Packing, reference_ms: float, target: float) -> PackingRow:
        span, device = packing.make_span(), self.setup.device
        inputs = self.make_inputs(1, span.n_queries, span.num_compressed(self.nsa))
        d_out = torch.randn_like(inputs[0])
        worst = self.compute_parity_error(inputs, d_out, span)
        row = PackingRow(packing.name, span.n_queries, len(packing.lengths), worst, beside_ms=reference_ms, bar=target)

        def run() -> object:
            return self.run_forward_backward(inputs, d_out, span)

        def measure() -> None:
            row.packed_ms = time_ms(run, device)
            row.ratio = row.packed_ms / reference_ms
            row.peak_mib = measure_peak_mib(run, device)

        measure_if_correct(row, worst <= 1, measure)
        return row

    def compute_parity_error(self, inputs: list[Tensor], d_out: Tensor, span: Span) -> float:
        """Return `compute_worst_error` of the row compared with one call per document."""
        parts: list[list[Tensor]] = []
        for document, rows in zip(span.documents, span.compressed_rows(self.nsa), strict=True):
            document_inputs = make_leaves(
                *(x[:, rows if i in (1, 2) else document.query_rows] for i, x in enumerate(inputs))
            )
            parts.append(self.run_forward_backward(document_inputs, d_out[:, document.query_rows], None))
        packed = self.run_forward_backward(inputs, d_out, span)
        separate = [torch.cat(part, 1) for part in zip(*parts, strict=True)]
        return compute_worst_error([y[:, : x.shape[1]] for x, y in zip(separate, packed, strict=True)], separate)

    def get_document_ms(self, length: int) -> float:
        """Return a document's share of a full batched call at the next power of two of its length."""
        padded = max(1 << (length - 1).bit_length(), MIN_BATCHED_LENGTH)
        return length * self.get_batched_ms(padded) / (padded * self.count_sequences(padded))

    def count_sequences(self, length: int) -> int:
        return max(self.sizes.documents * self.sizes.length // length, 1)

    def get_batched_ms(self, length: int) -> float:
        """Return the time of a call without packing, of sequences of `length` tokens."""
        if length not in self.batched_ms:
            inputs = self.make_inputs(self.count_sequences(length), length, geometry.num_compressed(length, self.nsa))
            d_out = torch.randn_like(inputs[0])
            self.batched_ms[length] = time_ms(lambda: self.run_forward_backward(inputs, d_out, None), self.setup.device)
        return self.batched_ms[length]

    def measure_kernels(self, packing: Packing) -> dict[str, tuple[float, float]]:
        """Return {kernel: (microseconds packed, batched)} for documents of one length; empty on a CPU."""
        span, length = packing.make_span(), packing.lengths[0]
        packed = self.make_inputs(1, span.n_queries, span.num_compressed(self.nsa))
        batched = self.make_inputs(len(packing.lengths), length, geometry.num_compressed(length, self.nsa))
        us = [
            measure_kernel_us(lambda x=x, s=s: self.run_forward_backward(x, torch.ones_like(x[0]), s), self.setup.device)
            for x, s in ((packed, span), (batched, None))
        ]
        return {name: (us[0].get(name, 0.0), us[1].get(name, 0.0)) for name in sorted({**us[0], **us[1]})}

    def run_forward_backward(self, inputs: list[Tensor], d_out: Tensor, span: Span | None) -> list[Tensor]:
        """Return the output and the gradients of all inputs."""
        out = nsa_attention(*inputs, nsa=self.nsa, backend=self.backends, span=span)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

    def make_inputs(self, B: int, T: int, N: int) -> list[Tensor]:
        random_inputs = RandomInputs(self.setup.device, self.setup.dtype, seed=0)
        H, G, D = self.sizes.H, self.sizes.G, self.sizes.D
        shapes = [(B, T, H, D), *[(B, N, G, D)] * 2, *[(B, T, G, D)] * 4]
        tensors = [random_inputs.normal(*shape) for shape in shapes]
        return make_leaves(*tensors, random_inputs.gates(B, T, H, 3))


def _make_kernel_table(kernels: Mapping[str, tuple[float, float]]) -> Table:
    """Return a table of {kernel: (packed us, batched us)}, largest difference first."""
    columns = (
        RowColumn("kernel", lambda line: line[0][:60], "left"),
        RowColumn("packed", lambda line: f"{line[1]:.1f}"),
        RowColumn("batched", lambda line: f"{line[2]:.1f}"),
        RowColumn("difference", lambda line: f"{line[1] - line[2]:.1f}"),
    )
    lines = sorted(((name, *us) for name, us in kernels.items()), key=lambda line: line[2] - line[1])
    return make_table("Row even by kernel, us", columns, lines)
