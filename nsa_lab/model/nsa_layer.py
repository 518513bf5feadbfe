"""Native Sparse Attention as a stand-alone layer that replaces the attention of another model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span
from nsa_lab.attention.compile_utils import check_not_traced
from nsa_lab.attention.dispatch import BACKENDS
from nsa_lab.attention.input_checks import SUPPORTED_DTYPES
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model.attention_layers import SparseAttention, scale_selection_loss
from nsa_lab.model.init_weights import initialize_weights
from nsa_lab.model.layers import Rotary, check_span, get_rotary_table
from nsa_lab.model.placement import find_placement

# Autocast casts these to its own dtype. It leaves float64, integers and everything else unchanged.
AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NSAttention(nn.Module):
    """Native Sparse Attention as a drop-in layer: x [B, T, C] -> [B, T, C], C = `dim`.

    The layer has one query projection with `n_heads` heads, keys and values with `n_kv_groups` groups for each branch,
    RoPE, a gate and an output projection (arXiv 2502.11089, section 3.3). It has no norm and no residual connection. The
    backend is resolved for the device and dtype that attention computes in, including autocast. Weights are initialized
    from PyTorch's global generator as in `NSATransformer`, except that the output projection has a standard deviation of
    fan_in**-0.5, because the depth is unknown here.

    `head_dim` (queries and keys): default dim // n_heads. `value_dim`: default head_dim. `rotary_share`, `matching_heads`,
    `selection_loss`, `branches`, `shared_kv` and the options of the indexer: as in `ModelConfig`. With a selection loss,
    add `auxiliary_loss()` to the loss in every training step. `backend`: as in `NSATransformer`; one that is requested by
    name and cannot run raises BackendError or NotImplementedError in the forward pass. Raise ValueError for sizes that are
    not consistent and for an unknown backend.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        nsa: NSAConfig = NSAConfig(),  # noqa: B008 - frozen
        rope_theta: float = 10000.0,
        rotary_share: float = 1.0,
        matching_heads: int = 0,
        selection_loss: float = 0.0,
        indexer_block: int = 0,
        indexer_width: int = 0,
        indexer_heads: int = 1,
        indexer_keys: Literal["group", "shared"] = "group",
        indexer_order: Sequence[Literal["rotate", "pool", "norm"]] = ("rotate", "pool"),
        indexer_dtype: Literal["bf16", "fp8", "mxfp4"] = "bf16",
        branches: Sequence[Literal["cmp", "sel", "win"]] = ("cmp", "sel", "win"),
        shared_kv: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"NSAttention: backend = {backend!r}: expected one of {', '.join(BACKENDS)}")
        d_k = _get_head_width(dim, n_heads) if head_dim is None else head_dim
        if d_k % 2:
            near = " or ".join(f"head_dim={width}" for width in (d_k - 1, d_k + 1) if width > 0)
            raise ValueError(f"NSAttention: head_dim = {d_k} is odd, but RoPE rotates pairs of channels; use {near}")
        config = ModelConfig(
            dim=dim,
            n_heads=n_heads,
            n_kv_groups=n_kv_groups,
            d_k=d_k,
            d_v=d_k if value_dim is None else value_dim,
            rope_theta=rope_theta,
            rotary_share=rotary_share,
            matching_heads=matching_heads,
            selection_loss=selection_loss,
            indexer_block=indexer_block,
            indexer_width=indexer_width,
            indexer_heads=indexer_heads,
            indexer_keys=indexer_keys,
            indexer_order=tuple(indexer_order),
            indexer_dtype=indexer_dtype,
            branches=tuple(branches),
            shared_kv=shared_kv,
            nsa=nsa,
        )
        self.config = config
        self.attention = SparseAttention(config, None, backend)
        self._selection_loss: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights from PyTorch's global generator."""
        initialize_weights(self, residual_scale=1.0)

    def forward(self, x: Tensor, span: Span | None = None) -> Tensor:
        """Return attention of x [B, T, C] to itself, [B, T, C]. x has the dtype of the weights. With `Span.packed`, B is 1.

        Raise ValueError for x of another shape or dtype (autocast allows all dtypes that it casts), and for a chunk that
        starts after position 0, because the layer has no cache with its earlier keys.
        """
        check_not_traced()
        c = self.config
        self._selection_loss = None  # in case this pass fails: do not return the loss of the pass before
        if not isinstance(x, Tensor):
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}] as a tensor, got a {type(x).__name__}")
        if x.ndim != 3 or x.shape[2] != c.dim:
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}], got {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}], B and T at least 1; got {tuple(x.shape)}")
        self._check_dtype(x)
        check_span(span, x.shape[1])
        out, selection = self.attention(x, self.compute_rotary(x, span), span)
        self._selection_loss = selection.loss
        return out

    def _check_dtype(self, x: Tensor) -> None:
        weight_dtype = find_placement(self).dtype
        if torch.is_autocast_enabled(x.device.type) and {x.dtype, weight_dtype} <= set(AUTOCAST_DTYPES):
            return
        # Weights with an integer dtype are quantized by another package, which checks its own inputs.
        if x.dtype != weight_dtype and weight_dtype.is_floating_point:
            name = str(weight_dtype).removeprefix("torch.")
            raise ValueError(
                f"NSAttention: expected x in {weight_dtype}, as its weights, got {x.dtype}; use x.to(torch.{name})"
                + (", or cast the layer: layer.to(x.dtype)" if x.dtype in SUPPORTED_DTYPES else "")
            )

    def compute_rotary(self, x: Tensor, span: Span | None = None) -> Rotary:
        """Return the RoPE tables at the positions of x [B, T, C]."""
        c = self.config
        return get_rotary_table(x.shape[1], c.rotary_width, c.rope_theta, x.device, span)

    def auxiliary_loss(self) -> Tensor:
        """Return the selection loss of the last forward pass times its weight, 0-d; 0 in eval mode or with weight 0."""
        return scale_selection_loss(self._selection_loss, self.config.selection_loss, self.attention.out.weight)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_selection_loss": None}  # belongs to a forward pass, not to the layer; do not copy it


def _get_head_width(dim: int, n_heads: int) -> int:
    if n_heads < 1:
        raise ValueError(f"NSAttention: n_heads = {n_heads}: expected at least 1")
    if dim % n_heads:
        low = max(dim // n_heads, 1) * n_heads
        raise ValueError(
            f"NSAttention: dim = {dim} is not a multiple of n_heads = {n_heads}; "
            f"set head_dim=, or use dim = {low} or {low + n_heads}"
        )
    return dim // n_heads
