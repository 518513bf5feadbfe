"""Models that decode in float64 within milliseconds."""

from __future__ import annotations

import torch

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer

TINY_NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)


def tiny_config(**changes: object) -> ModelConfig:
    """Return a configuration of two layers with odd widths and 37 tokens."""
    return ModelConfig(
        **{
            "dim": 24,
            "n_layers": 2,
            "n_heads": 4,
            "n_kv_groups": 2,
            "d_k": 8,
            "d_v": 6,
            "vocab_size": 37,
            "nsa": TINY_NSA,
            **changes,
        }
    )


def build_model(config: ModelConfig) -> NSATransformer:
    return NSATransformer(config, dtype=torch.float64, seed=5).double()
