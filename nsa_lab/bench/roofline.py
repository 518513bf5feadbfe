"""How near each part of attention comes to what the device allows: its arithmetic at the rate of a large matrix product,
its bytes at that of the memory.

Counted is the least that the definition asks for: pairs of query and key that are read, never masked or padded ones; every
input read once and every result written once. A backward pass forms five products where the forward pass forms two, and
reads the output's gradient beside the inputs. What a kernel does besides (partial results, scores once more) is what keeps
it from its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from nsa_lab.attention import geometry
from nsa_lab.bench.attention_speed import AttentionRow, Shape, format_number
from nsa_lab.config import ConfigError, NSAConfig

BACKWARD_FACTOR = 2.5  # products of the backward pass over those of the forward pass


class Work(NamedTuple):
    """FLOPs and bytes of one pass."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Rates:
    """FLOP/s of a large matrix product, and bytes per second of the memory; None where it is not known."""

    flops: float
    bytes: float | None

    def compute_min_ms(self, work: Work) -> tuple[float, str]:
        """Milliseconds that the work takes at least, and what sets them: `arithmetic` or `memory`."""
        by_flops, by_bytes = work.flops / self.flops, work.bytes / self.bytes if self.bytes else 0.0
        return 1e3 * max(by_flops, by_bytes), "arithmetic" if by_flops >= by_bytes else "memory"


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured: a product of two matrices of `dtype`; on a GPU, the memory's by its clock and the width of its bus."""
    from nsa_lab.bench.timing import get_memory_bytes_per_s, measure_matmul_flops_per_s

    return Rates(measure_matmul_flops_per_s(device, dtype), get_memory_bytes_per_s(device))


def count_work(part: str, shape: Shape, nsa: NSAConfig, width: int) -> tuple[Work, Work | None]:
    """Forward and backward work of a part, as `Row.part` names it, in elements of `width` bytes; no backward of a choice.

    ValueError for a part that there is not.
    """
    T, B, H, G, D, V = shape.T, shape.B, shape.H, shape.G, shape.D, shape.value_width
    N, reads = geometry.num_compressed(T, nsa), geometry.mean_reads(T, nsa)
    rows, pair = B * T * H, 2.0 * (D + V) * B * T * H
    q, out, lse, blocks = rows * D * width, rows * V * width, rows * 4, B * T * G * nsa.n_sel * 4
    raw, compressed = (B * n * G * (D + V) * width for n in (T, N))
    gates, score = rows * 3 * width, 2.0 * D * rows * reads["cmp"]

    def attention(keys: float, kv: int, more: int = 0) -> tuple[Work, Work]:
        forward = Work(pair * keys, q + kv + more + out + lse)
        # Inputs, output, its LSE and its gradient; the gradients of the inputs.
        return forward, Work(BACKWARD_FACTOR * pair * keys, 2 * (q + kv) + more + 2 * out + lse)

    match "dense wide" if part.startswith("dense, values of") else part.split(",")[0]:
        case "dense":
            return attention(reads["dense"], raw)
        case "dense wide":
            return count_work("dense", replace(shape, V=int(part.rsplit(" ", 1)[1])), nsa, width)
        case "compressed":
            return attention(reads["cmp"], compressed)
        case "selected":
            return attention(reads["sel"], raw, blocks)
        case "window":
            return attention(reads["win"], raw)
        case "choice":
            return Work(score, q + B * N * G * D * width + lse + blocks), None
        case "gate":
            return Work(0.0, 4 * out + gates), Work(0.0, 7 * out + 2 * gates)
        case "whole":
            keys, kv = reads["cmp"] + reads["sel"] + reads["win"], compressed + 2 * raw
            # The choice is made by the compressed branch's scores: they count once.
            backward = Work(BACKWARD_FACTOR * pair * keys, 2 * (q + kv + gates) + blocks + 2 * out)
            return Work(pair * keys, q + kv + gates + out), backward
        case other:
            raise ValueError(f"part {other!r}: expected dense, compressed, choice, selected, window, gate or whole")


def add_limits(
    rows: Sequence[AttentionRow], shapes: Mapping[str, Shape], nsa: NSAConfig, width: int, rates: Rates
) -> list[AttentionRow]:
    """Of `rows`, those that were timed, with the least time and the share of each pass; by `shapes` of their names."""
    told: list[AttentionRow] = []
    for row in rows:
        if row.forward_ms is None:
            continue
        for way, work, took in zip(
            ("forward", "backward"),
            count_work(row.part, shapes[row.shape], nsa, width),
            (row.forward_ms, row.backward_ms),
            strict=True,
        ):
            if work is not None and took:
                least, by = rates.compute_min_ms(work)
                row.limits[way] = {
                    "flops": work.flops,
                    "bytes": work.bytes,
                    "least_ms": least,
                    "share": least / took,
                    "by": by,
                }
        told.append(row)
    return told


def make_table(rows: Sequence[AttentionRow], rates: Rates) -> Table:
    """Each part's time, the least that it could take, and what share of the limit that is. Says so where a share is above
    one: then the rates are too low."""
    memory = f", {rates.bytes / 1e12:.1f} TB/s" if rates.bytes else ""
    found = Table(title=f"Share of what the device allows: {rates.flops / 1e12:.4g} TFLOP/s{memory}")
    columns = ("shape", "part", "by", "forward", "least", "share", "set by", "backward", "least", "share", "set by")
    for place, name in enumerate(columns):
        found.add_column(name, justify="left" if place < 3 or name == "set by" else "right")
    for row in rows:
        cells = [row.shape, row.part, row.by]
        for way, took in (("forward", row.forward_ms), ("backward", row.backward_ms)):
            limit = row.limits.get(way)
            cells += [format_number(took)] + (
                [format_number(limit["least_ms"]), f"{limit['share']:.0%}", limit["by"]] if limit else [""] * 3
            )
        found.add_row(*cells, style="bold" if row.part == "whole" else None)
    if any(limit["share"] > 1 for row in rows for limit in row.limits.values()):
        found.caption = "A share above 100 %: the device allows more than was measured; no share here is to be believed."
    return found


COLORS = {
    "compressed": "#0072B2",
    "choice": "#E69F00",
    "selected, real": "#009E73",
    "window": "#CC79A7",
    "whole": "#000000",
    "dense": "#999999",
}


def plot_roofline(rows: Sequence[AttentionRow], rates: Rates, about: str, path: Path) -> None:
    """The roofline, one panel per shape: FLOP/s that each pass reaches against its FLOPs per byte, under the two limits.

    Parts that were held against the definition, and every dense attention. ConfigError without a rate of the memory.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not rates.bytes:
        raise ConfigError("a roofline takes the rate of the memory, and none is known of this device; give --bandwidth")
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(1 + 3.4 * len(shapes), 5), squeeze=False, sharey=True)
    dense = list(dict.fromkeys(row.by for row in rows if row.part == "dense"))
    ends = [10.0, rates.flops / rates.bytes, 1e5]
    for ax, shape in zip(axes[0], shapes, strict=True):
        ax.plot(ends, [min(rates.flops, at * rates.bytes) / 1e12 for at in ends], color="#555555", lw=1)
        for row in (row for row in rows if row.shape == shape and row.part in COLORS):
            if row.part != "dense" and not row.parity:
                continue
            name = row.part if row.part != "dense" else f"dense, {row.by}"
            form = "os^vD"[dense.index(row.by) + 1 if row.part == "dense" else 0]
            for way, filled in (("forward", True), ("backward", False)):
                took, limit = getattr(row, f"{way}_ms"), row.limits.get(way)
                if limit and limit["flops"]:
                    fill = COLORS[row.part] if filled else "none"
                    at = limit["flops"] / limit["bytes"], limit["flops"] / took / 1e9
                    ax.plot(*at, form, color=COLORS[row.part], markerfacecolor=fill, label=f"{name}, {way}", ms=7)
        ax.set(xscale="log", yscale="log", title=shape, xlabel="FLOPs per byte, at least", xlim=(ends[0], ends[-1]))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("TFLOP/s")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.suptitle(about, fontsize=10)
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8)
    figure.subplots_adjust(bottom=0.27, left=0.06, right=0.99)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def read_rows(
    record: Mapping[str, Any], flops: float | None = None, bandwidth: float | None = None
) -> tuple[list[AttentionRow], Rates]:
    """The rows of a record of `bench attention`, with their limits, and the rates they are told of: those given, else the
    record's own. ConfigError where there is no rate of arithmetic, or the record is of something else."""
    from nsa_lab.bench.attention_speed import parse_shape_label

    try:
        rows = [AttentionRow(**{key: value for key, value in row.items() if key != "limits"}) for row in record["rows"]]
        nsa, width = (
            NSAConfig.model_validate(record["nsa"]),
            getattr(torch, record["dtype"].removeprefix("torch.")).itemsize,
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"expected a record of `nsa-lab bench attention`, and this one has no such field: {error}"
        ) from None
    own: dict[str, float | None] = record.get("rates", {})
    arithmetic = flops or own.get("flops")
    if arithmetic is None:
        raise ConfigError(
            "the record does not say what its device allows: measure it again with --parts, or give --flops and --bandwidth"
        )
    known = Rates(arithmetic, bandwidth or own.get("bytes"))
    shapes = {row.shape: parse_shape_label(row.shape) for row in rows}
    return add_limits(rows, shapes, nsa, width, known), known
