"""Time of a training step by part, compared with the minimum time of its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from nsa_lab.attention import geometry
from nsa_lab.config import ModelConfig
from nsa_lab.figures.benchmarks import STEP_COLOURS, plot_step_time
from nsa_lab.train.estimate import build_meta_model, load_reference_throughput
from nsa_lab.workbook.display import show_figure, show_folded

# FLOP/s of the attention floor: the useful work of the best attention kernels on one H200.
ATTENTION_RATE = 500e12
# Cost of the backward pass relative to forward. Attention recomputes its scores, matrix products do not.
ATTENTION_BACKWARD, MATMUL_BACKWARD = 2.5, 2.0
BenchmarkReport = Mapping[str, Any]


def measure_step_time() -> dict[str, Any]:
    """Measure the record now, at its shortest and longest length. This takes about a minute."""
    from nsa_lab.bench.training_speed import run_train_bench

    return run_train_bench(((2048, 32), (65536, 1)))


def compute_floors(row: Mapping[str, Any], model: ModelConfig, gemm_rate: float) -> dict[str, dict[str, float]]:
    """Return the minimum nanoseconds per token of the arithmetic of each part, for `nsa` and `dense`.

    Matrix products run at `gemm_rate`, the FLOP/s that a large one reached in the same run. Attention runs at
    `ATTENTION_RATE`, counting the keys that are read. Norms, gates, loss and optimizer have no floor here, because they
    could be fused into their neighbors.
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
    """Return the floors of the compressed and the window branch, or their sum if the record combines them."""
    joined = "compressed and window"
    if joined in row.get("nsa", {}).get("breakdown", {}):
        return {joined: compressed + window}
    return {"compressed": compressed, "window": window}


def compute_part_times(row: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Return the nanoseconds per token of each part of a measured step, in the order of `STEP_COLOURS`."""
    token_ns = 1e9 / row[kind]["tokens_per_s"]
    share = row[kind]["breakdown"]
    total = sum(share.values())
    return {part: token_ns * share[part] / total for part in STEP_COLOURS if part in share}


def plot_report(report: BenchmarkReport) -> Figure:
    """Plot the nanoseconds per token at each length: NSA, its floor, the dense baseline, its floor."""
    model = ModelConfig.model_validate(report["model"])
    panels = []
    for row in report["rows"]:
        if row["nsa"]["breakdown"]:
            floors = compute_floors(row, model, report["gemm_flops_per_s"])
            bars = {
                "NSA": compute_part_times(row, "nsa"),
                "NSA floor": floors["nsa"],
                "dense": compute_part_times(row, "dense"),
                "dense floor": floors["dense"],
            }
            panels.append((f"{row['seq_len']:,} x {row['micro_batch']}", bars))
    return plot_step_time(panels, f"Training step by part, {report['device']}, {report['when'][:10]}")


def format_table(report: BenchmarkReport) -> str:
    """Format NSA's parts at each length: nanoseconds per token, the floor, and the ratio."""
    model = ModelConfig.model_validate(report["model"])
    lines = [f"{'T x sequences':<14}{'part':<24}{'ns per token':>13}{'floor':>8}{'ratio':>7}"]
    for row in report["rows"]:
        parts, floors = (
            compute_part_times(row, "nsa"),
            compute_floors(row, model, report["gemm_flops_per_s"] or float("nan"))["nsa"],
        )
        for part, measured_ns in sorted(parts.items(), key=lambda item: -item[1]):
            floor = f"{floors[part]:8.0f}{measured_ns / floors[part]:7.1f}" if part in floors else ""
            lines.append(f"{row['seq_len']:>6,} x {row['micro_batch']:<5}{part:<24}{measured_ns:>13,.0f}{floor}")
        lines.append(
            f"{'':<14}{'whole step':<24}{sum(parts.values()):>13,.0f}{sum(floors.values()):8,.0f}"
            f"{sum(parts.values()) / sum(floors.values()):7.1f}"
        )
    return "\n".join(lines)


def show_step_time(*, measure: bool) -> None:
    """Show the plot and the folded table: measured now on this machine's GPU, or the record that ships with the package."""
    report = measure_step_time() if measure else load_reference_throughput()
    show_figure(plot_report(report))
    show_folded("All parts with their floors", format_table(report))
