"""Loss curves of one configuration under different executions: compiled or eager, one backend or another, graph or not.

Same seed, same batches: the curves may differ by rounding alone. `BAND` says how far, and `run_curves` judges it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nsa_lab.bench import records
from nsa_lab.config import Backend, DataConfig, ModelConfig, NSAConfig, RunConfig, RuntimeConfig, TrainConfig
from nsa_lab.data import prepare
from nsa_lab.train.build import Builders, build_context
from nsa_lab.train.distributed import World
from nsa_lab.train.lr_schedule import compute_learning_rate
from nsa_lab.train.step import LOSS

# Nats by which two curves, each a mean over a tenth of the run, may differ: rounding of bf16 grows along a trajectory, and
# two runs that differ in nothing but the order of sums end this far apart, or less.
MAX_DIFFERENCE = 0.05
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MODEL = ModelConfig(
    dim=256, n_layers=4, n_heads=8, n_kv_groups=2, d_k=32, d_v=32, nsa=NSAConfig(l=32, d=16, l_sel=64, n_sel=4, w=128)
)


@dataclass(frozen=True)
class Execution:
    """How a curve is computed."""

    name: str
    backend: Backend
    compile: bool = False
    cuda_graph: bool = False


GPU_EXECUTIONS = (
    Execution("triton, eager", "triton"),
    Execution("triton, compiled", "triton", compile=True),
    Execution("triton, compiled, graph", "triton", compile=True, cuda_graph=True),
    Execution("torch, eager", "torch"),
    Execution("torch, compiled", "torch", compile=True),
)
CPU_EXECUTIONS = (Execution("reference, eager", "reference"), Execution("torch, eager", "torch"))


def compute_loss_curve(
    execution: Execution, steps: int, *, model: ModelConfig, seq_len: int, batch: int, device: Literal["cpu", "cuda"]
) -> list[float]:
    """The training loss of every step, in nats."""
    runtime = RuntimeConfig(
        device=device,
        precision="bf16" if device == "cuda" else "fp32",
        backend=execution.backend,
        compile=execution.compile,
        cuda_graph=execution.cuda_graph,
    )
    train = TrainConfig(
        steps=steps, seq_len=seq_len, batch_size=batch, lr=1e-3, warmup_steps=steps // 10, eval_every=0, save_every=0
    )
    config = RunConfig(name="curves", model=model, runtime=runtime, train=train, data=DataConfig())
    dataset = prepare(config.data, model.vocab_size, seq_len)
    parts = build_context(config, World(), torch.device(device), dataset, Builders())
    results = [
        parts.stepper.step(*parts.batches.batch(step - 1), compute_learning_rate(step, train), lambda: None)
        for step in range(1, steps + 1)
    ]
    losses = torch.stack(results)[:, LOSS].tolist()
    torch.compiler.reset()
    return losses


def run_curves(
    steps: int = 300,
    json_path: Path | None = None,
    picture: Path | None = None,
    *,
    model: ModelConfig = MODEL,
    seq_len: int = 512,
    batch: int = 8,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Every execution that this machine has; `apart` is the largest difference of two curves' means over a tenth."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    executions = GPU_EXECUTIONS if device == "cuda" else CPU_EXECUTIONS
    curves = {}
    for e in executions:
        begun = time.monotonic()
        curve = curves[e.name] = compute_loss_curve(e, steps, model=model, seq_len=seq_len, batch=batch, device=device)
        log(f"{e.name:<26} {curve[0]:.3f} to {curve[-1]:.3f} nats in {time.monotonic() - begun:.0f} s")
    tenths = {name: torch.tensor(curve)[: steps // 10 * 10].view(10, -1).mean(1) for name, curve in curves.items()}
    first = next(iter(tenths.values()))
    apart = {name: (means - first).abs().max().item() for name, means in tenths.items()}
    report = {
        **records.origin(records.device_name(), records.TRAINING),
        "steps": steps,
        "seq_len": seq_len,
        "batch": batch,
        "band_nats": MAX_DIFFERENCE,
        "apart_nats": apart,
        "ok": max(apart.values()) <= MAX_DIFFERENCE,
        "curves": curves,
    }
    if json_path:
        records.write(json_path, report, indent=None)
    if picture:
        plot_curves(report, picture)
    log(records.code_text(report))
    return report


def plot_curves(report: dict[str, Any], path: Path) -> None:
    """The curves, and beneath them how far each is from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    first = torch.tensor(next(iter(report["curves"].values())))
    for (name, curve), colour in zip(report["curves"].items(), COLORS, strict=False):
        losses.plot(curve, label=name, color=colour, linewidth=1)
        differences.plot(torch.tensor(curve) - first, color=colour, linewidth=1)
    losses.set(
        ylabel="loss (nats per byte)", title=f"one configuration, {len(report['curves'])} executions, {report['device']}"
    )
    differences.set(xlabel="optimiser step", ylabel="from the first (nats)")
    losses.legend()
    figure.savefig(path, dpi=150)
