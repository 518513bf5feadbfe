"""A layer's linear maps, with the norm before them and what follows them: of few rows in one launch of a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from nsa_lab.attention import kernels
from nsa_lab.model import Block, RMSNorm

THEN: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "silu": silu, "sigmoid": torch.sigmoid}
"""What may follow a map."""


def mapped(
    x: Tensor,
    *maps: tuple[nn.Linear, str],
    norm: RMSNorm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    by_kernels: bool,
) -> list[Tensor]:
    """[residual + then(map(norm(x))), ...] for each (map, then) of up to three, x [B, S, C]; as `kernels.linear`."""
    if by_kernels and kernels.few(x):
        weights = [(one.weight, then) for one, then in maps]
        normed_by = None if norm is None else (norm.weight, norm.eps)
        return kernels.linear(x.contiguous(), *weights, norm=normed_by, residual=residual, gated=gated)
    y, out = x if norm is None else norm(x), list[Tensor]()
    for one, then in maps:
        found = linear(y, one.weight)
        if gated:
            found, times = found.chunk(2, dim=-1)
            found = THEN[then](found) * times
        elif then:
            wide = torch.promote_types(found.dtype, torch.float32) if then == "sigmoid" else found.dtype
            found = THEN[then](found.to(wide)).to(y.dtype)
        out.append(found if residual is None else residual + found)
    return out


def fed_forward(block: Block, x: Tensor, *, by_kernels: bool) -> Tensor:
    """x + MLP(norm x), [B, S, C]."""
    mlp = block.mlp
    (hidden,) = mapped(x, (mlp.up, "silu"), norm=block.mlp_norm, gated=mlp.gated, by_kernels=by_kernels)
    return mapped(hidden, (mlp.down, ""), residual=x, by_kernels=by_kernels)[0]
