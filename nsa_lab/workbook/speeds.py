"""Speeds of NSA beside dense attention: of its parts, now or as recorded, with the length from which NSA is the faster; and
of decoding."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from nsa_lab.bench.attention_speed import AttentionRow, Shape, parse_shape, run_attention_bench
from nsa_lab.bench.decode_speed import time_models
from nsa_lab.config import ModelConfig, find_project_root
from nsa_lab.figures.benchmarks import ATTENTION_COLOURS, WHOLE, plot_attention_time, plot_decode_speed
from nsa_lab.workbook.display import show_figure, show_folded

# One length a step, 16,384 tokens each up to there: where the crossover lies shows between them.
SHAPES = (Shape(1024, 16), Shape(2048, 8), Shape(4096, 4), Shape(8192, 2), Shape(16384, 1), Shape(32768, 1))
RECORD_PATH = Path("docs", "benchmarks", "attention-h200.json")  # in the project's folder


def show_attention_speeds(shapes: Sequence[Shape] = SHAPES, *, measure: bool) -> None:
    """Time per token over length as a picture, from where NSA is the faster, and the table, folded.

    Measured now on this machine's GPU, or of the record that is committed. Without one it says so.
    """
    record = (find_project_root() or Path()) / RECORD_PATH
    if measure:
        rows, about = run_attention_bench(tuple(shapes), console=Console(file=io.StringIO())), "measured now"
    elif record.is_file():
        rows, about = read_record(record)
    else:
        print(f"no speeds: no CUDA device is measured, and there is no record {RECORD_PATH}")
        return
    show_figure(plot_attention_time(build_curves(rows), about))
    print(describe_crossover(rows))
    show_folded("Every part and contender, in milliseconds", format_table(rows))


def show_decoding_speeds(config: ModelConfig, lengths: Sequence[int]) -> None:
    """Tokens per second after each of `lengths` tokens, of a model of `config` and of its dense twin, measured now on this
    machine's cores; a line each, then the picture."""
    timed = time_models(config, lengths)
    for row in timed:
        print(f"{row.tokens:>7,} tokens before, {row.by:<5}: {row.ms:.1f} ms, {row.tokens_per_s:.0f} tokens/s")
    curves = {
        kind: [(row.tokens, speed) for row in timed if row.by == kind and (speed := row.tokens_per_s)]
        for kind in ("nsa", "dense")
    }
    show_figure(plot_decode_speed(curves, "tokens per second", f"{config.n_layers} layers, batch 1, this machine"))


def read_record(record: Path) -> tuple[list[AttentionRow], str]:
    """The rows that `nsa-lab bench attention --json` wrote, and of which device and day they are."""
    report = json.loads(record.read_text(encoding="utf-8"))
    known = {field.name for field in fields(AttentionRow)}
    rows = [AttentionRow(**{name: value for name, value in row.items() if name in known}) for row in report["rows"]]
    return rows, f"{report['machine'].get('gpu', report['machine']['device'])}, {report['when'][:10]}"


def build_curves(rows: Sequence[AttentionRow]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """For each part that is drawn and what computed it: lengths in tokens with nanoseconds per token, both passes."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.total_ms is not None and row.part in ATTENTION_COLOURS:
            shape = parse_shape(row.shape)
            curves.setdefault((row.part, row.by), []).append((shape.T, 1e6 * row.total_ms / (shape.T * shape.B)))
    return curves


def describe_crossover(rows: Sequence[AttentionRow]) -> str:
    """What the whole of NSA takes as a share of each dense attention, and from which length it is faster than them all."""
    times: dict[int, dict[tuple[str, str], float]] = {}
    for contender, points in build_curves(rows).items():
        for length, ns in points:
            times.setdefault(length, {})[contender] = ns
    lines, faster = [], []
    for length, taken in sorted(times.items()):
        dense = {by: ns for (part, by), ns in taken.items() if part == "dense"}
        whole = min((ns for (part, _), ns in taken.items() if part == WHOLE), default=None)
        if whole is not None and dense:
            lines.append(f"T = {length:>6,}: " + ", ".join(f"{whole / ns:.2f} of {by}" for by, ns in dense.items()))
            faster += [length] * (whole < min(dense.values()))
    if not lines:
        return "nothing to compare: the whole of NSA or dense attention was not measured"
    said = f"NSA is the faster from T = {min(faster):,} on" if faster else "dense attention is the faster throughout"
    return "\n".join([*lines, f"of these lengths, {said}"])


def format_table(rows: Sequence[AttentionRow]) -> str:
    """A line per contender: milliseconds of both passes, the peak in MB, and the share of SDPA flash."""
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
    """`2048x8`, as records name it, as `2,048x8`."""
    length, _, batch = recorded.partition("x")
    return f"{int(length):,}x{batch}"
