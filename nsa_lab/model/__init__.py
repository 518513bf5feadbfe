"""The model: a pre-norm decoder whose token mixing is Native Sparse Attention, or dense attention for its twin.

Invariants
* One query projection, separate keys and values for each branch (paper, section 3.3.3), all from one GEMM.
* Rotary embedding per head, after the heads are split, on queries and on the keys of every branch, before compression.
* The backend is resolved once, when the model is built, and `backends` says which and why.
* Causal: the logits at <= t do not move when tokens > t do.
* Positions restart in every document of a packed row (`Span.packed`), and no document sees another: neither by attention,
  nor by keys of the token before, nor by n-grams.
`NSAttention` is the attention layer by itself, for other models; `SparseAttention` is the layer that both are made of.
"""

from nsa_lab.config import BRANCHES
from nsa_lab.model.attention_layers import AttentionInputs, DenseAttention, ProjectedHeads, SelectionInputs, SparseAttention
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
