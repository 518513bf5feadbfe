"""A layer's linear maps, with the norm before them and what follows them: of few rows in one launch of a kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from nsa_lab.attention import kernels
from nsa_lab.model import Block, RMSNorm


def apply_linears(
    x: Tensor,
    *projections: tuple[nn.Linear, str],
    norm: RMSNorm | None = None,
    residual: Tensor | None = None,
    use_kernels: bool,
) -> list[Tensor]:
    """[residual + then(map(norm(x))), ...] for each (map, then) of up to three, x [B, S, C]; `then` is "" or "sigmoid"."""
    if use_kernels and kernels.has_few_rows(x):
        return _launch_linears(x, *projections, norm=norm, residual=residual)
    y, out = x if norm is None else norm(x), list[Tensor]()
    for one, then in projections:
        found = linear(y, one.weight)
        if then == "sigmoid":
            found = found.to(torch.promote_types(found.dtype, torch.float32)).sigmoid().to(y.dtype)
        out.append(found if residual is None else residual + found)
    return out


def apply_mlp(block: Block, x: Tensor, *, use_kernels: bool) -> Tensor:
    """x + MLP(norm x), [B, S, C]."""
    mlp = block.mlp
    if not (use_kernels and kernels.has_few_rows(x)):
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
    weights = [(one.weight, then) for one, then in projections]
    normed_by = None if norm is None else (norm.weight, norm.eps)
    return kernels.linear(x.contiguous(), *weights, norm=normed_by, residual=residual, is_gated=is_gated, can_prefetch=True)
