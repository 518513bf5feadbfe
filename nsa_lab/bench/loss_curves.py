"""Loss curves of one configuration in different executions: compiled or eager, backends, with or without a CUDA graph.

All use the same seed and batches, so the curves may differ only by rounding. `MAX_DIFFERENCE` is the tolerance of
`run_curves`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nsa_lab.bench.harness import Output, Setup, describe_code, make_record
from nsa_lab.config import Backend, DataConfig, ModelConfig, NSAConfig, RunConfig, RuntimeConfig, TrainConfig
from nsa_lab.data import prepare
from nsa_lab.train.build import Builders, build_context
from nsa_lab.train.distributed import World
from nsa_lab.train.lr_schedule import compute_learning_rate
from nsa_lab.train.step import LOSS

# Tolerance in nats between two curves, each averaged over a tenth of the run. bf16 rounding errors grow along a trajectory;
# two runs that differ only in the order of sums end with at most this difference.
MAX_DIFFERENCE = 0.05
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MODEL = ModelConfig(
    dim=256, n_layers=4, n_heads=8, n_kv_groups=2, d_k=32, d_v=32, nsa=NSAConfig(l=32, d=16, l_sel=64, n_sel=4, w=128)
)


@dataclass(frozen=True)
class Execution:
    """Backend, compilation and CUDA graph of a curve."""

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
    """Return the training loss of every step in nats."""
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
    """Compute the curves of all executions on this machine and return the record; `log` receives one line per curve.

    `apart_nats`: the largest difference from the first curve, between means over a tenth of the run. `ok`: all differences
    are at most `MAX_DIFFERENCE`.
    """
    setup, output = Setup.resolve(), Output(json_path, picture)
    curves: dict[str, list[float]] = {}
    for execution in setup.select(gpu=GPU_EXECUTIONS, cpu=CPU_EXECUTIONS):
        start, name = time.monotonic(), execution.name
        device = "cuda" if setup.is_gpu else "cpu"
        curve = compute_loss_curve(execution, steps, model=model, seq_len=seq_len, batch=batch, device=device)
        curves[name] = curve
        log(f"{name:<26} {curve[0]:.3f} to {curve[-1]:.3f} nats in {time.monotonic() - start:.0f} s")
    tenths = {name: torch.tensor(curve)[: steps // 10 * 10].view(10, -1).mean(1) for name, curve in curves.items()}
    first = next(iter(tenths.values()))
    differences = {name: (means - first).abs().max().item() for name, means in tenths.items()}
    record = make_record(
        setup,
        steps=steps,
        seq_len=seq_len,
        batch=batch,
        band_nats=MAX_DIFFERENCE,
        apart_nats=differences,
        ok=max(differences.values()) <= MAX_DIFFERENCE,
        curves=curves,
    )
    output.write(record, indent=None)
    if picture:
        plot_curves(record, picture)
    log(describe_code(record))
    return record


def plot_curves(record: dict[str, Any], path: Path) -> None:
    """Plot the curves, and below them the difference of each from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    first = torch.tensor(next(iter(record["curves"].values())))
    for (name, curve), color in zip(record["curves"].items(), COLORS, strict=False):
        losses.plot(curve, label=name, color=color, linewidth=1)
        differences.plot(torch.tensor(curve) - first, color=color, linewidth=1)
    losses.set(
        ylabel="loss (nats per byte)", title=f"one configuration, {len(record['curves'])} executions, {record['device']}"
    )
    differences.set(xlabel="optimizer step", ylabel="difference (nats)")
    losses.legend()
    figure.savefig(path, dpi=150)
