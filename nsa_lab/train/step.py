"""One optimizer step: micro-batches, loss, gradient clipping, and an update that is skipped if the gradient is bad.

Invariants
* The loss of a step is the weighted mean over all its tokens (the mean without weights), however they are grouped into
  micro-batches and distributed over ranks. The auxiliary loss of the model and the divergence from a teacher are averaged
  in the same way and returned separately.
* A loss or gradient norm that is not finite is detected on the device, and the update is skipped there: weights, moments
  and the optimizer's step counter do not change. The flag stays set, so later updates are skipped too, until the host has
  seen it.
* Nothing here synchronizes with the device; the results are device tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from nsa_lab.attention import Span
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.config import StageConfig, TrainConfig
from nsa_lab.data import Batch
from nsa_lab.train.cuda_graph import GradientGraphs, Spans
from nsa_lab.train.distributed import World
from nsa_lab.train.muon import Muon, find_muon_matrices
from nsa_lab.train.packing import compute_logits, make_spans, take_share
from nsa_lab.train.teacher import sum_kl_divergence

LOSS, GRAD_NORM, NON_FINITE, STOP, AUXILIARY, TEACHER_KL = range(6)
# Further results of a step with weights: summed loss and number of tokens with weight 1 (text), and of tokens with any
# other nonzero weight (marked). With document masking also of the first token of every document.
TEXT_LOSS, TEXT_TOKENS, MARKED_LOSS, MARKED_TOKENS, FIRST_LOSS, FIRST_TOKENS = range(6, 12)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer `train.optimizer`. Weight decay does not apply to vectors (norms, biases).

    AdamW is fused, because its kernel can skip an update on the device.
    """
    muon_matrices = find_muon_matrices(model) if train.optimizer == "muon" else {}
    other_parameters = [
        parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in muon_matrices
    ]
    groups = [
        {
            "params": [parameter for parameter in other_parameters if parameter.ndim >= 2],
            "weight_decay": train.weight_decay,
        },
        {"params": [parameter for parameter in other_parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    lr, betas, eps = train.lr, (train.beta1, train.beta2), train.eps
    if train.optimizer == "muon":
        return Muon(muon_matrices, groups, lr=lr, betas=betas, eps=eps, weight_decay=train.weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def sum_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats of logits [B, T, V] against targets [B, T].

    Computed in float32, or in float64 for float64 logits.
    """
    return functional.cross_entropy(_widen(logits).flatten(0, 1), targets.flatten(), reduction="sum")


def compute_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats of every token, [B, T], of logits [B, T, V] against targets [B, T].

    Computed in float32, or in float64 for float64 logits.
    """
    losses = functional.cross_entropy(_widen(logits).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sum_text_and_marked(losses: Tensor, weights: Tensor) -> Tensor:
    """Return sum of `losses` and number of tokens, for tokens with weight 1 and for the others: [4].

    `losses` and `weights` have the same shape. Tokens with weight 0 are padding and counted in neither.
    """
    is_text = weights == 1
    return torch.cat([sum_masked(losses, is_text), sum_masked(losses, ~is_text & (weights != 0))])


def sum_masked(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `losses` where `mask` (bool, same shape) is True, and the number of such tokens: [2]."""
    zero = losses.new_zeros(())
    return torch.stack([torch.where(mask, losses.detach(), zero).sum(), mask.sum().to(losses.dtype)])


class ComputedBatch(NamedTuple):
    """Logits [rows, T, V] of a batch, and its tokens, targets and weights [rows, T], on the device.

    If several ranks share each sequence: of this rank only (`take_share`).
    """

    logits: Tensor
    tokens: Tensor
    targets: Tensor
    weights: Tensor | None
    shard: ContextShard | None


class Stepper:
    """Takes optimizer steps.

    `model` owns the parameters; `forward` is the model as it is called (compiled, wrapped). `auxiliary_loss()` returns
    the auxiliary loss of the last forward pass, a mean over its tokens; None: no auxiliary loss. `separator`: the token
    that begins a document; None without document masking. `use_graph(stage)`: whether steps of a stage are replayed as
    CUDA graphs. `applied_lr`: the learning rate of the optimizer at its last step. `context_groups`: number of ranks that
    share each sequence -> group of these ranks, for every such number that a stage has (`World.make_context_group`).
    `teacher`: the model of `train.teacher_weight`; None: no teacher.
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
        context_groups: Mapping[int, ProcessGroup] | None = None,
        teacher: Callable[..., Tensor] | None = None,
    ) -> None:
        self._context_groups, self._teacher = context_groups or {}, teacher
        self._forward, self._optimizer, self._train = forward, optimizer, train
        self._separator = separator
        self._auxiliary_loss = auxiliary_loss or (lambda: torch.zeros((), device=device))
        self.stage: StageConfig = train.plan[0]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device, self._use_bf16, self._world = device, use_bf16, world
        self._is_non_finite = torch.zeros((), device=device)
        self._no_teacher_kl = torch.zeros((), device=device)  # allocated once: a step without a teacher does nothing for it
        self.applied_lr = 0.0
        # The optimizer itself calls this hook, so the recorded rate is the rate that was applied.
        optimizer.register_step_pre_hook(self._record_rate)
        self._use_graph = use_graph
        self._graphs = GradientGraphs(self._compute_gradients, self._parameters, device, self._allocate_moments)

    def autocast(self) -> AbstractContextManager:
        if not self._use_bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def split_micro_batches(self, batch: Batch) -> list[Batch]:
        """Split this rank's sequences of a step into the micro-batches of the stage."""
        return batch.split(self.stage.sequences_per_forward)

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        lr: float,
        poll: Callable[[], None],
        *,
        weights: Tensor | None = None,
        documents: Tensor | None = None,
        should_stop: bool = False,
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Take one step on this rank's sequences [n, T]. Return its results as a device tensor.

        The result is indexed by `LOSS` and the other constants above. The sequences are this rank's share of a batch of
        `stage`. `weights`, float32 [n, T]: weights of the targets; with them, the losses of text and of marked tokens are
        returned too. `documents`, as in `Batch`: each is computed as if alone. `poll` is called before each micro-batch
        and may raise, and so may `interruptible()`, a context entered around each; the step then has no effect.
        `should_stop`: this rank's request to stop; the result counts the ranks that request it.
        """
        batch = Batch(inputs, targets, weights, documents)
        spans = make_spans(self.split_micro_batches(batch))
        if self._use_graph(self.stage):
            poll()
            with interruptible():
                losses = self._graphs(batch, spans, self.stage)
        else:
            self._graphs.release()
            losses = self._compute_gradients(batch, spans, poll, interruptible)
        n_stop_requests, loss, *further_losses = self._world.all_reduce(
            torch.cat([losses.new_full((1,), float(should_stop)), losses])
        ).unbind()
        norm = self._clip_gradients()
        self._is_non_finite = torch.maximum(self._is_non_finite, (~(torch.isfinite(loss) & torch.isfinite(norm))).float())
        self._update_weights(lr)
        return torch.stack([loss, norm.to(loss.dtype), self._is_non_finite, n_stop_requests, *further_losses])

    def dry_run(self, batch: Batch) -> None:
        """Compute a step without its update, to compile what later steps of these shapes need. The result is discarded.

        Computes one micro-batch of each size, without a CUDA graph. Collective: a sharded model exchanges gradients.
        """
        micro_batches, total_weight = self.split_micro_batches(batch), self._compute_total_weight(batch.weights)
        by_size = {
            len(micro_batch.inputs): (micro_batch, span)
            for micro_batch, span in zip(micro_batches, make_spans(micro_batches), strict=True)
        }
        for micro_batch, span in by_size.values():
            # Gradients that FSDP accumulates before their reduction cannot be discarded, so it reduces them.
            with nullcontext() if self._world.is_sharded else self._world.defer_gradient_exchange(self._forward):
                self._backward(micro_batch, span, total_weight)
        self._optimizer.zero_grad(set_to_none=True)

    def _compute_gradients(
        self,
        batch: Batch,
        spans: Spans,
        poll: Callable[[], None] = lambda: None,
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Accumulate the gradients of the step into `.grad`. Return its losses, [3], [7] or [9].

        They are loss, auxiliary loss and divergence from the teacher, and with weights also the losses by kind. `spans`:
        the documents of the micro-batches.
        """
        total_weight, micro_batches = self._compute_total_weight(batch.weights), self.split_micro_batches(batch)
        losses: list[Tensor] = []
        for number, (micro_batch, span) in enumerate(zip(micro_batches, spans, strict=True), 1):
            poll()
            is_last = number == len(micro_batches)
            with interruptible(), nullcontext() if is_last else self._world.defer_gradient_exchange(self._forward):
                losses.append(self._backward(micro_batch, span, total_weight))
        return functools.reduce(torch.add, losses)

    def _compute_total_weight(self, weights: Tensor | None) -> float | Tensor:
        """Return the sum of the weights of all tokens of the step, over all ranks."""
        if weights is None:
            return self.stage.tokens_per_step
        total = self._world.all_reduce(weights.to(self._device, non_blocking=True).sum())
        # The ranks that share a sequence have all of its weights.
        return total if self.context_size == 1 else total / self.context_size

    @contextmanager
    def use_stage(self, stage: StageConfig) -> Iterator[None]:
        """Compute the batches of another stage in this block."""
        current, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = current

    @property
    def context_size(self) -> int:
        """Number of ranks that share each sequence of the stage."""
        return self._world.get_context_size(self.stage.sequences_per_step)

    def make_shard(self, batch: Batch, span: Span | None) -> ContextShard | None:
        """Return this rank's share of a micro-batch of the stage; None if it has the whole micro-batch."""
        size = self.context_size
        if size == 1:
            return None
        return ContextShard(
            span or Span.full(batch.inputs.shape[1]), self._world.rank % size, size, self._context_groups[size]
        )

    def compute_logits(self, forward: Callable[..., Tensor], batch: Batch, span: Span | None) -> ComputedBatch:
        """Compute the logits of a micro-batch of the stage. `span`: its documents.

        Collective if several ranks share each sequence; they have the same micro-batch.
        """
        shard = self.make_shard(batch, span)
        tokens = take_share(batch.inputs, shard).to(self._device, non_blocking=True)
        with self.autocast():
            logits = compute_logits(forward, tokens, span) if shard is None else forward(tokens, shard)
        targets = take_share(batch.targets, shard).to(self._device, non_blocking=True)
        weights = None
        if batch.weights is not None:
            weights = take_share(batch.weights, shard).to(self._device, non_blocking=True)
        return ComputedBatch(logits, tokens, targets, weights, shard)

    def _backward(self, batch: Batch, span: Span | None, total_weight: float | Tensor) -> Tensor:
        computed = self.compute_logits(self._forward, batch, span)
        logits, tokens, targets, weights, _ = computed
        if weights is None:
            loss, losses_by_kind = sum_token_losses(logits, targets) / total_weight, []
        else:
            token_losses = compute_token_losses(logits, targets)
            loss, losses_by_kind = (
                (token_losses * weights).sum() / total_weight,
                self._sum_losses_by_kind(token_losses, weights, tokens),
            )
        auxiliary_loss = self.compute_auxiliary_loss(batch.targets.numel())
        trained_loss, teacher_kl = self.add_teacher_kl(loss + auxiliary_loss, computed, batch, span, total_weight)
        # DDP and FSDP average gradients over ranks; the mean over all tokens needs their sum.
        (trained_loss * self._world.size).backward()
        losses = torch.stack([value.detach().to(loss.dtype) for value in (loss, auxiliary_loss, teacher_kl)])
        return torch.cat([losses, *losses_by_kind])

    def _sum_losses_by_kind(self, losses: Tensor, weights: Tensor, tokens: Tensor) -> list[Tensor]:
        """Return sums and counts for text, marked tokens and, with document masking, first tokens of documents.

        The input of a first token is the separator before it.
        """
        if self._separator is None:
            return [sum_text_and_marked(losses, weights)]
        return [sum_text_and_marked(losses, weights), sum_masked(losses, (tokens == self._separator) & (weights != 0))]

    def compute_auxiliary_loss(self, n_tokens: int) -> Tensor:
        """Return the share of the step's auxiliary loss, 0-d, of the last forward pass over `n_tokens` tokens.

        If several ranks share each sequence, `n_tokens` counts all of its tokens, and the sum of the results is the share.
        """
        return self._auxiliary_loss() * (n_tokens / self.stage.tokens_per_step)

    def add_teacher_kl(
        self, loss: Tensor, computed: ComputedBatch, batch: Batch, span: Span | None, total_weight: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return `loss` plus the weighted KL(teacher || model) of a micro-batch, and this divergence, both 0-d.

        The divergence is summed over tokens with their weights and divided by `total_weight`. Without a teacher, `loss` is
        unchanged and the divergence is 0. `computed`: the model's results for this micro-batch. Collective if several ranks
        share each sequence.
        """
        if self._teacher is None:
            return loss, self._no_teacher_kl
        with torch.no_grad():
            expected = self.compute_logits(self._teacher, batch, span)
        teacher_kl = sum_kl_divergence(computed.logits, expected.logits, computed.weights) / total_weight
        return loss + self._train.teacher_weight * teacher_kl, teacher_kl

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
        """Run a skipped update, so that the optimizer allocates its moments before the capture.

        Replays allocate nothing, so moments that are allocated later would not be part of the recorded peak memory.
        """
        self._step_unless(torch.ones_like(self._is_non_finite))

    def _step_unless(self, skip: Tensor) -> None:
        """Apply the update, or nothing if `skip` is 1."""
        # The fused kernel returns early if this is 1. Multiplying the gradients by zero would keep NaN.
        self._optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue] - not declared by torch
        self._optimizer.step()


class AsyncHostCopy:
    """Copies named device vectors to the host in one asynchronous copy. `wait` waits for this copy only."""

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
        vectors = self._values.split(list(self._sizes.values()))
        return {name: vector.tolist() for name, vector in zip(self._sizes, vectors, strict=True)}


class Readback:
    """Returns the result of each step one step late, so that the device always has queued work.

    On a CPU the result is available immediately.
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
        """Return results in step order: all but the newest one, or all. Waits for these only."""
        n_kept = 1 if self._is_cuda and not include_newest else 0
        n_ready = max(len(self._pending) - n_kept, 0)
        ready, self._pending = self._pending[:n_ready], self._pending[n_ready:]
        for _, _, event in ready:
            if event is not None:
                event.synchronize()
        return [(step, result.tolist()) for step, result, _ in ready]
