"""A recall task that a CPU can learn: key/value pairs, and each key again later, to be answered by its value.

    model = build_tiny_model(rotary_share=0.5)                    # NSA; attention="dense" for the dense baseline
    for point in train_tiny_model(model, steps=700):
        print(point.step, point.accuracy)

Block selection matters at these sizes: a query selects 4 of 8 blocks, 3 of them forced, and most answers to the last
questions are in the other blocks, outside the window. Results: docs/science/tiny_recall.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.evaluate.scoring import score_teacher_forced
from nsa_lab.model import NSATransformer

TINY_NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=16)
# Disjoint streams of sequences, for training and evaluation.
TRAIN_STREAM, EVAL_STREAM = 0, 1


@dataclass(frozen=True)
class TinyRecall:
    """Sequences of `length` tokens, alternating keys and values. Each pair occurs twice; the second time is a question.

    The questions of `n_far` pairs are the last `n_far` slots of two tokens; their facts are anywhere before. Fact and
    question of the other pairs are both before these slots, mostly within a window, as practice that resembles real text.
    The keys of a sequence are distinct; values are sampled independently. Tokens: keys 0 .. n_symbols - 1, then n_symbols
    values. Raises ValueError if the pairs do not fit.
    """

    length: int = 64
    n_far: int = 6
    n_symbols: int = 16

    def __post_init__(self) -> None:
        if self.length % 4 or not 1 <= self.n_far <= self.length // 4 or self.n_pairs > self.n_symbols:
            raise ValueError(
                f"length = {self.length}, n_far = {self.n_far}, n_symbols = {self.n_symbols}: expected a length that is a "
                "multiple of 4 (pairs occur twice), 1 <= n_far <= length / 4 and n_symbols >= length / 4 (distinct keys)"
            )

    @property
    def n_pairs(self) -> int:
        return self.length // 4

    @property
    def vocab_size(self) -> int:
        return 2 * self.n_symbols

    def make_batch(self, step: int, batch_size: int, seed: int = 0, stream: int = TRAIN_STREAM) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [B, T] and answer positions int64 [B, n_pairs, 1], far pairs last.

        The result depends only on the arguments.
        """
        rng = np.random.default_rng((seed, stream, step))
        n_pairs, n_far = self.n_pairs, self.n_far
        keys = _sample_distinct(rng, batch_size, self.n_symbols, n_pairs)
        values = rng.integers(self.n_symbols, 2 * self.n_symbols, (batch_size, n_pairs))
        # Slots of each pair: for near pairs two before the far questions, for far pairs one.
        slot_order = _sample_distinct(rng, batch_size, 2 * n_pairs - n_far, 2 * n_pairs - n_far)
        near_slots = np.sort(slot_order[:, n_far:].reshape(batch_size, n_pairs - n_far, 2), axis=2)
        far_slots = np.broadcast_to(np.arange(2 * n_pairs - n_far, 2 * n_pairs), (batch_size, n_far))
        slots = np.concatenate([near_slots, np.stack([slot_order[:, :n_far], far_slots], axis=2)], axis=1)
        tokens = np.empty((batch_size, 2 * n_pairs, 2), dtype=np.int64)
        rows = np.arange(batch_size)[:, None]
        for occurrence in (0, 1):
            tokens[rows, slots[:, :, occurrence]] = np.stack([keys, values], axis=2)
        return torch.from_numpy(tokens.reshape(batch_size, self.length)), torch.from_numpy(2 * slots[:, :, 1:] + 1)


def _sample_distinct(rng: np.random.Generator, rows: int, n_values: int, count: int) -> np.ndarray:
    """Return `count` distinct numbers below `n_values` per row, in random order."""
    return rng.random((rows, n_values)).argsort(axis=1)[:, :count]


@dataclass(frozen=True)
class EvalPoint:
    """Accuracy and loss (nats) of far answers in evaluation sequences after `step` steps."""

    step: int
    accuracy: float
    loss: float


def build_tiny_model(task: TinyRecall = TinyRecall(), *, seed: int = 0, **changes: Any) -> NSATransformer:
    """Return a model with two layers of width 64 and four heads in two groups; `changes`: keys of `ModelConfig`."""
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_v": 16, "nsa": TINY_NSA}
    return NSATransformer(ModelConfig(**{**sizes, "vocab_size": task.vocab_size, **changes}), seed=seed)


def train_tiny_model(
    model: NSATransformer,
    task: TinyRecall = TinyRecall(),
    *,
    steps: int = 700,
    batch_size: int = 32,
    lr: float = 4e-3,
    seed: int = 0,
    eval_every: int = 100,
    eval_also: Collection[int] = (),
    n_eval_sequences: int = 256,
) -> Iterator[EvalPoint]:
    """Train `model` on the answers of `task`, with the selection loss, and yield an `EvalPoint` every `eval_every` steps.

    eval_also: further steps after which to evaluate; 0 is the untrained model.
    n_eval_sequences: number of evaluation sequences, the same at each evaluation.
    Uses AdamW with cosine decay from `lr` to 0 and gradient clipping at 1. The sequences of a seed are the same for all
    models.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    eval_tokens, eval_positions = task.make_batch(0, n_eval_sequences, seed, EVAL_STREAM)
    far_positions = eval_positions[:, -task.n_far :]

    def evaluate(step: int) -> EvalPoint:
        model.eval()
        is_correct, losses, _ = score_teacher_forced(model, eval_tokens, far_positions)
        return EvalPoint(step, is_correct.float().mean().item(), losses.mean().item())

    if 0 in eval_also:
        yield evaluate(0)
    for step in range(steps):
        model.train()
        tokens, answer_positions = task.make_batch(step, batch_size, seed)
        loss = _compute_answer_loss(model, tokens, answer_positions) + model.auxiliary_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % eval_every == 0 or step + 1 in eval_also:
            yield evaluate(step + 1)


def _compute_answer_loss(model: NSATransformer, tokens: Tensor, answer_positions: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers in nats."""
    positions = answer_positions.flatten(1)
    logits = model(tokens[:, :-1]).gather(1, (positions - 1)[..., None].expand(-1, -1, model.config.vocab_size))
    return functional.cross_entropy(logits.flatten(0, 1), tokens.gather(1, positions).flatten())
