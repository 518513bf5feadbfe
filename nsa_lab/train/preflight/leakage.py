"""Check that no document affects another document in the same packed row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span
from nsa_lab.data import Batch
from nsa_lab.train import checkpoint_state
from nsa_lab.train.build import TrainContext, force_eager
from nsa_lab.train.packing import take_share

# Large, finite, and of both signs: zero times it is zero, so only values that are read change the output.
POISON = 1e4


def make_probe_text(vocab_size: int, length: int) -> Tensor:
    """Return the tokens of the checkpoint probe, repeated, int64 [1, length]."""
    tokens = checkpoint_state.make_probe_input(vocab_size, length)
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length]


@torch.no_grad()
def measure_leakage(context: TrainContext) -> float:
    """Return the largest change of the logits of documents when another document is poisoned.

    Uses three documents with boundaries inside blocks. The middle one gets other tokens, to detect reads before the first
    layer, and in every layer its projections are replaced by large finite values. With several ranks, return the sum of
    their results. NaN if logits are not finite. Raises NotImplementedError if a backend does not support packed documents.
    Collective.
    """
    stage, vocab_size = context.config.train.longest_stage, context.config.model.vocab_size
    tokens = make_probe_text(vocab_size, stage.seq_len)
    bounds = [0, stage.seq_len // 3 + 1, 2 * stage.seq_len // 3 + 1, stage.seq_len]
    span = Span.packed(torch.tensor(bounds, dtype=torch.int32), capacity=4)
    is_middle = torch.zeros_like(tokens, dtype=torch.bool)
    is_middle[:, bounds[1] : bounds[2]] = True
    batches = [Batch(text, text) for text in (tokens, torch.where(is_middle, (tokens + 1) % vocab_size, tokens))]
    compute_logits = context.stepper.compute_logits
    with context.stepper.use_stage(stage), force_eager():
        reference = compute_logits(context.model, batches[0], span)
        own_is_middle = take_share(is_middle, reference.shard).to(context.device)
        with _poison_projections(context.model, own_is_middle):
            poisoned = compute_logits(context.model, batches[1], span)
    change = (reference.logits - poisoned.logits).abs().amax(-1).masked_fill(own_is_middle, 0.0).max()
    # torch's maximum is NaN if any element is.
    change = torch.where(reference.logits.isfinite().all(), change, math.nan)
    return context.world.all_reduce(change).item()


@contextmanager
def _poison_projections(model: nn.Module, rows: Tensor) -> Iterator[None]:
    """Replace the projections of `rows`, bool [1, T], in every layer by poison."""

    def poison(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        channels = torch.arange(output.shape[-1], device=output.device)
        return torch.where(rows[..., None], torch.where(channels % 2 == 0, POISON, -POISON).to(output.dtype), output)

    projections = [module for name, module in model.named_modules() if name.endswith("attention.qkv")]
    handles = [module.register_forward_hook(poison) for module in projections]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
