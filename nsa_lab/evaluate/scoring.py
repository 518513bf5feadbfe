"""Whether a model gives the answers that a sequence asks for: teacher-forced, or written by itself."""

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
    """Tokens int64 [B, T] and positions of the answers int64 [B, n, value_length], of sequences of one kind and length."""
    tokens, places = (torch.from_numpy(np.stack(part)).to(device) for part in zip(*samples, strict=True))
    return tokens, places


@torch.no_grad()
def score_teacher_forced(forward: Forward, tokens: Tensor, answer_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the logits say of the answers of tokens [B, T] at `places` [B, n, v].

    Whether each token of an answer is the likeliest one, given all true tokens before it, bool [B, n, v]; the loss of each,
    float32 [B, n, v], nats; and the mean loss of all tokens that are no answer, float32 [B].
    """
    logits, targets = forward(tokens[:, :-1]).float(), tokens[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    flat = answer_positions.flatten(1) - 1
    right = logits.argmax(-1) == targets
    text = torch.ones_like(losses).scatter(1, flat, 0.0)
    return (
        right.gather(1, flat).view_as(answer_positions),
        losses.gather(1, flat).view_as(answer_positions),
        (losses * text).sum(1) / text.sum(1),
    )


def score_generated(model: NSATransformer, samples: Sequence[RetrievalTask]) -> list[bool]:
    """Whether the model, given everything before an answer, writes that answer itself; one for every answer."""
    cut = [(one.tokens[: places[0]], one.tokens[places]) for one in samples for places in one.answers]
    prompts = [torch.from_numpy(prompt) for prompt, _ in cut]
    new = generate(model, prompts, max_new_tokens=len(cut[0][1]))
    return [bool(np.array_equal(tokens.cpu().numpy(), wanted)) for tokens, (_, wanted) in zip(new, cut, strict=True)]
