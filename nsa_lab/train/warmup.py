"""Kernels of a run compiled before it starts: every stage's shapes, forward and backward, in parallel."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from nsa_lab.attention import Span
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.model import NSATransformer
from nsa_lab.train.parts import build_model


@dataclass(frozen=True)
class Warmed:
    """What was compiled: kernels, and seconds for all of them together."""

    kernels: int
    seconds: float
    threads: int


def warm_up(config: RunConfig, threads: int | None = None) -> Warmed:
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
    from nsa_lab.attention.kernels.ahead import compile_ahead

    threads = threads or os.cpu_count() or 1
    started = time.perf_counter()
    kernels = compile_ahead(lambda: every_stage(model, one_layer), threads)
    return Warmed(kernels, time.perf_counter() - started, threads)


def every_stage(model: NSATransformer, config: RunConfig) -> None:
    """A forward and a backward pass for each length and batch that the plan has, on zeros."""
    for batch, length in dict.fromkeys((stage.sequences_at_once, stage.seq_len) for stage in config.train.plan):
        tokens = torch.zeros(batch, length, dtype=torch.int64, device=next(model.parameters()).device)
        _pass(model, tokens, None, config)
        if config.data.documents == "mask":
            bounds = torch.arange(batch + 1, dtype=torch.int32) * length
            _pass(model, tokens.flatten()[None], Span.packed(bounds, capacity=batch, longest=length), config)


def _pass(model: NSATransformer, tokens: torch.Tensor, span: Span | None, config: RunConfig) -> None:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.runtime.precision == "bf16"):
        logits = model(tokens, span)
    (logits.float().sum() + model.auxiliary_loss()).backward()
    model.zero_grad(set_to_none=True)
