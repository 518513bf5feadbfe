"""Looking at a model without touching its training: held-out loss, statistics of the layers, probe, norms."""

from __future__ import annotations

import contextlib
import functools
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nsa_lab.config import BYTE_VOCAB_SIZE
from nsa_lab.data import Batch, EvalBatches
from nsa_lab.evaluate.selection_benefit import SelectionBenefit, measure_selection_benefit
from nsa_lab.train.build import TrainContext, force_eager
from nsa_lab.train.checkpoint_state import make_probe_input
from nsa_lab.train.packing import compute_logits, make_span
from nsa_lab.train.step import compute_token_losses, sum_masked, sum_token_losses

STATISTICS_SEQUENCES = 2
MAX_NEEDLE_TEXT_TOKENS = 1 << 20  # tokens of held-out text that needles are drawn from
MAX_XZ_TEXT_BYTES = 1 << 20  # bytes of held-out text that are compressed: a third of a second


@dataclass(frozen=True)
class EvaluationResult:
    """Mean losses in nats per token: of everything; of the first tokens of documents, None where none are told apart; and
    of each window in order, to six digits, which is what runs are compared by."""

    loss: float
    first_token_loss: float | None
    window_losses: list[float]


def evaluate_loss(context: TrainContext, held_out: EvalBatches, poll: Callable[[], None]) -> float:
    """Mean loss in nats per token over fixed held-out batches. `poll` is called before each batch and may raise."""
    return evaluate_held_out(context, held_out, poll).loss


@torch.no_grad()
def evaluate_held_out(context: TrainContext, held_out: EvalBatches, poll: Callable[[], None]) -> EvaluationResult:
    """`evaluate`, and the same of the first token of every document, and of each window."""
    # A place for each batch: added up in their order, whichever rank computed them.
    found = torch.zeros(len(held_out), 4, device=context.device)
    windows = torch.zeros(held_out.n_windows, device=context.device)
    with _eval_mode(context.model):
        for read in _evaluate_batches(context, held_out, _assign_batches(len(held_out), context), poll):
            each, own = compute_token_losses(read.logits, read.targets), held_out.get_window_range(read.index)
            found[read.index] += read.weight * _sum_losses(read, each)
            windows[own.start : own.stop] += read.weight * each.mean(1)
    loss, tokens, first, firsts = functools.reduce(torch.add, context.world.all_reduce(found)).tolist()
    by_window = [round(loss, 6) for loss in context.world.all_reduce(windows).tolist()]
    return EvaluationResult(loss / tokens, first / firsts if firsts else None, by_window)


@torch.no_grad()
def dry_run_evaluation(context: TrainContext, held_out: EvalBatches) -> None:
    """The first batch and the last, which may be smaller: what an evaluation compiles is there afterwards.

    Every rank must ask.
    """
    ends = [(index, 0.0) for index in sorted({0, len(held_out) - 1})]
    with _eval_mode(context.model):
        for _ in _evaluate_batches(context, held_out, ends, lambda: None):
            pass


@dataclass(frozen=True)
class _EvaluatedBatch:
    """One of this rank's held-out batches, computed as in training; `begins`: first tokens of documents told apart."""

    index: int
    weight: float
    logits: Tensor
    targets: Tensor
    is_document_start: Tensor | None


def _sum_losses(batch: _EvaluatedBatch, losses: Tensor) -> Tensor:
    """Summed loss and number of tokens of a batch, and of the first tokens of its documents: float32 [4].

    `each` is the loss of every token. The whole is summed by the loss function itself, as in training: another order of
    adding gives other last bits.
    """
    loss = sum_token_losses(batch.logits, batch.targets)
    total = torch.stack([loss, loss.new_tensor(float(batch.targets.numel()))])
    if batch.is_document_start is None:
        return torch.cat([total, torch.zeros_like(total)])
    return torch.cat([total, sum_masked(losses, batch.is_document_start)])


def _evaluate_batches(
    context: TrainContext, held_out: EvalBatches, batches: Sequence[tuple[int, float]], poll: Callable[[], None]
) -> Iterator[_EvaluatedBatch]:
    for index, weight in batches:
        poll()
        tokens, wanted = held_out[index]
        documents = held_out.find_documents(tokens)
        inputs, targets = tokens.to(context.device), wanted.to(context.device)
        with context.stepper.autocast():
            logits = compute_logits(context.model, inputs, make_span(documents))
        begins = None if documents is None else inputs == context.dataset.tokenizer.separator
        yield _EvaluatedBatch(index, weight, logits, targets, begins)


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _assign_batches(n_batches: int, context: TrainContext) -> list[tuple[int, float]]:
    """This rank's batches and their weights: as many on every rank, so that collectives inside a model match."""
    world = context.world
    rounds = -(-n_batches // world.size)
    mine = [turn * world.size + world.rank for turn in range(rounds)]
    return [(index, 1.0) if index < n_batches else (0, 0.0) for index in mine]


def compute_probe_logits(context: TrainContext) -> Tensor:
    """float32 logits `[1, t, V]` of a fixed input, on the CPU, computed without compilation."""
    tokens = make_probe_input(context.config.model.vocab_size, context.config.train.longest_stage.seq_len).to(
        context.device
    )
    context.model.eval()
    try:
        with torch.no_grad(), force_eager(), context.stepper.autocast():
            return context.model(tokens).float().cpu()
    finally:
        context.model.train()


def compute_branch_statistics(context: TrainContext, batch: Batch) -> dict[str, Tensor]:
    """Gate and selection statistics of each layer on the first sequences of a batch.

    Empty for a dense model. Of this rank's sequences; every rank must ask, for the branches are looked at from outside the
    blocks, and a sharded model is gathered for that.
    """
    if context.config.model.attention == "dense":
        return {}
    context.model.eval()
    try:
        with torch.no_grad(), force_eager(), context.stepper.autocast(), context.world.unshard(context.model):
            first = batch.split(STATISTICS_SEQUENCES)[0]
            tokens = first.inputs.to(context.device, non_blocking=True)
            if first.documents is None:
                return context.model.statistics(tokens)
            return context.model.statistics(tokens.flatten()[None], make_span(first.documents))
    finally:
        context.model.train()


def measure_run_selection_benefit(context: TrainContext, length: int) -> SelectionBenefit | str | None:
    """Whether selection finds, at `length` tokens of held-out text; a string if that cannot be asked; None: a dense model.

    As training computes, autocast included. Every rank asks the same, for a sharded model is gathered for it.
    """
    model = context.config.model
    if model.attention == "dense":
        return None
    if context.config.data.tokenizer != "byte" or model.vocab_size < BYTE_VOCAB_SIZE:
        return f"facts are bytes, and data.tokenizer = {context.config.data.tokenizer}"
    held_out = context.dataset.validation
    # Enough to draw needles from, and the same at every length.
    text = held_out.read(0, min(len(held_out), MAX_NEEDLE_TEXT_TOKENS))
    context.model.eval()
    try:
        with torch.no_grad(), force_eager(), context.stepper.autocast(), context.world.unshard(context.model):
            return measure_selection_benefit(context.model, text, length, context.config.data)
    finally:
        context.model.train()


def measure_xz_reference(context: TrainContext) -> dict[str, Any] | None:
    """What xz makes of the held-out text, in bits per byte, to hold a loss against. None unless tokens are bytes."""
    if context.config.data.tokenizer != "byte":
        return None
    held_out = context.dataset.validation
    text = np.asarray(held_out.read(0, min(len(held_out), MAX_XZ_TEXT_BYTES)), dtype=np.uint8).tobytes()
    return {"name": "xz", "bytes": len(text), "bpb": 8 * len(lzma.compress(text)) / len(text)}


def get_layer_name(name: str) -> str:
    """The layer that a parameter belongs to: `blocks.3` of `blocks.3.mlp.up.weight`, else its first component."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else name.split(".")[0]


@torch.no_grad()
def compute_norms_by_layer(model: nn.Module, get_tensor: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Euclidean norm, per layer, of what `of` takes from each parameter (its value, its gradient); on the device."""
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        value = get_tensor(parameter)
        if value is not None:
            layers.setdefault(get_layer_name(name), []).append(torch.linalg.vector_norm(value))
    return {layer: torch.linalg.vector_norm(torch.stack(norms)) for layer, norms in layers.items()}


class GateMovement:
    """How far the gate weights of each layer moved since the last time it was asked."""

    def __init__(self, model: nn.Module) -> None:
        self._gates = [p for name, p in model.named_parameters() if ".attention.gate." in name]
        self._previous = [p.detach().clone() for p in self._gates]

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        moved = [(p - before).norm() for p, before in zip(self._gates, self._previous, strict=True)]
        for p, before in zip(self._gates, self._previous, strict=True):
            before.copy_(p)
        return moved
