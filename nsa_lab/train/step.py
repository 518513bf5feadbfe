"""One optimiser step: micro-batches, loss, clipping and an update that a bad gradient cannot reach.

Invariants
* The loss of a step is the weighted mean over all its tokens (without weights: the mean), however they are grouped into
  micro-batches and spread over ranks. So is what the model adds to it (`auxiliary`), which is told apart.
* A loss or gradient norm that is not finite is noticed on the device and the update is skipped there: weights, moments and
  the optimiser's own counter stay as they were. The flag then sticks: nothing is applied until the host has seen it.
* Nothing here waits for the device; results stay on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from nsa_lab.attention import Span
from nsa_lab.config import StageConfig, TrainConfig
from nsa_lab.data import Batch, Documents
from nsa_lab.train.cuda_graph import GradientGraphs, Spans
from nsa_lab.train.distributed import World
from nsa_lab.train.muon import Muon, find_muon_matrices
from nsa_lab.train.packing import compute_logits, make_spans

LOSS, GRAD_NORM, NON_FINITE, STOP, AUXILIARY = range(5)
# What a step with weights says besides: summed loss and number of the tokens that weigh 1 (text), and of all others that
# weigh anything; and where documents are told apart, of the first token of every document.
TEXT_LOSS, TEXT_TOKENS, MARKED_LOSS, MARKED_TOKENS, FIRST_LOSS, FIRST_TOKENS = range(5, 11)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """`train.optimizer`, with weight decay that spares vectors (norms, biases).

    AdamW is fused: its kernel can skip an update on the device.
    """
    by_muon = find_muon_matrices(model) if train.optimizer == "muon" else {}
    rest = [p for p in model.parameters() if p.requires_grad and p not in by_muon]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    lr, betas, eps = train.lr, (train.beta1, train.beta2), train.eps
    if train.optimizer == "muon":
        return Muon(by_muon, groups, lr=lr, betas=betas, eps=eps, weight_decay=train.weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def sum_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats, float32, of logits `[B, T, V]` against targets `[B, T]`."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def compute_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of every token, float32 `[B, T]`, of logits `[B, T, V]` against targets `[B, T]`."""
    losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def sum_text_and_marked(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum of `losses` and number of tokens, of those that weigh 1 and of the others: float32 [4]. Both of one shape.

    What weighs nothing is padding, and counts for neither.
    """
    text = weights == 1
    return torch.cat([sum_masked(losses, text), sum_masked(losses, ~text & (weights != 0))])


def sum_masked(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum of `losses` over `tokens` (bool, of one shape), and their number: float32 [2]."""
    zero = torch.zeros((), device=losses.device)
    return torch.stack([torch.where(mask, losses.detach(), zero).sum().float(), mask.sum().float()])


class Stepper:
    """Takes optimiser steps. `forward` is the model as it is called (compiled, wrapped); `model` owns the parameters.

    `auxiliary` gives what is to be added to the loss of the last forward pass, a mean over its tokens; None: nothing.
    `separator` is the token that a document begins with, where documents are told apart. `graphed` tells of a stage whether
    its steps are replayed as CUDA graphs.
    `applied_lr` is the rate that the optimiser held when it last stepped.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        *,
        device: torch.device,
        use_bf16: bool,
        world: World,
        use_graph: Callable[[StageConfig], bool] = lambda stage: False,
        auxiliary_loss: Callable[[], Tensor] | None = None,
        separator: int | None = None,
    ) -> None:
        self._forward, self._optimizer, self._train = forward, optimizer, train
        self._separator = separator
        self._auxiliary_loss = auxiliary_loss or (lambda: torch.zeros((), device=device))
        self.stage: StageConfig = train.plan[0]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device, self._use_bf16, self._world = device, use_bf16, world
        self._is_non_finite = torch.zeros((), device=device)
        self.applied_lr = 0.0
        # Called by the optimiser itself when it steps: what a record says of the rate is what was held then.
        optimizer.register_step_pre_hook(self._record_rate)
        self._use_graph = use_graph
        self._graphs = GradientGraphs(self._compute_gradients, self._parameters, device, self._allocate_moments)

    def autocast(self) -> AbstractContextManager:
        if not self._use_bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def split_micro_batches(self, batch: Batch) -> list[Batch]:
        """This rank's sequences of a step in the groups that a forward pass of their stage takes."""
        return batch.split(self.stage.sequences_per_forward)

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        lr: float,
        poll: Callable[[], None],
        *,
        weights: Tensor | None = None,
        documents: Documents | None = None,
        should_stop: bool = False,
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Take one step on this rank's sequences `[n, T]`; device tensor, `LOSS` and on.

        The sequences are a share of a batch of `stage`. `weights`, float32 `[n, T]`, are those of the targets; with them
        the losses of text and of what is marked come back, too. With `documents` each is computed as if it were alone.
        `poll` is called before each micro-batch and may raise, and so may `interruptible()`, entered around each of them;
        the step is then as if it had never begun. `stop` is this rank's wish to stop; the flag that comes back counts the
        ranks that wish it.
        """
        batch = Batch(inputs, targets, weights, documents)
        spans = make_spans(self.split_micro_batches(batch))
        if self._use_graph(self.stage):
            poll()
            with interruptible():
                told = self._graphs(batch, spans, self.stage)
        else:
            self._graphs.release()
            told = self._compute_gradients(batch, spans, poll, interruptible)
        stops, loss, *more = self._world.all_reduce(torch.cat([told.new_full((1,), float(should_stop)), told])).unbind()
        norm = self._clip_gradients()
        self._is_non_finite = torch.maximum(self._is_non_finite, (~(torch.isfinite(loss) & torch.isfinite(norm))).float())
        self._update_weights(lr)
        return torch.stack([loss, norm.to(loss.dtype), self._is_non_finite, stops, *more])

    def dry_run(self, batch: Batch) -> None:
        """What a step on this rank's sequences computes before its update, thrown away: afterwards all is compiled that a
        step of their shapes and documents compiles, and nothing else is different.

        One micro-batch of each size is computed, plainly, also where steps are graphs. No gradients cross the ranks, but
        every rank must ask.
        """
        parts, whole = self.split_micro_batches(batch), self._compute_total_weight(batch.weights)
        of_each_size = {len(part.inputs): (part, span) for part, span in zip(parts, make_spans(parts), strict=True)}
        for part, span in of_each_size.values():
            with self._world.sync_gradients(self._forward, enabled=False):
                self._backward(part, span, whole)
        self._optimizer.zero_grad(set_to_none=True)

    def _compute_gradients(
        self,
        batch: Batch,
        spans: Spans,
        poll: Callable[[], None] = lambda: None,
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Loss and auxiliary loss of the step, and with weights what is told apart: [2], [6] or [8]. `.grad` grows.

        `spans` are those of the documents of its micro-batches.
        """
        whole, parts = self._compute_total_weight(batch.weights), self.split_micro_batches(batch)
        told: list[Tensor] = []
        for number, (part, span) in enumerate(zip(parts, spans, strict=True), 1):
            poll()
            with interruptible(), self._world.sync_gradients(self._forward, enabled=number == len(parts)):
                told.append(self._backward(part, span, whole))
        return functools.reduce(torch.add, told)

    def _compute_total_weight(self, weights: Tensor | None) -> float | Tensor:
        """What all tokens of the step weigh together, over all ranks."""
        if weights is None:
            return self.stage.tokens_per_step
        return self._world.all_reduce(weights.to(self._device, non_blocking=True).sum())

    def _backward(self, batch: Batch, span: Span | None, total_weight: float | Tensor) -> Tensor:
        tokens = batch.inputs.to(self._device, non_blocking=True)
        with self.autocast():
            logits = compute_logits(self._forward, tokens, span)
        targets = batch.targets.to(self._device, non_blocking=True)
        if batch.weights is None:
            total, apart = sum_token_losses(logits, targets) / total_weight, []
        else:
            weights = batch.weights.to(self._device, non_blocking=True)
            losses = compute_token_losses(logits, targets)
            total, apart = (losses * weights).sum() / total_weight, self._sum_losses_by_kind(losses, weights, tokens)
        added = self.compute_auxiliary_loss(targets.numel())
        # Data parallelism averages over ranks; the sum over ranks is what the mean over all tokens needs.
        ((total + added) * self._world.size).backward()
        return torch.cat([total.detach()[None], added.detach()[None].to(total.dtype), *apart])

    def _sum_losses_by_kind(self, losses: Tensor, weights: Tensor, tokens: Tensor) -> list[Tensor]:
        """Of text, of what is marked, and of the first tokens of documents, which the separator before them leads to."""
        if self._separator is None:
            return [sum_text_and_marked(losses, weights)]
        return [sum_text_and_marked(losses, weights), sum_masked(losses, (tokens == self._separator) & (weights != 0))]

    def compute_auxiliary_loss(self, n_tokens: int) -> Tensor:
        """What the forward pass just done over `tokens` tokens adds to the loss of its step, 0-d."""
        return self._auxiliary_loss() * (n_tokens / self.stage.tokens_per_step)

    def _clip_gradients(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self._parameters, self._train.grad_clip)
        return self._world.full_tensor(norm)

    def _update_weights(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._step_unless(self._is_non_finite)

    def _record_rate(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        (self.applied_lr,) = {float(group["lr"]) for group in optimizer.param_groups}

    def _allocate_moments(self) -> None:
        """An update that is skipped, for what it allocates: the peak of memory is then reached during the capture.

        A replayed graph allocates nothing, so moments that came later would lie beside a peak that nobody sees.
        """
        self._step_unless(torch.ones_like(self._is_non_finite))

    def _step_unless(self, skip: Tensor) -> None:
        """Apply the update, or nothing where `bad` is 1."""
        # Read by the fused kernel, which returns early on 1; scaling by zero would turn NaN into NaN.
        self._optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue] - no class declares it
        self._optimizer.step()


class AsyncHostCopy:
    """Named vectors on their way from the device to the host, in one copy; `take` waits for them and no longer."""

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: len(vector) for name, vector in vectors.items()}
        values = torch.cat(list(vectors.values())) if vectors else torch.zeros(0)
        self._copy_event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copy_event = torch.cuda.Event()
            self._copy_event.record()

    def wait(self) -> dict[str, list[float]]:
        if self._copy_event is not None:
            self._copy_event.synchronize()
        parts = self._values.split(list(self._sizes.values()))
        return {name: part.tolist() for name, part in zip(self._sizes, parts, strict=True)}


class Readback:
    """Brings the small result of each step to the host one step late, so that the device always has work queued.

    On a CPU the result is there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._pending: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def push(self, step: int, result: Tensor) -> None:
        if not self._is_cuda:
            self._pending.append((step, result, None))
            return
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((step, host, event))

    def take(self, *, include_newest: bool = False) -> list[tuple[int, list[float]]]:
        """Results in order of steps: all but the newest, or all; waits for those only."""
        keep = 1 if self._is_cuda and not include_newest else 0
        cut = max(len(self._pending) - keep, 0)
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        for _, _, event in ready:
            if event is not None:
                event.synchronize()
        return [(step, result.tolist()) for step, result, _ in ready]
