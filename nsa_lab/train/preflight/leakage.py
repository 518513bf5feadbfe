"""Check that no document affects another document in the same packed row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import TrainContext, force_eager

# Large, finite, and of both signs: zero times it is zero, so only values that are read change the output.
POISON = 1e4


@torch.no_grad()
def measure_leakage(context: TrainContext) -> float:
    """Return the largest change of the logits of documents when another document is poisoned.

    Uses three documents with boundaries inside blocks. The middle one gets other tokens, to detect reads before the first
    layer, and in every layer its projections are replaced by large finite values. NaN if logits are not finite. Raises
    NotImplementedError if a backend does not support packed documents.
    """
    length = context.config.train.longest_stage.seq_len
    vocab_size = context.config.model.vocab_size
    tokens = (
        checkpoint_state.make_probe_input(vocab_size, length)
        .to(context.device)
        .repeat(1, -(-length // checkpoint_state.PROBE_TOKENS))[:, :length]
    )
    bounds = [0, length // 3 + 1, 2 * length // 3 + 1, length]
    span = Span.packed(torch.tensor(bounds, dtype=torch.int32), capacity=4)
    middle, changed_tokens = slice(bounds[1], bounds[2]), tokens.clone()
    changed_tokens[:, middle] = (tokens[:, middle] + 1) % vocab_size
    with force_eager(), context.stepper.autocast():
        reference = context.model(tokens, span)
        with _poison_projections(context.model, middle):
            poisoned = context.model(changed_tokens, span)
    other_rows = [slice(bounds[0], bounds[1]), slice(bounds[2], bounds[3])]
    # torch's maximum is NaN if any element is.
    change = torch.cat([(reference[:, rows] - poisoned[:, rows]).abs().flatten() for rows in other_rows]).max().item()
    return change if reference.isfinite().all() else math.nan


@contextmanager
def _poison_projections(model: nn.Module, rows: slice) -> Iterator[None]:
    """Replace the projections of `rows` in every layer by poison."""

    def poison(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        channels = torch.arange(output.shape[-1], device=output.device)
        poisoned = output.clone()
        poisoned[:, rows] = torch.where(channels % 2 == 0, POISON, -POISON).to(output.dtype)
        return poisoned

    projections = [module for name, module in model.named_modules() if name.endswith("attention.qkv")]
    handles = [module.register_forward_hook(poison) for module in projections]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
