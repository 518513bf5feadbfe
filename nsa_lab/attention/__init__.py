"""Native Sparse Attention: definition (`reference`), fast backends, and the public functions that dispatch to them."""

from nsa_lab.attention import reference
from nsa_lab.attention.compression import compress
from nsa_lab.attention.dense import dense_attention
from nsa_lab.attention.dispatch import (
    BackendError,
    compressed_attention,
    nsa_attention,
    resolve_backend,
    score_and_select_blocks,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_lab.attention.layout import Span
from nsa_lab.attention.padding import pack_padded, unpack_padded
from nsa_lab.attention.selection_loss import selection_loss

__all__ = [
    "BackendError",
    "Span",
    "compress",
    "compressed_attention",
    "dense_attention",
    "nsa_attention",
    "pack_padded",
    "reference",
    "resolve_backend",
    "score_and_select_blocks",
    "select_blocks",
    "selected_attention",
    "selection_loss",
    "unpack_padded",
    "window_attention",
]
