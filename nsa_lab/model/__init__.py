"""The model: a pre-norm decoder with Native Sparse Attention, or with dense attention for the baseline.

Invariants
* One query projection and separate keys and values for each branch (paper, section 3.3.3), all computed by one GEMM.
* RoPE per head on queries and on the keys of every branch, before compression.
* The backend is resolved once, when the model is built; `backends` holds the result and the reason.
* Causality: tokens > t do not change logits at <= t.
* Positions restart in every document of a packed row (`Span.packed`). No document affects another, neither by attention nor
  by the shifted keys of induction-initialized heads nor by n-grams.

`NSAttention` is the attention layer for other models. `SparseAttention` is the layer that both models contain.
"""

from nsa_lab.config import BRANCHES
from nsa_lab.model.attention_layers import AttentionInputs, DenseAttention, SelectionInputs, SparseAttention
from nsa_lab.model.head_projections import ProjectedHeads
from nsa_lab.model.indexer import Indexer, IndexerOutput
from nsa_lab.model.layers import MLP, RMSNorm, Rotary, ShortConvolution, compute_rotary, get_rotary_table, rotate
from nsa_lab.model.nsa_layer import NSAttention
from nsa_lab.model.statistics import compute_branch_statistics
from nsa_lab.model.transformer import BACKWARD_FLOPS, Block, NSATransformer

__all__ = [
    "BACKWARD_FLOPS",
    "BRANCHES",
    "MLP",
    "AttentionInputs",
    "Block",
    "DenseAttention",
    "Indexer",
    "IndexerOutput",
    "NSATransformer",
    "NSAttention",
    "ProjectedHeads",
    "RMSNorm",
    "Rotary",
    "SelectionInputs",
    "ShortConvolution",
    "SparseAttention",
    "compute_branch_statistics",
    "compute_rotary",
    "get_rotary_table",
    "rotate",
]
