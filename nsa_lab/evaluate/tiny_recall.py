"""Recall small enough to learn on a CPU: keys and their values, each key once more later, to be answered by its value.

    model = tiny_model(rotary_share=0.5)                          # NSA; attention="dense" for its twin
    for point in learn(model, steps=700):
        print(point.step, point.accuracy)

The sizes are such that the choice of blocks matters: a query reads 4 of 8 blocks, 3 of them forced, and most of what the
last questions ask for stands in the others, outside the window. docs/science/tiny_recall.md has what came out.
"""

from __future__ import annotations

from collections.abc import Iterator
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
# Streams of sequences that never meet: what is trained on, and what is asked.
TRAIN_STREAM, EVAL_STREAM = 0, 1


@dataclass(frozen=True)
class TinyRecall:
    """Sequences of `length` tokens, key and value by turns; every pair stands twice, and the second time is a question.

    `far` pairs are told anywhere before the last `far` slots of two tokens, and asked there. All other slots are told and
    asked between them, mostly within a window: practice, as real text has it. Keys of a sequence differ, values are drawn
    anew. Tokens are keys 0 .. symbols-1, then as many values. Raises ValueError where the pairs do not fit.
    """

    length: int = 64
    n_far: int = 6
    n_symbols: int = 16

    def __post_init__(self) -> None:
        if self.length % 4 or not 1 <= self.n_far <= self.length // 4 or self.n_pairs > self.n_symbols:
            raise ValueError(
                f"length = {self.length}, far = {self.n_far}, symbols = {self.n_symbols}: expected a length that holds every "
                "pair twice (a multiple of 4), 1 <= far <= length / 4, and length / 4 symbols or more, so that keys differ"
            )

    @property
    def n_pairs(self) -> int:
        return self.length // 4

    @property
    def vocab_size(self) -> int:
        return 2 * self.n_symbols

    def make_batch(self, step: int, batch_size: int, seed: int = 0, stream: int = TRAIN_STREAM) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, T] and where the answers stand, int64 [B, pairs, 1], the far ones last.

        A function of the arguments alone.
        """
        draw = np.random.default_rng((seed, stream, step))
        n, far = self.n_pairs, self.n_far
        keys = _sample_distinct(draw, batch_size, self.n_symbols, n)
        values = draw.integers(self.n_symbols, 2 * self.n_symbols, (batch_size, n))
        # Where each pair stands, in slots: two of the places before the questions for the near, one for the far.
        places = _sample_distinct(draw, batch_size, 2 * n - far, 2 * n - far)
        near = np.sort(places[:, far:].reshape(batch_size, n - far, 2), axis=2)
        last = np.broadcast_to(np.arange(2 * n - far, 2 * n), (batch_size, far))
        slots = np.concatenate([near, np.stack([places[:, :far], last], axis=2)], axis=1)
        tokens = np.empty((batch_size, 2 * n, 2), dtype=np.int64)
        rows = np.arange(batch_size)[:, None]
        for time in (0, 1):
            tokens[rows, slots[:, :, time]] = np.stack([keys, values], axis=2)
        return torch.from_numpy(tokens.reshape(batch_size, self.length)), torch.from_numpy(2 * slots[:, :, 1:] + 1)


def _sample_distinct(rng: np.random.Generator, rows: int, n_values: int, count: int) -> np.ndarray:
    """`count` different numbers below `of` in each row, in random order."""
    return rng.random((rows, n_values)).argsort(axis=1)[:, :count]


@dataclass(frozen=True)
class EvalPoint:
    """After `step` steps: share of the answers of fresh sequences that are right, and their loss, nats."""

    step: int
    accuracy: float
    loss: float


def build_tiny_model(task: TinyRecall = TinyRecall(), *, seed: int = 0, **changes: Any) -> NSATransformer:
    """A model of two layers of width 64 for `task`, four heads in two groups; `changes` are keys of `ModelConfig`."""
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
    n_eval_sequences: int = 256,
) -> Iterator[EvalPoint]:
    """Train `model` on the answers of `task`, selection loss included; a `Learned` each `every` steps.

    `asked`: how many fresh sequences it is then asked with, the same each time.
    AdamW, a rate that falls from `lr` to 0 along a cosine, gradients clipped at 1. The sequences of a seed are the same for
    every model.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    fresh, questions = task.make_batch(0, n_eval_sequences, seed, EVAL_STREAM)
    far = questions[:, -task.n_far :]
    for step in range(steps):
        model.train()
        tokens, places = task.make_batch(step, batch_size, seed)
        loss = _compute_answer_loss(model, tokens, places) + model.auxiliary_loss()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        falling.step()
        if (step + 1) % eval_every == 0:
            model.eval()
            right, losses, _ = score_teacher_forced(model, fresh, far)
            yield EvalPoint(step + 1, right.float().mean().item(), losses.mean().item())


def _compute_answer_loss(model: NSATransformer, tokens: Tensor, answer_positions: Tensor) -> Tensor:
    """Mean cross-entropy of the answers, nats."""
    at = answer_positions.flatten(1)
    logits = model(tokens[:, :-1]).gather(1, (at - 1)[..., None].expand(-1, -1, model.config.vocab_size))
    return functional.cross_entropy(logits.flatten(0, 1), tokens.gather(1, at).flatten())
