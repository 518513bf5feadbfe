"""The compression operator phi (eq. 7): overlapping blocks of l tokens, every d tokens, to one key or value each.

`avg` has no weights. `linear` and `mlp` add a learned intra-block position encoding to each token and map the flattened
block; they are modules, one for keys and one for values, shared by the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig

MLP_EXPANSION = 4  # hidden width of phi = mlp, in head widths


def compress(x: Tensor, nsa: NSAConfig, phi: nn.Module | None = None) -> Tensor:
    """x [B, T, G, D] -> [B, N, G, D], N = 0 if T < l else (T - l)//d + 1; block i is phi of tokens [i*d, i*d + l).

    `phi` is the module of `make_phi` for `nsa.phi` linear and mlp, and None for avg. Raises ValueError otherwise.
    """
    check_phi(nsa, phi)
    n = geometry.num_compressed(x.shape[1], nsa)
    if phi is not None:
        return phi(x.unfold(1, nsa.l, nsa.d) if n else x.new_empty(x.shape[0], 0, *x.shape[2:], nsa.l))
    # Strides of d tokens are summed once and shared by the l/d blocks that overlap them; bf16 sums in float32.
    strides = n + nsa.l // nsa.d - 1 if n else 0
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    sums = x[:, : strides * nsa.d].unflatten(1, (strides, nsa.d)).sum(2, dtype=wide)
    blocks = sums[:, :n]
    for shift in range(1, nsa.l // nsa.d):
        blocks = blocks + sums[:, shift : shift + n]
    return (blocks / nsa.l).to(x.dtype)


def check_phi(nsa: NSAConfig, phi: nn.Module | None) -> None:
    """Raises ValueError unless `phi` is what `nsa.phi` needs."""
    if (phi is None) != (nsa.phi == "avg"):
        raise ValueError(
            f"nsa.phi = {nsa.phi!r} and phi = {type(phi).__name__}: avg takes phi=None, "
            "linear and mlp take the module that make_phi(nsa, width) builds"
        )


def make_phi(nsa: NSAConfig, width: int) -> nn.Module | None:
    """The module for `nsa.phi` and heads of `width`; None for avg, which has no weights."""
    return None if nsa.phi == "avg" else BlockMap(nsa.l, width, hidden=MLP_EXPANSION * width if nsa.phi == "mlp" else None)


class BlockMap(nn.Module):
    """[B, N, G, D, l] -> [B, N, G, D]: position encoding, then one linear map or an MLP over the flattened block."""

    def __init__(self, block: int, width: int, hidden: int | None) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(block, width))
        if hidden is None:
            self.map = nn.Linear(block * width, width, bias=False)
        else:
            self.map = nn.Sequential(
                nn.Linear(block * width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width, bias=False)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position, std=0.02)
        for layer in self.map.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)

    def forward(self, blocks: Tensor) -> Tensor:
        tokens = blocks.transpose(-1, -2) + self.position.to(blocks.dtype)
        return self.map(tokens.flatten(-2))
