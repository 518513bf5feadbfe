"""Where a training step's time goes, part by part, beside the least that the arithmetic of each part would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from nsa_lab.attention import geometry
from nsa_lab.config import ModelConfig
from nsa_lab.figures.step_time import COLOURS, step_by_part
from nsa_lab.train.measured import recorded
from nsa_lab.train.plan import shape_of
from nsa_lab.workbook.show import fold, show

# FLOP/s that the floor of attention reckons with: what the best attention kernels of one H200 reach on useful work.
ATTENTION_RATE = 500e12
# Backward passes in forward passes: attention recomputes its scores, matrix products do not.
ATTENTION_BACKWARD, MATMUL_BACKWARD = 2.5, 2.0
Report = Mapping[str, Any]


def measured() -> dict[str, Any]:
    """The same as the record, measured now at the shortest and the longest of its lengths; about a minute."""
    from nsa_lab.bench.train import run_train_bench

    return run_train_bench(((2048, 32), (65536, 1)))


def floors(row: Mapping[str, Any], model: ModelConfig, gemm_rate: float) -> dict[str, dict[str, float]]:
    """Nanoseconds per token that the arithmetic of each part takes at least, for `nsa` and `dense`.

    Matrix products at `gemm_rate`, the FLOP/s that a large one reached in the same run; attention at `ATTENTION_RATE`,
    counting the keys that are read. Norms, gates, loss and optimiser have no floor here: fused into their neighbours they
    would take nothing.
    """
    pair = 2 * model.n_layers * model.n_heads * (model.d_k + model.d_v) * (1 + ATTENTION_BACKWARD) / ATTENTION_RATE
    scores = 2 * model.n_layers * model.n_heads * model.d_k / ATTENTION_RATE
    reads = geometry.mean_reads(row["seq_len"], model.nsa)

    def gemm(kind: str) -> float:
        built = shape_of(model.model_copy(update={"attention": kind}))
        return 2 * (built.parameter_count() - built.looked_up_count()) * (1 + MATMUL_BACKWARD) / gemm_rate

    seconds = {
        "nsa": {
            "gemm": gemm("nsa"),
            **_band_floors(row, pair * reads["cmp"], pair * reads["win"]),
            "selected": pair * reads["sel"],
            "block choice": scores * reads["cmp"],
        },
        "dense": {"gemm": gemm("dense"), "dense attention": pair * reads["dense"]},
    }
    return {kind: {part: 1e9 * value for part, value in parts.items()} for kind, parts in seconds.items()}


def _band_floors(row: Mapping[str, Any], compressed: float, window: float) -> dict[str, float]:
    """Of the compressed and the window branch: their sum where the record joins them."""
    joined = "compressed and window"
    if joined in row.get("nsa", {}).get("breakdown", {}):
        return {joined: compressed + window}
    return {"compressed": compressed, "window": window}


def by_part(row: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Nanoseconds per token of each part of a measured step, in the order of `COLOURS`."""
    token_ns = 1e9 / row[kind]["tokens_per_s"]
    share = row[kind]["breakdown"]
    total = sum(share.values())
    return {part: token_ns * share[part] / total for part in COLOURS if part in share}


def picture(report: Report) -> Figure:
    """Bars of nanoseconds per token at each length: NSA, its floor, the dense twin, its floor."""
    model = ModelConfig.model_validate(report["model"])
    panels = []
    for row in report["rows"]:
        if row["nsa"]["breakdown"]:
            least = floors(row, model, report["gemm_flops_per_s"])
            bars = {
                "NSA": by_part(row, "nsa"),
                "its\nfloor": least["nsa"],
                "dense": by_part(row, "dense"),
                "its \nfloor": least["dense"],
            }
            panels.append((f"{row['seq_len']:,} x {row['micro_batch']}", bars))
    return step_by_part(panels, f"A training step by part, on {report['device']}, {report['when'][:10]}")


def table(report: Report) -> str:
    """For NSA at each length: nanoseconds per token of each part, its floor, and how many floors it takes."""
    model = ModelConfig.model_validate(report["model"])
    lines = [f"{'T x sequences':<14}{'part':<24}{'ns per token':>13}{'floor':>8}{'ratio':>7}"]
    for row in report["rows"]:
        parts, least = by_part(row, "nsa"), floors(row, model, report["gemm_flops_per_s"] or float("nan"))["nsa"]
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
    report = measured() if measure else recorded()
    show(picture(report))
    fold("Every part, with its floor", table(report))
