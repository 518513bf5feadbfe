"""Loss by position on windows of held-out text, in ranges of doubling positions. It shows the benefit of long context."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from nsa_lab.data import EvalBatches, TokenStore
from nsa_lab.model import NSATransformer

FIRST_RANGE_TOKENS = 256


@dataclass(frozen=True)
class PositionRange:
    """Loss of the tokens at positions `first` .. `last` - 1.

    `loss`: nats per token; `error`: its standard error over windows (0 for a single window); `tokens`: number of tokens;
    `windows`: loss of each window, in order.
    """

    first: int
    last: int
    loss: float
    error: float
    tokens: int
    windows: list[float]


def split_into_ranges(length: int) -> list[tuple[int, int]]:
    """Return [0, 256), [256, 512), [512, 1024) ... up to `length`; the last range may be shorter."""
    edges = [0, *(FIRST_RANGE_TOKENS << k for k in range(64) if FIRST_RANGE_TOKENS << k < length), length]
    return list(itertools.pairwise(edges))


@torch.no_grad()
def measure_loss_by_position(
    model: NSATransformer, text: TokenStore, length: int, windows: int = 16
) -> list[PositionRange]:
    """Measure the mean loss per position range over at most `windows` windows of `length` tokens, spread over `text`.

    Raises `DataError` if the text is shorter than one window.
    """
    device = model.head.weight.device
    rows = []
    for inputs, targets in EvalBatches(text, length, windows, 1):
        logits = model(inputs.to(device)).float()[0]
        rows.append(functional.cross_entropy(logits, targets[0].to(device), reduction="none").double().cpu())
    losses = torch.stack(rows)
    return [_summarize_range(losses[:, first:last], first, last) for first, last in split_into_ranges(length)]


def _summarize_range(losses: torch.Tensor, first: int, last: int) -> PositionRange:
    by_window = losses.mean(1)
    error = by_window.std().item() / math.sqrt(len(by_window)) if len(by_window) > 1 else 0.0
    return PositionRange(first, last, by_window.mean().item(), error, losses.numel(), by_window.tolist())
