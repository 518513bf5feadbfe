"""Measurements of a model that do not affect training: held-out loss, layer statistics, probe, and norms."""

from __future__ import annotations

import contextlib
import functools
import lzma
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.config import BYTE_VOCAB_SIZE
from nsa_lab.data import Batch, EvalBatches
from nsa_lab.evaluate.conversion import MAX_MASS_WINDOWS, ConversionProgress, measure_progress, read_windows
from nsa_lab.evaluate.selection_benefit import SelectionBenefit, measure_selection_benefit
from nsa_lab.model.placement import find_placement
from nsa_lab.train.build import TrainContext, force_eager
from nsa_lab.train.checkpoint_state import make_probe_input
from nsa_lab.train.packing import make_span, place_share
from nsa_lab.train.step import compute_token_losses, sum_masked, sum_token_losses

STATISTICS_SEQUENCES = 2
# Longest text of which layer statistics and the selection benefit are computed. Every rank computes them alone, and the
# statistics of a longer text do not fit into memory: they have an entry for each query and block.
MAX_MEASURED_TOKENS = 1 << 16
MAX_NEEDLE_TEXT_TOKENS = 1 << 20  # tokens of held-out text into which needles are inserted
MAX_REFERENCE_BYTES = 1 << 20  # bytes of held-out text for the references; compression takes a third of a second


@dataclass(frozen=True)
class EvaluationResult:
    """Mean losses in nats per token.

    `loss`: all tokens. `first_token_loss`: first tokens of documents; None without document masking. `window_losses`:
    each window in order, rounded to six digits; paired comparisons of runs use them.
    """

    loss: float
    first_token_loss: float | None
    window_losses: list[float]


@torch.no_grad()
def evaluate_held_out(context: TrainContext, held_out: EvalBatches, poll: Callable[[], None]) -> EvaluationResult:
    """Evaluate all held-out batches: mean loss, loss of first tokens of documents, and loss per window.

    `poll` is called before each batch and may raise.
    """
    # One row per batch, summed in the order of the batches, so the sum does not depend on the number of ranks.
    dtype = torch.promote_types(find_placement(context.model).dtype, torch.float32)
    sums = torch.zeros(len(held_out), 4, dtype=dtype, device=context.device)
    window_sums = torch.zeros(held_out.n_windows, dtype=dtype, device=context.device)
    with _eval_mode(context.model):
        batches = _assign_batches(len(held_out), context, context.stepper.context_size)
        for batch in _evaluate_batches(context, held_out, batches, poll):
            losses, windows = compute_token_losses(batch.logits, batch.targets), held_out.get_window_range(batch.index)
            sums[batch.index] += batch.weight * _sum_losses(batch, losses)
            losses_in_place = place_share(losses, batch.shard, batch.seq_len)
            window_sums[windows.start : windows.stop] += batch.weight * losses_in_place.mean(1)
    loss, n_tokens, first_token_loss, n_first_tokens = functools.reduce(torch.add, context.world.all_reduce(sums)).tolist()
    window_losses = [round(loss, 6) for loss in context.world.all_reduce(window_sums).tolist()]
    return EvaluationResult(loss / n_tokens, first_token_loss / n_first_tokens if n_first_tokens else None, window_losses)


@dataclass(frozen=True)
class _EvaluatedBatch:
    """Held-out batch of rows of `seq_len` tokens, with its logits.

    If several ranks share each row, the tensors belong to this rank, and `shard` is its share.

    `is_document_start`: True where the input is a separator, so the target is the first token of a document; None without
    document masking.
    """

    index: int
    weight: float
    logits: Tensor
    targets: Tensor
    is_document_start: Tensor | None
    shard: ContextShard | None
    seq_len: int


def _sum_losses(batch: _EvaluatedBatch, losses: Tensor) -> Tensor:
    """Return the summed loss and number of tokens, for all tokens and for first tokens of documents, [4].

    `losses`: the loss of every token. The total is summed by the loss function, as in training; another summation order
    would change the last bits.
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
        inputs, targets = held_out[index]
        documents, seq_len = held_out.find_documents(inputs), inputs.shape[1]
        with force_eager():  # compiling the forward pass for each shape would take longer than all evaluations of a run
            computed = context.stepper.compute_logits(context.model, Batch(inputs, targets), make_span(documents, seq_len))
        begins = None if documents is None else computed.tokens == context.dataset.tokenizer.separator
        yield _EvaluatedBatch(index, weight, computed.logits, computed.targets, begins, computed.shard, seq_len)


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _assign_batches(n_batches: int, context: TrainContext, context_size: int = 1) -> list[tuple[int, float]]:
    """Return this rank's batches and their weights. `context_size`: number of adjacent ranks that share each batch.

    Every rank gets the same number of batches, so that collectives inside the model match; padding batches have weight 0.
    """
    n_groups, group = context.world.size // context_size, context.world.rank // context_size
    n_rounds = -(-n_batches // n_groups)
    indices = [round_index * n_groups + group for round_index in range(n_rounds)]
    return [(index, 1.0) if index < n_batches else (0, 0.0) for index in indices]


def compute_probe_logits(context: TrainContext) -> Tensor:
    """Return float32 logits [1, t, V] of the fixed probe input, on the CPU, computed without compilation."""
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
    """Return gate and selection statistics of each layer on the first sequences of this rank's share of `batch`.

    Of sequences longer than `MAX_MEASURED_TOKENS`, the first one is used, up to that length. Empty for a dense model.
    Collective: the branches are called outside their blocks, so a sharded model is gathered.
    """
    if context.config.model.attention == "dense":
        return {}
    context.model.eval()
    try:
        with torch.no_grad(), force_eager(), context.stepper.autocast(), context.world.unshard(context.model):
            first = _take_measured_text(batch)
            tokens = first.inputs.to(context.device, non_blocking=True)
            if first.documents is None:
                return context.model.statistics(tokens)
            return context.model.statistics(tokens.flatten()[None], make_span(first.documents, tokens.shape[1]))
    finally:
        context.model.train()


def _take_measured_text(batch: Batch) -> Batch:
    if batch.inputs.shape[1] <= MAX_MEASURED_TOKENS:
        return batch.split(STATISTICS_SEQUENCES)[0]
    inputs, targets, _, documents = batch.split(1)[0]
    # Documents after the end become empty ones.
    documents = None if documents is None else documents.clamp_max(MAX_MEASURED_TOKENS)
    return Batch(inputs[:, :MAX_MEASURED_TOKENS], targets[:, :MAX_MEASURED_TOKENS], documents=documents)


def measure_run_selection_benefit(context: TrainContext, length: int) -> SelectionBenefit | str | None:
    """Measure whether selection retrieves needles from `length` tokens of held-out text.

    Return a text with the reason if this cannot be measured, and None for a dense model. Computed as in training, with
    autocast. Collective: all ranks measure the same, and a sharded model is gathered.
    """
    model = context.config.model
    if model.attention == "dense":
        return None
    if context.config.data.tokenizer != "byte" or model.vocab_size < BYTE_VOCAB_SIZE:
        return f"facts are bytes, and data.tokenizer = {context.config.data.tokenizer}"
    held_out = context.dataset.validation
    # Enough text for the needles, and the same at every length.
    text = held_out.read(0, min(len(held_out), MAX_NEEDLE_TEXT_TOKENS))
    context.model.eval()
    try:
        with torch.no_grad(), force_eager(), context.stepper.autocast(), context.world.unshard(context.model):
            return measure_selection_benefit(context.model, text, length, context.config.data)
    finally:
        context.model.train()


def measure_conversion_progress(context: TrainContext, length: int) -> ConversionProgress | str | None:
    """Compare a converted model with its own dense attention on windows of `length` tokens of held-out text.

    Return a text with the reason if all blocks are selected, and None for a model that is not converted. Computed as in
    training, with autocast.
    """
    if not context.config.is_conversion:
        return None
    windows = read_windows(context.dataset.validation, length, MAX_MASS_WINDOWS)
    context.model.eval()
    try:
        with torch.no_grad(), force_eager(), context.stepper.autocast():
            return measure_progress(context.model, windows)
    finally:
        context.model.train()


def measure_references(context: TrainContext) -> list[dict[str, Any]]:
    """Return reference values for the loss on the held-out text in bits per byte; empty unless tokens are bytes.

    `xz`: size after compression. `order-0 entropy`: of single bytes; `order-1 entropy`: of a byte if the previous one is
    known. A model that has learned anything but the frequencies of bytes is below the last one.
    """
    if context.config.data.tokenizer != "byte":
        return []
    held_out = context.dataset.validation
    text = np.asarray(held_out.read(0, min(len(held_out), MAX_REFERENCE_BYTES)), dtype=np.uint8)
    order_0, order_1 = compute_entropies(text)
    values = {
        "xz": 8 * len(lzma.compress(text.tobytes())) / len(text),
        "order-0 entropy": order_0,
        "order-1 entropy": order_1,
    }
    return [{"name": name, "bytes": len(text), "bpb": bpb} for name, bpb in values.items()]


def compute_entropies(text: np.ndarray) -> tuple[float, float]:
    """Return the entropies of order 0 and 1 of uint8 [n] in bits per byte, with the correction of Miller and Madow.

    Without the correction, the entropy of a short text is too low: of n bytes, at most n pairs occur.
    """
    single = _compute_entropy(np.bincount(text, minlength=256))
    pairs = _compute_entropy(np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=1 << 16))
    return single, max(pairs - single, 0.0)


def _compute_entropy(counts: np.ndarray) -> float:
    total, occurring = counts.sum(), counts[counts > 0]
    if not total:
        return 0.0
    share = occurring / total
    return float(-(share * np.log2(share)).sum() + (len(occurring) - 1) / (2 * total * math.log(2)))


def get_layer_name(name: str) -> str:
    """Return the layer of a parameter: `blocks.3` for `blocks.3.mlp.up.weight`, else its first component."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name.split(".")[0]


@torch.no_grad()
def compute_norms_by_layer(model: nn.Module, get_tensor: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Return the Euclidean norm per layer of `get_tensor(parameter)`, for example its value or gradient; on the device."""
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        value = get_tensor(parameter)
        if value is not None:
            layers.setdefault(get_layer_name(name), []).append(torch.linalg.vector_norm(value))
    return {layer: torch.linalg.vector_norm(torch.stack(norms)) for layer, norms in layers.items()}


class GateMovement:
    """Measures the distance that the gate weights of each layer have moved since the last measurement."""

    def __init__(self, model: nn.Module) -> None:
        self._gates = [parameter for name, parameter in model.named_parameters() if ".attention.gate." in name]
        self._previous = [parameter.detach().clone() for parameter in self._gates]

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        distances = [(parameter - previous).norm() for parameter, previous in zip(self._gates, self._previous, strict=True)]
        for parameter, previous in zip(self._gates, self._previous, strict=True):
            previous.copy_(parameter)
        return distances
