"""Sampling of the next token from logits: temperature, top-k and top-p, applied as in Hugging Face transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-30  # a smaller divisor is 0 in float32; the result is the same


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Raises ValueError for invalid values.

    temperature: divides the logits. 0 selects the most likely token; of equal tokens, the lowest id.
    top_k: sample only from the `top_k` most likely tokens and tokens tied with the last of them.
    top_p: sample only from the smallest set of most likely tokens with total probability >= `top_p` (arXiv 1904.09751),
        computed after temperature and `top_k`. The set is never empty.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise ValueError(
                f"temperature = {self.temperature!r}: expected a finite number >= 0 (0: the most likely token)"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k = {self.top_k!r}: expected an integer >= 1, or None for all tokens")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p = {self.top_p!r}: expected a probability in (0, 1], or None for all tokens")

    def sample(self, logits: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """Sample a token from each row of float32 logits [B, V] on the CPU, with a generator per row.

        Raises ArithmeticError if the logits are not finite.
        """
        if not logits.isfinite().all():
            raise ArithmeticError("the model's logits are not finite; use an earlier checkpoint")
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        return [
            int(torch.multinomial(self.compute_probabilities(row), 1, generator=generator))
            for row, generator in zip(logits, generators, strict=True)
        ]

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities [V] for a temperature > 0; 0 for excluded tokens. The others may sum to less than 1."""
        if self.top_k is not None and self.top_k < len(logits):
            floor = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < floor, float("-inf"))
        # Subtract the maximum first, so that a small temperature does not overflow.
        p = ((logits - logits.max()) / max(self.temperature, MIN_TEMPERATURE)).softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            p = _apply_top_p(p, self.top_p)
        return p


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _apply_top_p(p: Tensor, top_p: float) -> Tensor:
    """Return p [V] with 0 for each token preceded, in descending order, by at least `top_p` of the probability."""
    descending, order = p.double().sort(descending=True, stable=True)
    preceding = descending.cumsum(-1) - descending
    return p.masked_fill((preceding >= top_p).gather(-1, order.argsort()), 0.0)
