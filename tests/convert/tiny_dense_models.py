"""Tiny dense models of `transformers`, one for each variation of the supported families."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from nsa_lab import NSAConfig

VOCAB_SIZE = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # attention far from uniform, so that a missing token changes the logits
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "rope_parameters": LLAMA3},
    "SmolLM2": {"tie_word_embeddings": True, "num_key_value_heads": 3},
    "Mistral": {"sliding_window": None, "num_key_value_heads": 1},
    "Qwen2": {"num_key_value_heads": 6, "rope_parameters": YARN},
    "Qwen3": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}
CLASS_NAMES = {"SmolLM2": "Llama"}
# 16 blocks of 4 tokens: every block of a text of 64 tokens. `FEW` selects one block in addition to the forced ones.
ALL = NSAConfig(l=4, d=4, l_sel=4, n_sel=16, sink_blocks=1, local_blocks=2)
FEW = ALL.model_copy(update={"n_sel": 4})


def make_dense(family: str = "Llama", **options: Any) -> PreTrainedModel:
    """Return a dense model with random weights, in evaluation mode; biases and norms are random too."""
    name = CLASS_NAMES.get(family, family)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **FAMILIES[family], **options})
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def make_tokens(n_rows: int = 2, n_columns: int = 50, seed: int = 0) -> torch.Tensor:
    """Return random tokens int64 [n_rows, n_columns]."""
    return torch.randint(VOCAB_SIZE, (n_rows, n_columns), generator=torch.Generator().manual_seed(seed))
