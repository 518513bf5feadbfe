"""`nsa-lab bench attention`: time, memory and useful TFLOP/s of every part of NSA, after a parity check.

The operator has all branches, and the scores of the compressed one select the blocks. With a preset, it has the branches
and the block selection of the preset's model.

On a GPU, every implementation is timed as a captured CUDA graph, so that host launches do not count. Backward time is the
time of forward and backward minus forward. Useful FLOPs count the (query, key) pairs that the definition reads, never
masked or padded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from nsa_lab.attention.dispatch import ResolvedBackend, resolve_backend
from nsa_lab.bench import attention_parity as parity
from nsa_lab.bench import baselines, roofline
from nsa_lab.bench.attention_parts import Part, make_parts
from nsa_lab.bench.attention_rows import CPU_SHAPES, GPU_SHAPES, AttentionRow, Shape
from nsa_lab.bench.harness import Benchmark, Output, RowColumn, Setup, format_number, make_record, measure_if_correct
from nsa_lab.bench.timing import describe_refusal, make_forward_backward, measure_peak_mib, time_eager_ms, time_ms
from nsa_lab.config import BRANCHES, ConfigError, ModelConfig, NSAConfig
from nsa_lab.runs.tables import Table

# Targets of the whole operator with all branches, forward + backward, as a fraction of SDPA flash at the same shape. Keys
# are (T, H); d = 64, or more at H = 64.
WHOLE_TARGETS = {
    (2048, 12): 1.05,
    (8192, 12): 0.45,
    (32768, 12): 0.165,
    (65536, 12): 0.105,
    (131072, 12): 0.075,
    (32768, 64): 0.15,
    (131072, 64): 0.075,
}

EAGER_TARGETS = {(2048, 12): 1.5}
"""The same without a CUDA graph, including launches, as a fraction of SDPA flash in its graph."""

# The baseline of all shares and targets. cuDNN is faster on some GPUs, so the share of the fastest is reported as well.
BASELINE_KERNEL = "SDPA flash"


def run_attention_bench(
    shapes: tuple[Shape, ...] | None = None,
    json_path: Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    nsa: NSAConfig | None = None,
    model: ModelConfig | None = None,
    picture: Path | None = None,
    with_baselines: bool = True,
    parts: bool = False,
    console: Console | None = None,
) -> list[AttentionRow]:
    """Measure every part at every shape. Print a table and replace the JSON file after each shape; plot at the end.

    `model`: branches, scores and indexer, with its own `nsa`; default: all branches with `nsa`. `parts`: also measure the
    device limits and print each part as a fraction of them (`roofline`).
    Default shapes: the four lengths with a target on a GPU, one tiny shape on a CPU, with the heads of `model`. Raises as
    `resolve_backend` does for a backend that cannot run, and ConfigError for a model with dense attention.
    """
    if model is not None and model.attention == "dense":
        raise ConfigError(
            "model.attention = dense: expected nsa, whose parts are compared with dense attention of the same heads; use "
            "the preset of the sparse model"
        )
    setup, nsa = Setup.resolve(device, dtype), model.nsa if model else nsa or NSAConfig()
    backends = resolve_backend(setup.device, setup.dtype, nsa, model, backend)
    rates = roofline.measure_rates(setup.device, setup.dtype) if parts else None
    if shapes is None:
        default_shapes = setup.select(gpu=GPU_SHAPES, cpu=CPU_SHAPES)
        shapes = tuple(shape.with_heads_of(model) for shape in default_shapes) if model else default_shapes
    form = model or ModelConfig(nsa=nsa)
    record = make_record(
        setup,
        machine=setup.describe_machine(),
        dtype=str(setup.dtype),
        nsa=nsa.model_dump(),
        **({"model": model.model_dump(mode="json")} if model else {}),
        backend={part: asdict(resolved) for part, resolved in backends.items()},
        **({"rates": asdict(rates)} if rates else {}),
    )

    def make_limit_tables(rows: list[AttentionRow]) -> Iterable[Table]:
        if rates:
            limited = roofline.add_limits(rows, {str(shape): shape for shape in shapes}, form, setup.dtype.itemsize, rates)
            yield roofline.make_limit_table(limited, rates)

    return BENCHMARK.run(
        shapes,
        lambda shape: _measure_shape(shape, form, backends, setup, with_baselines),
        Output(json_path, picture, console),
        record,
        extra_tables=make_limit_tables,
    )


def plot_times(rows: list[AttentionRow], path: Path) -> None:
    """Plot forward and backward time of each implementation, one panel per shape, to a file."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = Figure(figsize=(1 + 4.5 * len(shapes), 6))
    axes = figure.subplots(1, len(shapes), squeeze=False)
    for ax, shape in zip(axes[0], shapes, strict=True):
        timed = [row for row in rows if row.shape == shape and row.total_ms is not None][::-1]
        names = [f"{row.part}: {row.by}" for row in timed]
        forward = [row.forward_ms for row in timed]
        ax.barh(names, forward, label="forward", color="#0072B2")
        ax.barh(names, [row.backward_ms or 0 for row in timed], left=forward, label="backward", color="#E69F00")
        # A linear axis: stacked bars are comparable only if lengths add.
        ax.set(title=shape, xlabel="time (ms)")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _format_parity(row: AttentionRow) -> str:
    """Format the error that is closest to its limit."""
    worst = max(row.parity.items(), key=lambda item: item[1][0] / item[1][1], default=None)
    return f"{worst[0]} {worst[1][0]:.1e}/{worst[1][1]:.1e}" if worst else ""


BENCHMARK = Benchmark[AttentionRow](
    title="NSA attention: ms, useful TFLOP/s, fraction of dense attention (forward + backward)",
    columns=(
        RowColumn("shape", align="left"),
        RowColumn("part", align="left"),
        RowColumn("by", align="left"),
        RowColumn("parity (error/limit)", _format_parity),
        RowColumn("forward", lambda row: row.note or format_number(row.forward_ms)),
        RowColumn("backward", "backward_ms"),
        RowColumn("fwd TF/s", "tflops_forward"),
        RowColumn("bwd TF/s", "tflops_backward"),
        RowColumn("peak MiB", "peak_mib"),
        RowColumn("of flash", "share"),
        RowColumn("target", "bar"),
        RowColumn("of fastest", "share_fastest"),
        RowColumn(
            "eager, of flash",
            lambda row: format_number(row.eager_share) + (f" ({row.eager_bar})" if row.eager_bar else ""),
        ),
    ),
    is_bold=lambda row, rows: row.part == "whole",
    plot=plot_times,
)


def _measure_shape(
    shape: Shape, model: ModelConfig, backends: Mapping[str, ResolvedBackend], setup: Setup, with_baselines: bool
) -> list[AttentionRow]:
    rows: list[AttentionRow] = []
    nsa = model.nsa
    if with_baselines:
        for name, run, inputs in baselines.list_dense(shape, setup.device, setup.dtype):
            value_width = inputs[2].shape[-1]
            part = "dense" if value_width == shape.value_width else f"dense, values of {value_width}"
            row = AttentionRow(str(shape), part, name)
            rows.append(_time_baseline(row, run, inputs, _count_dense_flops(shape, value_width)))
    dense = {row.by: row.total_ms for row in rows if row.total_ms is not None}
    sizes = shape.H, shape.G, shape.D, nsa, backends, setup.device, setup.dtype
    short = make_parts(min(shape.T, 1024), 1, *sizes, Dv=shape.value_width, model=model)
    long = make_parts(shape.T, shape.B, *sizes, Dv=shape.value_width, model=model)
    rows += [_measure_part(shape, *pair, nsa, dense, setup) for pair in zip(short, long, strict=True)]
    if with_baselines:
        useful_flops = {part.name: part.useful_flops for part in long}
        for part, name, run, inputs in baselines.list_branches(shape, nsa, useful_flops, setup.device, setup.dtype):
            rows.append(_time_baseline(AttentionRow(str(shape), part, name), run, inputs, useful_flops[part]))
    return rows


def _measure_part(
    shape: Shape, short: Part, long: Part, nsa: NSAConfig, dense: Mapping[str, float], setup: Setup
) -> AttentionRow:
    """Check a part on a short and on the timed sequence, then time it. `dense`: ms of each dense baseline."""
    row = AttentionRow(str(shape), long.name, long.backend)
    row.parity, is_correct = parity.check_parity(short, long, nsa)
    measure_if_correct(row, is_correct, lambda: _time_passes(row, long.run, long.inputs, long.useful_flops))
    row.share, row.share_fastest = _compute_shares(row, dense)
    if long.name == "whole" and row.share is not None and row.total_ms is not None:
        if long.model.scores == "compressed" and long.model.branches == tuple(BRANCHES):
            row.bar, row.eager_bar = (targets.get((shape.T, shape.H)) for targets in (WHOLE_TARGETS, EAGER_TARGETS))
        row.eager_ms = time_eager_ms(make_forward_backward(long.run, long.inputs), setup.device)
        row.eager_share = None if row.eager_ms is None else row.share * row.eager_ms / row.total_ms
    return row


def _time_baseline(row: AttentionRow, run: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> AttentionRow:
    """Time a baseline. If it does not run at this shape, return a row with the reason."""
    try:
        return _time_passes(row, run, inputs, flops)
    except RuntimeError as reason:  # includes the errors of torch and of its compiler
        return AttentionRow(row.shape, row.part, row.by, note=describe_refusal(reason))


def _compute_shares(row: AttentionRow, dense: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return total time as a fraction of SDPA flash and of the fastest dense attention; None without them."""
    if row.total_ms is None or not dense:
        return None, None
    flash = dense.get(BASELINE_KERNEL)
    return row.total_ms / flash if flash else None, row.total_ms / min(dense.values())


def _time_passes(row: AttentionRow, run: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> AttentionRow:
    """Fill in time, TFLOP/s and memory of `run(*inputs)` and of the gradients of the inputs that require them."""
    device = inputs[0].device
    row.forward_ms = time_ms(lambda: run(*inputs), device)
    if flops:
        row.tflops_forward = flops / row.forward_ms / 1e9
    if not any(x.requires_grad for x in inputs):
        return row
    forward_backward = make_forward_backward(run, inputs)
    row.backward_ms = max(time_ms(forward_backward, device) - row.forward_ms, 0.0)
    if flops and row.backward_ms:
        row.tflops_backward = roofline.BACKWARD_FACTOR * flops / row.backward_ms / 1e9
    row.peak_mib = measure_peak_mib(forward_backward, device)
    return row


def _count_dense_flops(shape: Shape, value_width: int) -> float:
    return 2 * (shape.D + value_width) * shape.H * shape.B * shape.T * (shape.T + 1) / 2
