"""Whether anything of a document reaches another one in the same row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import TrainContext, force_eager

# Large, finite, and of either sign: zero times it is zero, so that what moves was read.
POISON = 1e4


@torch.no_grad()
def measure_leakage(context: TrainContext) -> float:
    """How far the logits of other documents move, at most, when one has other tokens, and what it computes is replaced by
    large finite values.

    Three documents, whose borders lie inside of blocks; in every layer, what the middle one projects is poisoned, which
    would show no tokens that are read before any layer. NaN where logits are not finite. Raises NotImplementedError if a
    backend does not take packed documents.
    """
    length = context.config.train.longest_stage.seq_len
    size = context.config.model.vocab_size
    tokens = (
        checkpoint_state.make_probe_input(size, length)
        .to(context.device)
        .repeat(1, -(-length // checkpoint_state.PROBE_TOKENS))[:, :length]
    )
    bounds = [0, length // 3 + 1, 2 * length // 3 + 1, length]
    span = Span.packed(torch.tensor(bounds, dtype=torch.int32), capacity=4)
    middle, changed = slice(bounds[1], bounds[2]), tokens.clone()
    changed[:, middle] = (tokens[:, middle] + 1) % size
    with force_eager(), context.stepper.autocast():
        before = context.model(tokens, span)
        with _poison_projections(context.model, middle):
            after = context.model(changed, span)
    others = [slice(bounds[0], bounds[1]), slice(bounds[2], bounds[3])]
    # One maximum, by torch: it is nan where any of them is.
    moved = torch.cat([(before[:, rows] - after[:, rows]).abs().flatten() for rows in others]).max().item()
    return moved if before.isfinite().all() else math.nan


@contextmanager
def _poison_projections(model: nn.Module, rows: slice) -> Iterator[None]:
    """Within, every layer's projections of these rows are poison."""

    def poison(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        wide = torch.arange(output.shape[-1], device=output.device)
        poisoned = output.clone()
        poisoned[:, rows] = torch.where(wide % 2 == 0, POISON, -POISON).to(output.dtype)
        return poisoned

    projections = [module for name, module in model.named_modules() if name.endswith("attention.qkv")]
    handles = [module.register_forward_hook(poison) for module in projections]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
