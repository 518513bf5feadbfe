"""Tiny `transformers` models."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import tiny_config
from torch import Tensor

from nsa_lab.inference import hf

PROMPTS = ["a", "def generate(model, prompts):\n    ", "h\u00e9llo"]


def tokenize_padded(tokenizer: hf.NSALabTokenizer, side: str = "left") -> dict[str, Tensor]:
    return tokenizer(PROMPTS, padding=True, padding_side=side, return_tensors="pt")


def sample_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(seed))


def make_model(**options: Any) -> hf.NSALabForCausalLM:
    torch.manual_seed(3)
    return hf.NSALabForCausalLM(hf.NSALabConfig(tiny_config(vocab_size=256, **options).model_dump())).double()


INDEXER = {"matching_heads": 1, "selection_loss": 0.1, "indexer_block": 2}
