"""Roofline: time of each part of attention as a fraction of the device limit, set by matmul FLOP/s or by memory bandwidth.

Work is the minimum that the definition requires: the (query, key) pairs that are read, never masked or padded ones; every
input read once and every result written once. A backward pass has five matrix products where the forward pass has two, and
also reads the gradient of the output. Additional work of a kernel (partial results, recomputed scores) separates it from
its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa_lab.attention import geometry
from nsa_lab.bench.attention_rows import AttentionRow, Shape, parse_record, parse_shape_label
from nsa_lab.bench.harness import RowColumn, format_number, make_table
from nsa_lab.bench.timing import get_memory_bytes_per_s, measure_matmul_flops_per_s
from nsa_lab.config import ConfigError, ModelConfig
from nsa_lab.runs.tables import Table

BACKWARD_FACTOR = 2.5  # FLOPs of the backward pass over FLOPs of the forward pass


class Work(NamedTuple):
    """FLOPs and bytes of one pass."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Rates:
    """FLOP/s of a large matrix product, and memory bandwidth in bytes per second (None: unknown)."""

    flops: float
    bytes: float | None

    def compute_min_ms(self, work: Work) -> tuple[float, str]:
        """Return the minimum time of the work in milliseconds, and what sets it: `arithmetic` or `memory`."""
        by_flops, by_bytes = work.flops / self.flops, work.bytes / self.bytes if self.bytes else 0.0
        return 1e3 * max(by_flops, by_bytes), "arithmetic" if by_flops >= by_bytes else "memory"


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the FLOP/s of a matrix product of `dtype`.

    On a GPU, compute the bandwidth from memory clock and bus width.
    """
    return Rates(measure_matmul_flops_per_s(device, dtype), get_memory_bytes_per_s(device))


def count_work(part: str, shape: Shape, model: ModelConfig, width: int) -> tuple[Work, Work | None]:
    """Return the forward and backward work of a part (an `AttentionRow.part`) in elements of `width` bytes.

    `model`: branches, scores and indexer; heads and widths are those of `shape`. Block selection ("choice") has no backward
    pass: None. Raises ValueError for an unknown part.
    """
    T, B, H, G, D, V = shape.T, shape.B, shape.H, shape.G, shape.D, shape.value_width
    nsa, n_branches = model.nsa, len(model.branches)
    N, reads = geometry.num_compressed(T, nsa), geometry.mean_reads(T, nsa)
    rows, pair = B * T * H, 2.0 * (D + V) * B * T * H
    q, out, lse, blocks = rows * D * width, rows * V * width, rows * 4, B * T * G * nsa.n_sel * 4
    raw, compressed = (B * n * G * (D + V) * width for n in (T, N))
    gates = rows * n_branches * width if n_branches > 1 else 0
    # Queries and keys that score the blocks, in channels per token and bytes.
    index_channels = G * model.indexer_heads * model.index_width if model.has_indexer else H * D
    index_q = B * T * index_channels * width
    index_k = {
        "indexer": B * geometry.num_compressed(T, model.selection_nsa) * model.index_groups * model.index_width * width,
        "compressed": B * N * G * D * width,
        "mean_key": B * T * G * D * width,
    }[model.scores or "compressed"]
    score = 2.0 * index_channels * B * T * geometry.mean_reads(T, model.selection_nsa)["cmp"]

    def attention(keys: float, kv: int, more: int = 0) -> tuple[Work, Work]:
        forward = Work(pair * keys, q + kv + more + out + lse)
        # Inputs, output, its LSE and its gradient; the gradients of the inputs.
        return forward, Work(BACKWARD_FACTOR * pair * keys, 2 * (q + kv) + more + 2 * out + lse)

    match "dense wide" if part.startswith("dense, values of") else part.split(",")[0]:
        case "dense":
            return attention(reads["dense"], raw)
        case "dense wide":
            return count_work("dense", replace(shape, V=int(part.rsplit(" ", 1)[1])), model, width)
        case "compressed":
            return attention(reads["cmp"], compressed)
        case "selected":
            return attention(reads["sel"], raw, blocks)
        case "window":
            return attention(reads["win"], raw)
        case "choice":
            return Work(score, index_q + index_k + (lse if model.scores == "compressed" else 0) + blocks), None
        case "selection loss":
            # Only the sampled queries have scores and attention; every query and index key has a gradient.
            share = min(model.selection_queries, T) / T
            attention_scores, k_sel = 2.0 * D * rows * reads["dense"], B * T * G * D * width
            forward = Work(share * (score + attention_scores), share * (index_q + q) + index_k + k_sel)
            return forward, Work(2 * share * score, (1 + share) * index_q + 2 * index_k)
        case "gate":
            return Work(0.0, (n_branches + 1) * out + gates), Work(0.0, (2 * n_branches + 1) * out + 2 * gates)
        case "whole":
            keys = sum(reads[branch] for branch in model.branches)
            n_sets = sum(branch != "cmp" for branch in model.branches)
            kv = (min(n_sets, 1) if model.shared_kv else n_sets) * raw + (compressed if "cmp" in model.branches else 0)
            selected = blocks if model.scores else 0
            backward = Work(BACKWARD_FACTOR * pair * keys, 2 * (q + kv + gates) + selected + 2 * out)
            # Block selection by the scores of the compressed branch: they count once.
            more = score if model.scores in ("indexer", "mean_key") else 0.0
            index = index_q + index_k if model.has_indexer else 0
            return Work(pair * keys + more, q + kv + gates + index + out), backward
        case other:
            raise ValueError(
                f"part {other!r}: expected dense, compressed, choice, selection loss, selected, window, gate or whole"
            )


def add_limits(
    rows: Sequence[AttentionRow], shapes: Mapping[str, Shape], model: ModelConfig, width: int, rates: Rates
) -> list[AttentionRow]:
    """Return the timed rows, after adding the minimum time and its fraction of the measured time for each pass.

    `shapes`: the shape of each `AttentionRow.shape`.
    """
    limited: list[AttentionRow] = []
    for row in rows:
        if row.forward_ms is None:
            continue
        for pass_name, work, measured_ms in zip(
            ("forward", "backward"),
            count_work(row.part, shapes[row.shape], model, width),
            (row.forward_ms, row.backward_ms),
            strict=True,
        ):
            if work is not None and measured_ms:
                min_ms, set_by = rates.compute_min_ms(work)
                row.limits[pass_name] = {
                    "flops": work.flops,
                    "bytes": work.bytes,
                    "least_ms": min_ms,
                    "share": min_ms / measured_ms,
                    "by": set_by,
                }
        limited.append(row)
    return limited


def _make_pass_columns(name: str) -> tuple[RowColumn, ...]:
    """Return the columns of a pass: measured time, minimum time, minimum / measured, and what sets the minimum."""

    def format_limit(text: str) -> Callable[[AttentionRow], str]:
        return lambda row: text.format(**row.limits[name]) if name in row.limits else ""

    minimum = RowColumn("minimum", lambda row: format_number(row.limits[name]["least_ms"]) if name in row.limits else "")
    share, set_by = RowColumn("share", format_limit("{share:.0%}")), RowColumn("set by", format_limit("{by}"), "left")
    return RowColumn(name, f"{name}_ms"), minimum, share, set_by


COLUMNS = (
    *(RowColumn(name, align="left") for name in ("shape", "part", "by")),
    *_make_pass_columns("forward"),
    *_make_pass_columns("backward"),
)


def make_limit_table(rows: Sequence[AttentionRow], rates: Rates) -> Table:
    """Return a table of the time of each part, its minimum and their ratio. A caption warns of ratios above 1."""
    bandwidth = f", {rates.bytes / 1e12:.1f} TB/s" if rates.bytes else ""
    title = f"Fraction of the device limit: {rates.flops / 1e12:.4g} TFLOP/s{bandwidth}"
    table = make_table(title, COLUMNS, rows, lambda row, rows: row.part == "whole")
    if any(limit["share"] > 1 for row in rows for limit in row.limits.values()):
        table.caption = "A share above 100%: the device is faster than the measured rates, so no share here is valid."
    return table


COLORS = {
    "compressed": "#0072B2",
    "choice": "#E69F00",
    "selection loss": "#56B4E9",
    "selected, real": "#009E73",
    "window": "#CC79A7",
    "whole": "#000000",
    "dense": "#999999",
}


def plot_roofline(rows: Sequence[AttentionRow], rates: Rates, title: str, path: Path) -> None:
    """Plot the roofline, one panel per shape: achieved FLOP/s of each pass against its FLOPs per byte, below both limits.

    Shows the parts with a parity check and every dense baseline. Raises ConfigError if the bandwidth is unknown.
    """
    from matplotlib.figure import Figure

    if not rates.bytes:
        raise ConfigError("a roofline needs the memory bandwidth, which is unknown for this device; give --bandwidth")
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = Figure(figsize=(1 + 3.4 * len(shapes), 5))
    axes = figure.subplots(1, len(shapes), squeeze=False, sharey=True)
    dense = list(dict.fromkeys(row.by for row in rows if row.part == "dense"))
    ends = [10.0, rates.flops / rates.bytes, 1e5]
    for ax, shape in zip(axes[0], shapes, strict=True):
        ax.plot(ends, [min(rates.flops, point * rates.bytes) / 1e12 for point in ends], color="#555555", lw=1)
        for row in (row for row in rows if row.shape == shape and row.part in COLORS):
            if row.part != "dense" and not row.parity:
                continue
            name = row.part if row.part != "dense" else f"dense, {row.by}"
            marker = "os^vD"[dense.index(row.by) + 1 if row.part == "dense" else 0]
            for pass_name, is_filled in (("forward", True), ("backward", False)):
                measured_ms, limit = getattr(row, f"{pass_name}_ms"), row.limits.get(pass_name)
                if limit and limit["flops"]:
                    face_color = COLORS[row.part] if is_filled else "none"
                    point = limit["flops"] / limit["bytes"], limit["flops"] / measured_ms / 1e9
                    label = f"{name}, {pass_name}"
                    ax.plot(*point, marker, color=COLORS[row.part], markerfacecolor=face_color, label=label, ms=7)
        ax.set(xscale="log", yscale="log", title=shape, xlabel="minimum FLOPs per byte", xlim=(ends[0], ends[-1]))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("TFLOP/s")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.suptitle(title, fontsize=10)
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8)
    figure.subplots_adjust(bottom=0.27, left=0.06, right=0.99)
    figure.savefig(path, dpi=100)


def read_rows(
    record: Mapping[str, Any], flops: float | None = None, bandwidth: float | None = None
) -> tuple[list[AttentionRow], Rates]:
    """Return the rows of a `bench attention` record with limits, and the rates used. Raises as `parse_record`."""
    rows, model, flops_per_s, bytes_per_s = parse_record(record, flops, bandwidth)
    width = getattr(torch, record["dtype"].removeprefix("torch.")).itemsize
    rates = Rates(flops_per_s, bytes_per_s)
    shapes = {row.shape: parse_shape_label(row.shape) for row in rows}
    try:
        return add_limits(rows, shapes, model, width, rates), rates
    except ValueError as error:
        raise ConfigError(f"expected a record of `nsa-lab bench attention`, got a row of {error}") from None
