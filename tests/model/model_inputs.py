"""Small models and random tokens for model tests."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer

TINY_NSA = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 10}
VARIANTS = [
    {"phi": phi, "gate": gate, "mlp": mlp}
    for phi, gate, mlp in itertools.product(["avg", "linear", "mlp", "pool"], ["sigmoid", "softmax"], ["plain", "gated"])
]

NGRAMS = {"ngrams": 5, "ngram_rows": 37, "ngram_width": 4}


def format_variant(variant: dict[str, Any]) -> str:
    return "-".join(value if isinstance(value, str) else f"{name}_{value}" for name, value in variant.items())


def make_config(*, phi: str = "avg", gate: str = "sigmoid", nsa: dict[str, int] | None = None, **model: Any) -> ModelConfig:
    """Return a configuration of two layers of width 24, with 4 heads in 2 groups, d_k = 6 and d_v = 5."""
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 5, "vocab_size": 64}
    return ModelConfig(**{**sizes, **model}, nsa=NSAConfig(**{**TINY_NSA, **(nsa or {})}, phi=phi, gate=gate))


def make_tokens(config: ModelConfig, length: int, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def compute_loss(model: NSATransformer, tokens: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy of tokens [B, T + 1]."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
