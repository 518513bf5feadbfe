"""Native Sparse Attention (NSA, arXiv 2502.11089): the operator, a layer, a model, and what trains and judges them.

    NSAttention         a layer to put into a model of one's own, x [B, T, C] -> [B, T, C]
    nsa_attention       the operator itself, on queries, keys, values and gates
    NSAConfig           its geometry: block lengths, strides, budget, window
    Span                where queries stand: a whole document, a chunk of one, or several documents packed into one row
    NSATransformer      a language model of such layers, tokens [B, T] -> logits [B, T, V]
    load_model          the trained model of a run or of a checkpoint
    generate            the tokens that follow prompts

Importing this package loads nothing; a name is loaded when it is first used, so that `nsa_lab.runs.lifecycle` and the command
line start without torch. The operator and the model need torch, numpy and pydantic; training, notebooks and data sources
are extras (`nsa_lab.config.optional_deps`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_lab.attention import Span, nsa_attention
    from nsa_lab.config import NSAConfig
    from nsa_lab.inference import generate, load_model
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
]

_MODULE_BY_NAME = {
    "NSAConfig": "nsa_lab.config",
    "NSATransformer": "nsa_lab.model",
    "NSAttention": "nsa_lab.model",
    "Span": "nsa_lab.attention",
    "generate": "nsa_lab.inference",
    "load_model": "nsa_lab.inference",
    "nsa_attention": "nsa_lab.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'nsa_lab' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
