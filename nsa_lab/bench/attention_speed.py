"""`nsa-lab bench attention`: parity first, then forward, backward, memory and useful TFLOP/s of every part of NSA.

A part that disagrees with float64 gets no speed. On a GPU every contender is timed as a captured CUDA graph, so that the
host's launches are in nobody's figure; backward is forward-and-backward less forward. "Useful" counts the (query, key)
pairs that the definition reads, never masked or padded ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nsa_lab.attention.dispatch import resolve_backend
from nsa_lab.bench import attention_parity as parity
from nsa_lab.bench import baselines as peers
from nsa_lab.bench import records
from nsa_lab.bench.attention_parts import Part, make_parts
from nsa_lab.bench.timing import describe_refusal, measure_peak_bytes, time_eager_ms, time_ms
from nsa_lab.config import NSAConfig

# Forward and backward of the whole as a share of SDPA flash at the same shape: (T, H), with d=64, or with more where H=64.
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
"""The same without a graph, launches and all, as a share of SDPA flash in its graph."""

# Dense attention that shares and bars are told in; cuDNN's is faster where there is one, so that shares are told of both.
BASELINE_KERNEL = "SDPA flash"
TABLE_WIDTH = 170  # characters, where the output is no terminal


@dataclass(frozen=True)
class Shape:
    """T tokens, B sequences, H query heads, G groups; heads D wide, their values V wide, or D where V is None."""

    T: int
    B: int
    H: int = 12
    G: int = 2
    D: int = 64
    V: int | None = None

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.V or self.D

    def __str__(self) -> str:
        width = f"{self.D}" if self.value_width == self.D else f"{self.D}/{self.value_width}"
        heads = "" if (self.H, self.G, width) == (12, 2, "64") else f" H{self.H} G{self.G} d{width}"
        return f"{self.T}x{self.B}{heads}"


GPU_SHAPES = (Shape(2048, 8), Shape(8192, 2), Shape(32768, 1), Shape(65536, 1))
CPU_SHAPES = (Shape(96, 1, 6, 2, 32),)


@dataclass
class AttentionRow:
    """One contender at one shape. Times are milliseconds, None where parity failed or there is no backward; of the whole,
    also forward and backward without a graph."""

    shape: str
    part: str
    by: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_mib: float | None = None
    tflops_forward: float | None = None
    tflops_backward: float | None = None
    share: float | None = None
    share_fastest: float | None = None
    bar: float | None = None
    eager_ms: float | None = None
    eager_share: float | None = None
    eager_bar: float | None = None
    parity: dict[str, list[float]] = field(default_factory=dict)
    limits: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Of each pass, where it was asked: `attention_limits.with_limits`."""
    note: str = ""

    @property
    def total_ms(self) -> float | None:
        return None if self.forward_ms is None else self.forward_ms + (self.backward_ms or 0.0)


def parse_shape(text: str) -> Shape:
    """`2048x8` (tokens x sequences), `32768x1xH64xG4xD128` or `32768x1xH64xG4xD192xV128`. ValueError for anything else."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:xH(\d+)xG(\d+)xD(\d+)(?:xV(\d+))?)?", text)
    if not match or not all(int(x) for x in match.groups() if x):
        raise ValueError(
            f"shape {text!r}: expected TOKENSxSEQUENCES, e.g. 2048x8, or 32768x1xH64xG4xD128, "
            "and xV128 after it for values of another width"
        )
    return Shape(*(int(x) for x in match.groups() if x))


def parse_shape_label(text: str) -> Shape:
    """What `str` makes of a shape. ValueError for anything else."""
    match = re.fullmatch(r"(\d+)x(\d+)(?: H(\d+) G(\d+) d(\d+)(?:/(\d+))?)?", text)
    if not match:
        raise ValueError(f"shape {text!r}: expected 2048x8, or 32768x1 H64 G4 d192/128")
    return Shape(*(int(x) for x in match.groups() if x))


def run_attention_bench(
    shapes: tuple[Shape, ...] | None = None,
    json_path: Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    nsa: NSAConfig | None = None,
    picture: Path | None = None,
    with_baselines: bool = True,
    parts: bool = False,
    console: Console | None = None,
) -> list[AttentionRow]:
    """Measure every part at every shape; print a table of each, and write JSON after each and a picture where asked.
    `parts`: a table of how near each part comes to what the device allows, too (`attention_limits`).

    Defaults: the GPU, bf16 and the four lengths of the project's bars, or a CPU, float32 and one tiny shape. Raises what
    `resolve_backend` raises for a backend that cannot run.
    """
    from nsa_lab.bench import roofline  # which knows rows and shapes

    nsa = nsa or NSAConfig()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    shapes = shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
    choices = resolve_backend(device, dtype, nsa, backend=backend)
    console = console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    rows: list[AttentionRow] = []
    rates = roofline.measure_rates(device, dtype) if parts else None
    report: dict[str, Any] = {
        **records.origin(records.device_name() if device.type == "cuda" else str(device), records.OPERATOR),
        "machine": describe_machine(device),
        "dtype": str(dtype),
        "nsa": nsa.model_dump(),
        "backend": {part: asdict(c) for part, c in choices.items()},
        **({"rates": asdict(rates)} if rates else {}),
    }
    for number, shape in enumerate(shapes, 1):
        found = _measure_shape(shape, nsa, choices, device, dtype, with_baselines)
        rows += found
        console.print(_make_table(found))
        if rates:
            told = roofline.add_limits(found, {str(shape): shape}, nsa, dtype.itemsize, rates)
            console.print(roofline.make_table(told, rates))
        if json_path:
            # After every shape: a bench that is broken off keeps those that it measured, and says which it did not.
            left = {"not_measured": [str(other) for other in shapes[number:]]} if number < len(shapes) else {}
            records.write(json_path, {**report, "rows": [asdict(row) for row in rows], **left})
    console.print(records.code_text(report))
    if picture:
        plot_times(rows, picture)
    return rows


def plot_times(rows: list[AttentionRow], path: Path) -> None:
    """Forward and backward of each contender, one panel per shape, as a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(1 + 4.5 * len(shapes), 6), squeeze=False)
    for ax, shape in zip(axes[0], shapes, strict=True):
        timed = [row for row in rows if row.shape == shape and row.total_ms is not None][::-1]
        names = [f"{row.part}: {row.by}" for row in timed]
        forward = [row.forward_ms for row in timed]
        ax.barh(names, forward, label="forward", color="#0072B2")
        ax.barh(names, [row.backward_ms or 0 for row in timed], left=forward, label="backward", color="#E69F00")
        # Linear: two parts of a bar can only be compared where lengths add.
        ax.set(title=shape, xlabel="time (ms)")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _measure_shape(shape: Shape, nsa: NSAConfig, choices, device, dtype, with_baselines: bool) -> list[AttentionRow]:
    rows = []
    if with_baselines:
        for name, run, inputs in peers.list_dense(shape, device, dtype):
            values = inputs[2].shape[-1]
            part = "dense" if values == shape.value_width else f"dense, values of {values}"
            rows.append(
                _time_baseline(AttentionRow(str(shape), part, name), run, inputs, _count_dense_flops(shape, values))
            )
    dense = {row.by: row.total_ms for row in rows if row.total_ms is not None}
    sizes = shape.H, shape.G, shape.D, nsa, choices, device, dtype
    short = make_parts(min(shape.T, 1024), 1, *sizes, Dv=shape.value_width)
    long = make_parts(shape.T, shape.B, *sizes, Dv=shape.value_width)
    for part_short, part in zip(short, long, strict=True):
        row = AttentionRow(str(shape), part.name, part.backend)
        row.parity, passed = parity.check_parity(part_short, part, nsa)
        if not passed:
            row.note = "FAILED PARITY: no speed"
        else:
            _time_passes(row, part.run, part.inputs, part.useful_flops)
            row.share, row.share_fastest = _compute_shares(row, dense)
        if part.name == "whole" and row.share is not None and row.total_ms is not None:
            row.bar, row.eager_bar = (bars.get((shape.T, shape.H)) for bars in (WHOLE_TARGETS, EAGER_TARGETS))
            row.eager_ms = time_eager_ms(_make_forward_backward(part.run, part.inputs), device)
            row.eager_share = None if row.eager_ms is None else row.share * row.eager_ms / row.total_ms
        rows.append(row)
    if with_baselines:
        for part, name, run, inputs in peers.list_branches(shape, nsa, device, dtype):
            rows.append(_time_baseline(AttentionRow(str(shape), part, name), run, inputs, _find_useful_flops(long, part)))
    return rows


def _time_baseline(row: AttentionRow, run: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> AttentionRow:
    """`_time` of what is not ours: a row that says why, where it does not run at this shape."""
    try:
        return _time_passes(row, run, inputs, flops)
    except RuntimeError as reason:  # torch's own errors, its compiler's among them, are such
        return AttentionRow(row.shape, row.part, row.by, note=describe_refusal(reason))


def _compute_shares(row: AttentionRow, dense: dict[str, float]) -> tuple[float | None, float | None]:
    """Of SDPA flash, which other measurements are told in, and of the fastest dense attention here; None without them."""
    if row.total_ms is None or not dense:
        return None, None
    flash = dense.get(BASELINE_KERNEL)
    return row.total_ms / flash if flash else None, row.total_ms / min(dense.values())


def _time_passes(row: AttentionRow, run: Callable[..., Tensor], inputs: list[Tensor], flops: float) -> AttentionRow:
    """Fill in the times of `run(*inputs)` and of its gradient for those inputs that want one."""
    wanting = [x for x in inputs if x.requires_grad]
    device = inputs[0].device
    row.forward_ms = time_ms(lambda: run(*inputs), device)
    if flops:
        row.tflops_forward = flops / row.forward_ms / 1e9
    if not wanting:
        return row
    both = _make_forward_backward(run, inputs)
    row.backward_ms = max(time_ms(both, device) - row.forward_ms, 0.0)
    if flops and row.backward_ms:
        row.tflops_backward = 2.5 * flops / row.backward_ms / 1e9
    peak = measure_peak_bytes(both, device)
    row.peak_mib = None if peak is None else peak / 2**20
    return row


def _make_forward_backward(run: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    """Forward and backward of `run`."""
    wanting, d_out = [x for x in inputs if x.requires_grad], torch.randn_like(run(*inputs))
    return lambda: torch.autograd.grad(run(*inputs), wanting, d_out)


def _count_dense_flops(shape: Shape, values: int) -> float:
    return 2 * (shape.D + values) * shape.H * shape.B * shape.T * (shape.T + 1) / 2


def _find_useful_flops(parts: list[Part], name: str) -> float:
    return next((p.useful_flops for p in parts if p.name == name), 0.0)


def describe_machine(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "not installed"
    return {
        "device": str(device),
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton_version,
    }


def _make_table(rows: list[AttentionRow]) -> Table:
    table = Table(title="NSA attention; ms, useful TFLOP/s, shares of dense attention, forward + backward")
    for name in (
        "shape",
        "part",
        "by",
        "parity (error/limit)",
        "forward",
        "backward",
        "fwd TF/s",
        "bwd TF/s",
        "peak MiB",
        "of flash",
        "bar",
        "of fastest",
        "eager, of flash",
    ):
        table.add_column(name, justify="left" if name in ("shape", "part", "by") else "right")
    for row in rows:
        worst = max(row.parity.items(), key=lambda kv: kv[1][0] / kv[1][1], default=None)
        checked = f"{worst[0]} {worst[1][0]:.1e}/{worst[1][1]:.1e}" if worst else ""
        table.add_row(
            row.shape,
            row.part,
            row.by,
            checked,
            row.note or format_number(row.forward_ms),
            format_number(row.backward_ms),
            format_number(row.tflops_forward),
            format_number(row.tflops_backward),
            format_number(row.peak_mib),
            format_number(row.share),
            format_number(row.bar),
            format_number(row.share_fastest),
            format_number(row.eager_share) + (f" ({row.eager_bar})" if row.eager_bar else ""),
            style="bold" if row.part == "whole" else None,
        )
    return table


def format_number(x: float | None) -> str:
    return "" if x is None else f"{x:.3f}" if x < 10 else f"{x:.1f}"
