"""Where a training step's time goes, part by part, beside the least that the arithmetic of each part would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from nsa_lab.attention import geometry
from nsa_lab.config import ModelConfig
from nsa_lab.figures.benchmarks import STEP_COLOURS, plot_step_time
from nsa_lab.train.estimate import build_meta_model
from nsa_lab.train.reference_throughput import load_reference_throughput
from nsa_lab.workbook.display import show_figure, show_folded

# FLOP/s that the floor of attention reckons with: what the best attention kernels of one H200 reach on useful work.
ATTENTION_RATE = 500e12
# Backward passes in forward passes: attention recomputes its scores, matrix products do not.
ATTENTION_BACKWARD, MATMUL_BACKWARD = 2.5, 2.0
BenchmarkReport = Mapping[str, Any]


def measure_step_time() -> dict[str, Any]:
    """The same as the record, measured now at the shortest and the longest of its lengths; about a minute."""
    from nsa_lab.bench.training_speed import run_train_bench

    return run_train_bench(((2048, 32), (65536, 1)))


def compute_floors(row: Mapping[str, Any], model: ModelConfig, gemm_rate: float) -> dict[str, dict[str, float]]:
    """Nanoseconds per token that the arithmetic of each part takes at least, for `nsa` and `dense`.

    Matrix products at `gemm_rate`, the FLOP/s that a large one reached in the same run; attention at `ATTENTION_RATE`,
    counting the keys that are read. Norms, gates, loss and optimiser have no floor here: fused into their neighbours they
    would take nothing.
    """
    pair = 2 * model.n_layers * model.n_heads * (model.d_k + model.d_v) * (1 + ATTENTION_BACKWARD) / ATTENTION_RATE
    scores = 2 * model.n_layers * model.n_heads * model.d_k / ATTENTION_RATE
    reads = geometry.mean_reads(row["seq_len"], model.nsa)

    def gemm(kind: str) -> float:
        built = build_meta_model(model.model_copy(update={"attention": kind}))
        return 2 * (built.parameter_count() - built.embedding_parameter_count()) * (1 + MATMUL_BACKWARD) / gemm_rate

    seconds = {
        "nsa": {
            "gemm": gemm("nsa"),
            **_compute_band_floors(row, pair * reads["cmp"], pair * reads["win"]),
            "selected": pair * reads["sel"],
            "block choice": scores * reads["cmp"],
        },
        "dense": {"gemm": gemm("dense"), "dense attention": pair * reads["dense"]},
    }
    return {kind: {part: 1e9 * value for part, value in parts.items()} for kind, parts in seconds.items()}


def _compute_band_floors(row: Mapping[str, Any], compressed: float, window: float) -> dict[str, float]:
    """Of the compressed and the window branch: their sum where the record joins them."""
    joined = "compressed and window"
    if joined in row.get("nsa", {}).get("breakdown", {}):
        return {joined: compressed + window}
    return {"compressed": compressed, "window": window}


def compute_part_times(row: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Nanoseconds per token of each part of a measured step, in the order of `COLOURS`."""
    token_ns = 1e9 / row[kind]["tokens_per_s"]
    share = row[kind]["breakdown"]
    total = sum(share.values())
    return {part: token_ns * share[part] / total for part in STEP_COLOURS if part in share}


def plot_report(report: BenchmarkReport) -> Figure:
    """Bars of nanoseconds per token at each length: NSA, its floor, the dense twin, its floor."""
    model = ModelConfig.model_validate(report["model"])
    panels = []
    for row in report["rows"]:
        if row["nsa"]["breakdown"]:
            least = compute_floors(row, model, report["gemm_flops_per_s"])
            bars = {
                "NSA": compute_part_times(row, "nsa"),
                "its\nfloor": least["nsa"],
                "dense": compute_part_times(row, "dense"),
                "its \nfloor": least["dense"],
            }
            panels.append((f"{row['seq_len']:,} x {row['micro_batch']}", bars))
    return plot_step_time(panels, f"A training step by part, on {report['device']}, {report['when'][:10]}")


def format_table(report: BenchmarkReport) -> str:
    """For NSA at each length: nanoseconds per token of each part, its floor, and how many floors it takes."""
    model = ModelConfig.model_validate(report["model"])
    lines = [f"{'T x sequences':<14}{'part':<24}{'ns per token':>13}{'floor':>8}{'ratio':>7}"]
    for row in report["rows"]:
        parts, least = (
            compute_part_times(row, "nsa"),
            compute_floors(row, model, report["gemm_flops_per_s"] or float("nan"))["nsa"],
        )
        for part, took in sorted(parts.items(), key=lambda item: -item[1]):
            floor = f"{least[part]:8.0f}{took / least[part]:7.1f}" if part in least else ""
            lines.append(f"{row['seq_len']:>6,} x {row['micro_batch']:<5}{part:<24}{took:>13,.0f}{floor}")
        lines.append(
            f"{'':<14}{'whole step':<24}{sum(parts.values()):>13,.0f}{sum(least.values()):8,.0f}"
            f"{sum(parts.values()) / sum(least.values()):7.1f}"
        )
    return "\n".join(lines)


def show_step_time(*, measure: bool) -> None:
    """The picture, then the table, folded: measured now on this machine's GPU, or of the record that ships with it."""
    report = measure_step_time() if measure else load_reference_throughput()
    show_figure(plot_report(report))
    show_folded("Every part, with its floor", format_table(report))
