"""`nsa-lab bench train --documents`: training with document masking, compared with the same rows as one text.

The trainer's own step of the NSA model, as in `bench train`, on rows of real text: `data.documents: mask` against `cross`,
all else equal. Masking reduces the keys to read and adds bookkeeping. The ratio is the cost of the mask or, in long rows of
short documents, its benefit. A shape so small that a run replays CUDA graphs (2048x4) has a second row, with graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from nsa_lab.bench.harness import Benchmark, Output, RowColumn, Setup, make_record
from nsa_lab.bench.training_speed import (
    CPU_MODEL,
    CPU_SHAPES,
    format_shape,
    is_small,
    make_bench_config,
    measure_configs,
)
from nsa_lab.config import DataConfig, ModelConfig, RunConfig

# (T, micro-batch) -> target ratio of tokens per second with the mask to tokens per second without.
TARGETS = {(2048, 32): 0.97, (65536, 1): 1.0}
MAX_TEXT_TOKENS = 30_000_000  # tokens of the text from which rows are read


@dataclass
class MaskingRow:
    """One shape: tokens per second and peak bytes without (`cross`) and with `mask`. Field names are keys of the record."""

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
    device: str | None = None,
    console: Console | None = None,
) -> list[MaskingRow]:
    """Measure each shape (tokens, sequences per forward pass). Print a table and replace the JSON file after each shape.

    `text`: a file, folder or glob, as in data.path; None: the sources of Python. On a GPU: the production model, bf16 and
    compiled. On a CPU: a tiny model that only tests the code. Raises ConfigError for an unusable shape, and DataError for
    text shorter than a row.
    """
    setup = Setup.resolve(device)
    model = setup.select(gpu=ModelConfig(), cpu=CPU_MODEL)
    cases = [
        (shape, use_graph)
        for shape in shapes or setup.select(gpu=tuple(TARGETS), cpu=CPU_SHAPES)
        for use_graph in ((False, True) if setup.is_gpu and is_small(*shape) else (False,))
    ]
    return BENCHMARK.run(
        cases,
        lambda case: [_measure_shape(model, case[0], text, setup.is_gpu, case[1], steps)],
        Output(json_path, console=console),
        make_record(
            setup,
            what="training step of NSA, document masking against one text",
            model=model.model_dump(),
            text="stdlib" if text is None else text.name,
        ),
        label=lambda case: format_shape(case[0]) + (", CUDA graph" if case[1] else ""),
    )


def _measure_shape(
    model: ModelConfig, shape: tuple[int, int], text: Path | None, is_gpu: bool, use_graph: bool, steps: int
) -> MaskingRow:
    seq_len, micro_batch = shape
    configs: dict[str, RunConfig] = {}
    for documents in ("cross", "mask"):
        source = {"source": "stdlib"} if text is None else {"source": "local", "path": str(text)}
        data = DataConfig.model_validate({**source, "documents": documents, "max_tokens": MAX_TEXT_TOKENS})
        configs[documents] = make_bench_config(model, "nsa", seq_len, micro_batch, is_gpu, data, graph=use_graph)
    measurements = measure_configs(configs, steps)
    cross, mask = measurements["cross"], measurements["mask"]
    return MaskingRow(
        seq_len,
        micro_batch,
        use_graph,
        mask.documents_per_row,
        cross=cross.tokens_per_s,
        mask=mask.tokens_per_s,
        ratio=mask.tokens_per_s / cross.tokens_per_s,
        bar=None if use_graph else TARGETS.get(shape),
        cross_peak_bytes=cross.memory_peak_bytes,
        mask_peak_bytes=mask.memory_peak_bytes,
        backends=mask.backends,
    )


BENCHMARK = Benchmark[MaskingRow](
    title="Training with document masking: tokens per second",
    columns=(
        RowColumn("T x micro", lambda row: format_shape((row.seq_len, row.micro_batch))),
        RowColumn("graph", lambda row: "yes" if row.cuda_graph else ""),
        RowColumn("documents per row", lambda row: f"{row.documents_per_row:.1f}"),
        RowColumn("one text", lambda row: f"{row.cross:,.0f}"),
        RowColumn("masked", lambda row: f"{row.mask:,.0f}"),
        RowColumn("ratio", lambda row: f"{row.ratio:.3f}"),
        RowColumn("target", lambda row: "" if row.bar is None else f"{row.bar}"),
        RowColumn("GB", lambda row: f"{row.cross_peak_bytes / 1e9:.2f}"),
        RowColumn("GB masked", lambda row: f"{row.mask_peak_bytes / 1e9:.2f}"),
        RowColumn("backends", lambda row: ", ".join(sorted(set(row.backends.values())))),
    ),
    has_table_per_case=False,
)
