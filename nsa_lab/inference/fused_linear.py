"""Linear layers with the norm before them and the activation or residual after them. Few rows: one fused kernel launch.

The kernels read the weights of the layers, which must be plain (`nsa_lab.inference.plain_weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa_lab.attention import kernels
from nsa_lab.model import Block, RMSNorm


def apply_linears(
    x: Tensor, *projections: tuple[nn.Linear, str], norm: RMSNorm | None = None, residual: Tensor | None = None
) -> list[Tensor]:
    """Return [residual + activation(layer(norm(x))), ...] for up to three (layer, activation) pairs, x [B, S, C].

    `activation`: "" (identity) or "sigmoid". `norm`, `residual`: None to omit. If x has few rows, this is one launch of the
    fused kernel; otherwise PyTorch operations.
    """
    if kernels.has_few_rows(x):
        return _launch_linears(x, *projections, norm=norm, residual=residual)
    normalized, outputs = x if norm is None else norm(x), list[Tensor]()
    for layer, activation in projections:
        output = layer(normalized)
        if activation == "sigmoid":
            output = output.to(torch.promote_types(output.dtype, torch.float32)).sigmoid().to(normalized.dtype)
        outputs.append(output if residual is None else residual + output)
    return outputs


def add_mlp(block: Block, x: Tensor) -> Tensor:
    """Return x + MLP(norm(x)), [B, S, C]."""
    mlp = block.mlp
    if not kernels.has_few_rows(x):
        return x + mlp(block.mlp_norm(x))
    (hidden,) = _launch_linears(x, (mlp.up, "silu"), norm=block.mlp_norm, is_gated=mlp.is_gated)
    return _launch_linears(hidden, (mlp.down, ""), residual=x)[0]


def _launch_linears(
    x: Tensor,
    *projections: tuple[nn.Linear, str],
    norm: RMSNorm | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> list[Tensor]:
    weights = [(layer.weight, activation) for layer, activation in projections]
    norm_args = None if norm is None else (norm.weight, norm.eps)
    return kernels.linear(x.contiguous(), *weights, norm=norm_args, residual=residual, is_gated=is_gated, can_prefetch=True)
