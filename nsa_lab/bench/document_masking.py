"""`nsa-lab bench train --documents`: training with documents told apart, beside the same rows read as one text.

The trainer's own step of the NSA model, as in `bench train`, on rows of real text: `data.documents: mask` against `cross`,
everything else alike. What is told apart is less to read and more to keep apart, so the ratio says what a mask costs or,
in long rows of short documents, what it saves. A shape so small that a run replays CUDA graphs (2048x4) has a second row,
of both as graphs.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from nsa_lab.bench import records
from nsa_lab.bench.training_speed import CPU_MODEL, CPU_SHAPES, TABLE_WIDTH, is_small, make_bench_config, measure_configs
from nsa_lab.config import DataConfig, ModelConfig, RunConfig

# T x micro-batch -> tokens per second with the mask over those without that the project set itself.
TARGETS = {(2048, 32): 0.97, (65536, 1): 1.0}
MAX_TEXT_TOKENS = 30_000_000  # of the text, read for the rows


@dataclass
class MaskingRow:
    """One shape. Rates in tokens per second, peaks in bytes."""

    seq_len: int
    micro_batch: int
    cuda_graph: bool
    documents_per_row: float
    cross: float
    mask: float
    ratio: float
    bar: float | None
    cross_peak_bytes: int
    mask_peak_bytes: int
    backends: dict[str, str]


def run_documents_bench(
    shapes: tuple[tuple[int, int], ...] | None = None,
    json_path: Path | None = None,
    *,
    text: Path | None = None,
    steps: int = 20,
    console: Console | None = None,
) -> list[MaskingRow]:
    """Measure each shape (tokens, sequences per forward pass); print a table, and write JSON where asked.

    `text`: a file, a folder or a glob as data.path takes it; None: Python's own sources. On a CUDA device the production
    model, bf16 and compiled; on a CPU a tiny one, which proves the path. Raises ConfigError for an unusable shape, and
    DataError for text that does not fill a row.
    """
    cuda = torch.cuda.is_available()
    model = ModelConfig() if cuda else CPU_MODEL
    rows = [
        _measure_shape(model, shape, text, cuda, graph, steps)
        for shape in shapes or (tuple(TARGETS) if cuda else CPU_SHAPES)
        for graph in ((False, True) if cuda and is_small(*shape) else (False,))
    ]
    (console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)).print(_make_table(rows))
    if json_path:
        record = {
            "what": "training step of NSA, documents masked against one text",
            **records.origin(records.device_name()),
            "model": model.model_dump(),
            "text": "stdlib" if text is None else text.name,
            "rows": [asdict(row) for row in rows],
        }
        records.write(json_path, record)
    return rows


def _measure_shape(
    model: ModelConfig, shape: tuple[int, int], text: Path | None, cuda: bool, graph: bool, steps: int
) -> MaskingRow:
    seq_len, micro = shape
    configs: dict[str, RunConfig] = {}
    for documents in ("cross", "mask"):
        source = {"source": "stdlib"} if text is None else {"source": "local", "path": str(text)}
        data = DataConfig.model_validate({**source, "documents": documents, "max_tokens": MAX_TEXT_TOKENS})
        configs[documents] = make_bench_config(model, "nsa", seq_len, micro, cuda, data, graph=graph)
    found = measure_configs(configs, steps)
    cross, mask = found["cross"], found["mask"]
    rates = cross.tokens_per_s, mask.tokens_per_s, mask.tokens_per_s / cross.tokens_per_s
    peaks = cross.memory_peak_bytes, mask.memory_peak_bytes
    bar = None if graph else TARGETS.get(shape)
    return MaskingRow(seq_len, micro, graph, mask.documents_per_row, *rates, bar, *peaks, mask.backends)


def _make_table(rows: list[MaskingRow]) -> Table:
    table = Table(title=f"Training with documents told apart, {records.device_name()}; tokens per second")
    names = "T x micro", "graph", "documents per row", "one text", "masked", "ratio", "bar", "GB", "GB masked", "backends"
    for name in names:
        table.add_column(name, justify="right")
    for r in rows:
        peaks = (f"{peak / 1e9:.2f}" for peak in (r.cross_peak_bytes, r.mask_peak_bytes))
        table.add_row(
            f"{r.seq_len} x {r.micro_batch}",
            "yes" if r.cuda_graph else "",
            f"{r.documents_per_row:.1f}",
            f"{r.cross:,.0f}",
            f"{r.mask:,.0f}",
            f"{r.ratio:.3f}",
            "" if r.bar is None else f"{r.bar}",
            *peaks,
            ", ".join(sorted(set(r.backends.values()))),
        )
    return table
