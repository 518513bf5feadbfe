"""Native Sparse Attention (NSA, arXiv 2502.11089): operator, layer, language model, training and evaluation.

    NSAttention         attention layer for your own model, x [B, T, C] -> [B, T, C]
    nsa_attention       the operator: queries, keys, values and gates -> output
    NSAConfig           block lengths, stride, number of selected blocks, window
    Span                sequence layout: one document, a chunk of one, or documents packed into one row
    NSATransformer      decoder-only language model, tokens [B, T] -> logits [B, T, V]
    load_model          load the trained model of a run or checkpoint, or a converted model
    generate            generate the tokens that follow given prompts
    sparsify            convert a pretrained model of `transformers` to sparse attention

`import nsa_lab` loads no submodule. Each name is imported on first use, so the command line and `nsa_lab.runs.lifecycle`
start without torch. The operator and the model need torch, numpy and pydantic. Training, notebooks and data sources are
optional extras (`nsa_lab.config.optional_deps`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_lab.attention import Span, nsa_attention
    from nsa_lab.config import NSAConfig
    from nsa_lab.convert import sparsify
    from nsa_lab.inference import generate
    from nsa_lab.load import load_model
    from nsa_lab.model import NSATransformer, NSAttention

__version__ = "0.1.0"

__all__ = [
    "NSAConfig",
    "NSATransformer",
    "NSAttention",
    "Span",
    "__version__",
    "generate",
    "load_model",
    "nsa_attention",
    "sparsify",
]

_MODULE_BY_NAME = {
    "NSAConfig": "nsa_lab.config",
    "NSATransformer": "nsa_lab.model",
    "NSAttention": "nsa_lab.model",
    "Span": "nsa_lab.attention",
    "generate": "nsa_lab.inference",
    "load_model": "nsa_lab.load",
    "nsa_attention": "nsa_lab.attention",
    "sparsify": "nsa_lab.convert",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'nsa_lab' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
