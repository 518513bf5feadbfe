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

from nsa_lab.config import BYTE_VOCABULARY
from nsa_lab.data import Batch, EvalBatches
from nsa_lab.evaluate.reach import Reach, reach
from nsa_lab.train.documents import logits_of, span_of
from nsa_lab.train.parts import Parts, eager
from nsa_lab.train.snapshot import probe_input
from nsa_lab.train.step import each_token_loss, sum_over, token_losses

STATISTICS_SEQUENCES = 2
REACH_TEXT = 1 << 20  # tokens of held-out text that needles are drawn from
XZ_TEXT = 1 << 20  # bytes of held-out text that are compressed: a third of a second


@dataclass(frozen=True)
class Evaluated:
    """Mean losses in nats per token: of everything; of the first tokens of documents, None where none are told apart; and
    of each window in order, to six digits, which is what runs are compared by."""

    loss: float
    first_loss: float | None
    windows: list[float]


def evaluate(parts: Parts, held_out: EvalBatches, poll: Callable[[], None]) -> float:
    """Mean loss in nats per token over fixed held-out batches. `poll` is called before each batch and may raise."""
    return evaluate_apart(parts, held_out, poll).loss


@torch.no_grad()
def evaluate_apart(parts: Parts, held_out: EvalBatches, poll: Callable[[], None]) -> Evaluated:
    """`evaluate`, and the same of the first token of every document, and of each window."""
    # A place for each batch: added up in their order, whichever rank computed them.
    found = torch.zeros(len(held_out), 4, device=parts.device)
    windows = torch.zeros(held_out.windows, device=parts.device)
    with _evaluating(parts.model):
        for read in _read(parts, held_out, _share_of_batches(len(held_out), parts), poll):
            each, own = each_token_loss(read.logits, read.targets), held_out.of_batch(read.index)
            found[read.index] += read.weight * _losses(read, each)
            windows[own.start : own.stop] += read.weight * each.mean(1)
    loss, tokens, first, firsts = functools.reduce(torch.add, parts.world.sum(found)).tolist()
    by_window = [round(loss, 6) for loss in parts.world.sum(windows).tolist()]
    return Evaluated(loss / tokens, first / firsts if firsts else None, by_window)


@torch.no_grad()
def rehearse_evaluation(parts: Parts, held_out: EvalBatches) -> None:
    """The first batch and the last, which may be smaller: what an evaluation compiles is there afterwards.

    Every rank must ask.
    """
    ends = [(index, 0.0) for index in sorted({0, len(held_out) - 1})]
    with _evaluating(parts.model):
        for _ in _read(parts, held_out, ends, lambda: None):
            pass


@dataclass(frozen=True)
class _Read:
    """One of this rank's held-out batches, computed as in training; `begins`: first tokens of documents told apart."""

    index: int
    weight: float
    logits: Tensor
    targets: Tensor
    begins: Tensor | None


def _losses(read: _Read, each: Tensor) -> Tensor:
    """Summed loss and number of tokens of a batch, and of the first tokens of its documents: float32 [4].

    `each` is the loss of every token. The whole is summed by the loss function itself, as in training: another order of
    adding gives other last bits.
    """
    loss = token_losses(read.logits, read.targets)
    total = torch.stack([loss, loss.new_tensor(float(read.targets.numel()))])
    if read.begins is None:
        return torch.cat([total, torch.zeros_like(total)])
    return torch.cat([total, sum_over(each, read.begins)])


def _read(
    parts: Parts, held_out: EvalBatches, batches: Sequence[tuple[int, float]], poll: Callable[[], None]
) -> Iterator[_Read]:
    for index, weight in batches:
        poll()
        tokens, wanted = held_out[index]
        documents = held_out.documents(tokens)
        inputs, targets = tokens.to(parts.device), wanted.to(parts.device)
        with parts.stepper.autocast():
            logits = logits_of(parts.model, inputs, span_of(documents))
        begins = None if documents is None else inputs == parts.dataset.tokenizer.separator
        yield _Read(index, weight, logits, targets, begins)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _share_of_batches(count: int, parts: Parts) -> list[tuple[int, float]]:
    """This rank's batches and their weights: as many on every rank, so that collectives inside a model match."""
    world = parts.world
    rounds = -(-count // world.size)
    mine = [turn * world.size + world.rank for turn in range(rounds)]
    return [(index, 1.0) if index < count else (0, 0.0) for index in mine]


def probe_logits(parts: Parts) -> Tensor:
    """float32 logits `[1, t, V]` of a fixed input, on the CPU, computed without compilation."""
    tokens = probe_input(parts.config.model.vocab_size, parts.config.train.longest.seq_len).to(parts.device)
    parts.model.eval()
    try:
        with torch.no_grad(), eager(), parts.stepper.autocast():
            return parts.model(tokens).float().cpu()
    finally:
        parts.model.train()


def branch_statistics(parts: Parts, batch: Batch) -> dict[str, Tensor]:
    """Gate and selection statistics of each layer on the first sequences of a batch.

    Empty for a dense model. Of this rank's sequences; every rank must ask, for the branches are looked at from outside the
    blocks, and a sharded model is gathered for that.
    """
    if parts.config.model.attention == "dense":
        return {}
    parts.model.eval()
    try:
        with torch.no_grad(), eager(), parts.stepper.autocast(), parts.world.whole(parts.model):
            first = batch.split(STATISTICS_SEQUENCES)[0]
            tokens = first.inputs.to(parts.device, non_blocking=True)
            if first.documents is None:
                return parts.model.statistics(tokens)
            return parts.model.statistics(tokens.flatten()[None], span_of(first.documents))
    finally:
        parts.model.train()


def selection_reach(parts: Parts, length: int) -> Reach | str | None:
    """Whether selection finds, at `length` tokens of held-out text; a string if that cannot be asked; None: a dense model.

    As training computes, autocast included. Every rank asks the same, for a sharded model is gathered for it.
    """
    model = parts.config.model
    if model.attention == "dense":
        return None
    if parts.config.data.tokenizer != "byte" or model.vocab_size < BYTE_VOCABULARY:
        return f"facts are bytes, and data.tokenizer = {parts.config.data.tokenizer}"
    held_out = parts.dataset.validation
    # Enough to draw needles from, and the same at every length.
    text = held_out.read(0, min(len(held_out), REACH_TEXT))
    parts.model.eval()
    try:
        with torch.no_grad(), eager(), parts.stepper.autocast(), parts.world.whole(parts.model):
            return reach(parts.model, text, length, parts.config.data)
    finally:
        parts.model.train()


def compressed(parts: Parts) -> dict[str, Any] | None:
    """What xz makes of the held-out text, in bits per byte, to hold a loss against. None unless tokens are bytes."""
    if parts.config.data.tokenizer != "byte":
        return None
    held_out = parts.dataset.validation
    text = np.asarray(held_out.read(0, min(len(held_out), XZ_TEXT)), dtype=np.uint8).tobytes()
    return {"name": "xz", "bytes": len(text), "bpb": 8 * len(lzma.compress(text)) / len(text)}


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: `blocks.3` of `blocks.3.mlp.up.weight`, else its first component."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else name.split(".")[0]


@torch.no_grad()
def layer_norms(model: nn.Module, of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Euclidean norm, per layer, of what `of` takes from each parameter (its value, its gradient); on the device."""
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        value = of(parameter)
        if value is not None:
            layers.setdefault(layer_of(name), []).append(torch.linalg.vector_norm(value))
    return {layer: torch.linalg.vector_norm(torch.stack(norms)) for layer, norms in layers.items()}


class GateMovement:
    """How far the gate weights of each layer moved since the last time it was asked."""

    def __init__(self, model: nn.Module) -> None:
        self._gates = [p for name, p in model.named_parameters() if ".attention.gate." in name]
        self._before = [p.detach().clone() for p in self._gates]

    @torch.no_grad()
    def take(self) -> list[Tensor]:
        moved = [(p - before).norm() for p, before in zip(self._gates, self._before, strict=True)]
        for p, before in zip(self._gates, self._before, strict=True):
            before.copy_(p)
        return moved
