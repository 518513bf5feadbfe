"""Kernels of a run compiled before it starts: every stage's shapes, forward and backward, in parallel."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.data import Batch, Documents
from nsa_lab.model import NSATransformer
from nsa_lab.train.build import build_model
from nsa_lab.train.distributed import World
from nsa_lab.train.step import Stepper, make_optimizer


@dataclass(frozen=True)
class PrecompileResult:
    """What was compiled: kernels, and seconds for all of them together."""

    n_kernels: int
    seconds: float
    threads: int


def precompile_kernels(config: RunConfig, threads: int | None = None) -> PrecompileResult:
    """Compile the Triton kernels that training `config` launches, into Triton's cache on the disk.

    `threads`: how many compile at once; None: as many as there are cores. What torch.compile makes of the rest is not
    among them. Raises `ConfigError` where the run launches none: no GPU, a dense model, or another backend.
    """
    if not torch.cuda.is_available():
        raise ConfigError("nsa-lab warmup compiles kernels for the GPU of this machine, and torch sees none")
    one_layer = config.model_copy(update={"model": config.model.model_copy(update={"n_layers": 1})})
    model = build_model(one_layer, torch.device("cuda"))
    if all(choice.backend != "triton" for choice in model.backends.values()):
        raise ConfigError(f"{config.name} launches none of our Triton kernels: {model.describe(config.train.seq_len)}")

    # Optional: without Triton nothing above asks for its kernels.
    from nsa_lab.attention.kernels.parallel_compile import compile_in_parallel

    threads = threads or os.cpu_count() or 1
    started = time.perf_counter()
    kernels = compile_in_parallel(lambda: dry_run_stages(model, one_layer), threads)
    return PrecompileResult(kernels, time.perf_counter() - started, threads)


def dry_run_stages(model: NSATransformer, config: RunConfig) -> None:
    """What a step computes for each length and batch that the plan has, of zeros, without documents and with."""
    device, bf16 = next(model.parameters()).device, config.runtime.precision == "bf16"
    auxiliary = model.auxiliary_loss if config.model.has_selection_loss else None
    optimizer = make_optimizer(model, config.train)
    stepper = Stepper(
        model, model, optimizer, config.train, device=device, use_bf16=bf16, world=World(), auxiliary_loss=auxiliary
    )
    for stage in {(stage.sequences_per_forward, stage.seq_len): stage for stage in config.train.plan}.values():
        stepper.stage = stage
        tokens = torch.zeros(stage.sequences_per_forward, stage.seq_len, dtype=torch.int64)
        stepper.dry_run(Batch(tokens, tokens))
        if config.data.documents == "mask":
            rows = (torch.tensor([0, stage.seq_len], dtype=torch.int32),) * stage.sequences_per_forward
            stepper.dry_run(Batch(tokens, tokens, torch.ones(tokens.shape), Documents(rows)))
