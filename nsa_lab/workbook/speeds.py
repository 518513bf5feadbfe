"""Throughput of NSA and dense attention: of each part of attention, measured now or recorded, and of decoding."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from nsa_lab.bench.attention_rows import AttentionRow, Shape, parse_shape
from nsa_lab.bench.attention_speed import run_attention_bench
from nsa_lab.bench.decode_speed import time_models
from nsa_lab.config import ModelConfig, find_project_root
from nsa_lab.figures.benchmarks import ATTENTION_COLOURS, WHOLE, plot_attention_time, plot_decode_speed
from nsa_lab.workbook.display import show_figure, show_folded

# Each length doubles the previous one, at 16,384 tokens per batch up to 16,384, to bracket the crossover.
SHAPES = (Shape(1024, 16), Shape(2048, 8), Shape(4096, 4), Shape(8192, 2), Shape(16384, 1), Shape(32768, 1))
RECORD_PATH = Path("docs", "benchmarks", "attention-h200.json")  # relative to the project


def show_attention_speeds(shapes: Sequence[Shape] = SHAPES, *, measure: bool) -> None:
    """Show time per token against length, the length from which NSA is faster, and the table, folded.

    With `measure`, measure now on this machine's GPU; otherwise show the committed record, or print that there is none.
    """
    record = (find_project_root() or Path()) / RECORD_PATH
    if measure:
        rows, caption = run_attention_bench(tuple(shapes), console=Console(file=io.StringIO())), "measured now"
    elif record.is_file():
        rows, caption = read_record(record)
    else:
        print(f"no speeds: not measured on a CUDA device, and there is no record {RECORD_PATH}")
        return
    show_figure(plot_attention_time(build_curves(rows), caption))
    print(describe_crossover(rows))
    show_folded("All parts and implementations, in milliseconds", format_table(rows))


def show_decoding_speeds(config: ModelConfig, lengths: Sequence[int]) -> None:
    """Print and plot the decoding speed after each of `lengths` tokens, of a model of `config` and its dense baseline.

    Both are measured now on this machine's CPU cores.
    """
    rows = time_models(config, lengths)
    for row in rows:
        print(f"{row.tokens:>7,} tokens of context, {row.by:<5}: {row.ms:.1f} ms, {row.tokens_per_s:.0f} tokens/s")
    curves = {
        kind: [(row.tokens, speed) for row in rows if row.by == kind and (speed := row.tokens_per_s)]
        for kind in ("nsa", "dense")
    }
    show_figure(plot_decode_speed(curves, "tokens per second", f"{config.n_layers} layers, batch 1, this machine"))


def read_record(record: Path) -> tuple[list[AttentionRow], str]:
    """Read the rows of `nsa-lab bench attention --json`, and return them with the device and date."""
    report = json.loads(record.read_text(encoding="utf-8"))
    field_names = {field.name for field in fields(AttentionRow)}
    rows = [AttentionRow(**{name: value for name, value in row.items() if name in field_names}) for row in report["rows"]]
    return rows, f"{report['machine'].get('gpu', report['machine']['device'])}, {report['when'][:10]}"


def build_curves(rows: Sequence[AttentionRow]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return, for each plotted part and its implementation, (length in tokens, nanoseconds per token of both passes)."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.total_ms is not None and row.part in ATTENTION_COLOURS:
            shape = parse_shape(row.shape)
            curves.setdefault((row.part, row.by), []).append((shape.T, 1e6 * row.total_ms / (shape.T * shape.B)))
    return curves


def describe_crossover(rows: Sequence[AttentionRow]) -> str:
    """Return NSA's time as a fraction of each dense baseline, and the length from which NSA is faster than all of them."""
    times: dict[int, dict[tuple[str, str], float]] = {}
    for implementation, points in build_curves(rows).items():
        for length, ns in points:
            times.setdefault(length, {})[implementation] = ns
    lines, faster = [], []
    for length, durations in sorted(times.items()):
        dense = {by: ns for (part, by), ns in durations.items() if part == "dense"}
        nsa_ns = min((ns for (part, _), ns in durations.items() if part == WHOLE), default=None)
        if nsa_ns is not None and dense:
            lines.append(f"T = {length:>6,}: " + ", ".join(f"{nsa_ns / ns:.2f} of {by}" for by, ns in dense.items()))
            faster += [length] * (nsa_ns < min(dense.values()))
    if not lines:
        return "no comparison: the whole NSA operator or dense attention was not measured"
    conclusion = f"NSA is faster from T = {min(faster):,} on" if faster else "dense attention is faster at all of them"
    return "\n".join([*lines, f"of these lengths, {conclusion}"])


def format_table(rows: Sequence[AttentionRow]) -> str:
    """Format one line per implementation: milliseconds of both passes, peak memory, and time relative to SDPA flash."""
    lines = [f"{'shape':<9}{'part':<18}{'by':<14}{'forward':>9}{'backward':>10}{'peak MB':>10}{'share':>7}"]
    for row in rows:
        passes = f"{_format_number(row.forward_ms):>9}{_format_number(row.backward_ms):>10}"
        peak_mb = None if row.peak_mib is None else row.peak_mib * 2**20 / 1e6
        rest = f"{_format_number(peak_mb, 0):>10}{_format_number(row.share, 2):>7}"
        lines.append(f"{_format_shape(row.shape):<9}{row.part:<18}{row.by:<14}{passes}{rest}  {row.note}".rstrip())
    return "\n".join(lines)


def _format_number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _format_shape(recorded: str) -> str:
    """Format `2048x8`, as in records, as `2,048x8`."""
    length, _, batch = recorded.partition("x")
    return f"{int(length):,}x{batch}"
