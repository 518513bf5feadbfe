"""Score the answers of a model to retrieval questions, teacher-forced or generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nsa_lab.data.recall import RetrievalTask
from nsa_lab.inference import generate
from nsa_lab.model import NSATransformer

# tokens int64 [B, T] -> logits [B, T, V]
Forward = Callable[[Tensor], Tensor]


def stack_samples(samples: Sequence[RetrievalTask], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [B, T] and answer positions int64 [B, n, value_length] of samples of one task and length."""
    parts = [sample.tokens for sample in samples], [sample.answers for sample in samples]
    tokens, answer_positions = (torch.from_numpy(np.stack(part)).to(device) for part in parts)
    return tokens, answer_positions


@torch.no_grad()
def score_teacher_forced(forward: Forward, tokens: Tensor, answer_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score the answers in tokens [B, T] at `answer_positions` [B, n, v], given all true earlier tokens.

    Returns whether each answer token is the most likely one, bool [B, n, v]; the NLL of each answer token in nats,
    float32 [B, n, v]; and the mean NLL of all other tokens, float32 [B].
    """
    logits, targets = forward(tokens[:, :-1]).float(), tokens[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    logit_positions = answer_positions.flatten(1) - 1
    is_correct = logits.argmax(-1) == targets
    is_text = torch.ones_like(losses).scatter(1, logit_positions, 0.0)
    return (
        is_correct.gather(1, logit_positions).view_as(answer_positions),
        losses.gather(1, logit_positions).view_as(answer_positions),
        (losses * is_text).sum(1) / is_text.sum(1),
    )


def score_generated(model: NSATransformer, samples: Sequence[RetrievalTask]) -> list[bool]:
    """Return for each answer whether the model generates it from the tokens before it."""
    questions = [
        (sample.tokens[: positions[0]], sample.tokens[positions]) for sample in samples for positions in sample.answers
    ]
    prompts = [torch.from_numpy(prompt) for prompt, _ in questions]
    new = generate(model, prompts, max_new_tokens=len(questions[0][1]))
    return [bool(np.array_equal(tokens.cpu().numpy(), answer)) for tokens, (_, answer) in zip(new, questions, strict=True)]
