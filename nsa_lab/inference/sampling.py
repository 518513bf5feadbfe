"""From logits to the next token: temperature, top-k, top-p, in this order, as the Hugging Face library has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Raises ValueError for settings that name no distribution.

    temperature: logits are divided by it; 0 takes the likeliest token, the lowest id among equals.
    top_k: only the `top_k` likeliest tokens, and those as likely as the last of them.
    top_p: only the smallest set of likeliest tokens whose probabilities reach `top_p` together (arXiv 1904.09751); never
        empty, and taken after temperature and `top_k`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature = {self.temperature!r}: expected a number from 0 (the likeliest token) up")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k = {self.top_k!r}: expected at least 1 token to draw from, or None for all of them")
        if self.top_p is not None and not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p = {self.top_p!r}: expected a probability above 0 and up to 1, or None for all tokens")

    def sample(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token of float32 logits [V] on the CPU. Raises ArithmeticError where they are not finite."""
        if not logits.isfinite().all():
            raise ArithmeticError("the model's logits are not finite; use an earlier checkpoint")
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.compute_probabilities(logits), 1, generator=generator))

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """What a temperature above 0 draws from: probabilities [V], 0 for tokens left out. The rest need not sum to 1."""
        if self.top_k is not None and self.top_k < len(logits):
            floor = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < floor, float("-inf"))
        # The largest is taken off first, so that no temperature, however small, makes an infinity.
        p = ((logits - logits.max()) / self.temperature).softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            p = _apply_top_p(p, self.top_p)
        return p


def _apply_top_p(p: Tensor, top_p: float) -> Tensor:
    """`p` [V] with 0 for every token that has `top_p` or more of the mass before it, in falling order."""
    falling, order = p.double().sort(descending=True, stable=True)
    before = falling.cumsum(-1) - falling
    return p.masked_fill((before >= top_p).gather(-1, order.argsort()), 0.0)
