"""NSA as a layer by itself, to put where attention was in another model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span
from nsa_lab.attention.input_checks import SUPPORTED_DTYPES
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model.attention_layers import SparseAttention, scale_selection_loss
from nsa_lab.model.init_weights import initialize_weights
from nsa_lab.model.layers import Rotary, check_span, get_rotary_table

# What autocast casts to its own dtype; it leaves float64, whole numbers and everything else as they are.
AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NSAttention(nn.Module):
    """Native Sparse Attention as a layer to put where attention was: x [B, T, C] -> [B, T, C], C = `dim`.

    One query projection of `n_heads` heads, keys and values of `n_kv_groups` groups for each branch, rotary embedding of
    its own, gate and output projection (arXiv 2502.11089, section 3.3). No norm and no residual connection. The backend is
    resolved for the device and dtype that attention computes in, autocast included. Weights start from torch's global
    generator, by the rules of `NSATransformer`; the output projection at fan_in**-0.5, since the depth is not known here.

    `head_dim` (queries and keys) is dim // n_heads by default, `value_dim` is head_dim; `rotary_share`, `matching_heads`,
    `selection_loss`, `indexer_block` and `indexer_width` are as in `ModelConfig`. With a selection loss, add
    `auxiliary_loss()` to the loss of every training step. Raises ValueError for sizes that do not go together.
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
    ) -> None:
        super().__init__()
        d_k = _get_head_width(dim, n_heads) if head_dim is None else head_dim
        if d_k % 2:
            near = " or ".join(f"head_dim={width}" for width in (d_k - 1, d_k + 1) if width > 0)
            raise ValueError(f"NSAttention: head_dim = {d_k} is odd, and rotary embedding turns pairs; give {near}")
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
            nsa=nsa,
        )
        self.config = config
        self.attention = SparseAttention(config, None)
        self._selection_loss: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New weights from torch's global generator."""
        initialize_weights(self, residual_scale=1.0)

    def forward(self, x: Tensor, span: Span | None = None) -> Tensor:
        """x [B, T, C] in the dtype of the weights, its rows both queries and keys -> [B, T, C]. With `Span.packed`, B is 1.

        Raises ValueError for x of another shape or dtype (under autocast: any that it casts), and for a chunk that starts
        past 0: its earlier keys are in no cache here.
        """
        c = self.config
        self._selection_loss = None  # if this pass fails, the one before it is not the last
        if not isinstance(x, Tensor):
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}] as a tensor, got a {type(x).__name__}")
        if x.ndim != 3 or x.shape[2] != c.dim:
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}], got {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"NSAttention: expected x [B, T, {c.dim}], B and T at least 1; got {tuple(x.shape)}")
        self._check_dtype(x)
        check_span(span, x.shape[1])
        mixed, self._selection_loss = self.attention(x, self.compute_rotary(x, span), span)
        return mixed

    def _check_dtype(self, x: Tensor) -> None:
        weights = self.attention.gate.weight.dtype
        if torch.is_autocast_enabled(x.device.type) and {x.dtype, weights} <= set(AUTOCAST_DTYPES):
            return
        # Weights that are no floating-point numbers are another package's quantised ones, which takes what it takes.
        if x.dtype != weights and weights.is_floating_point:
            name = str(weights).removeprefix("torch.")
            raise ValueError(
                f"NSAttention: expected x in {weights}, the dtype of its weights, got {x.dtype}; use x.to(torch.{name})"
                + (", or cast the layer: layer.to(x.dtype)" if x.dtype in SUPPORTED_DTYPES else "")
            )

    def compute_rotary(self, x: Tensor, span: Span | None = None) -> Rotary:
        """The angles that queries and keys of x [B, T, C] are turned by."""
        c = self.config
        return get_rotary_table(x.shape[1], c.rotary_width, c.rope_theta, x.device, span)

    def auxiliary_loss(self) -> Tensor:
        """The selection loss of the last forward pass times its weight, 0-d; 0 in evaluation, or with a weight of 0."""
        return scale_selection_loss(self._selection_loss, self.config.selection_loss, self.attention.out.weight)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_taught": None}  # of a pass, not of the layer: a copy has none


def _get_head_width(dim: int, n_heads: int) -> int:
    if n_heads < 1:
        raise ValueError(f"NSAttention: n_heads = {n_heads}: expected at least 1")
    if dim % n_heads:
        low = max(dim // n_heads, 1) * n_heads
        raise ValueError(
            f"NSAttention: dim = {dim} does not divide into n_heads = {n_heads}; "
            f"give head_dim=, or use dim = {low} or {low + n_heads}"
        )
    return dim // n_heads
