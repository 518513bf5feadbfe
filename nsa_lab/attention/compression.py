"""Compression operator phi (eq. 7): map overlapping blocks of l tokens, one every d tokens, to one key or value each.

`avg` has no weights. `linear` and `mlp` add a learned intra-block position encoding to each token and map the flattened
block. `pool` is a weighted mean; the weights depend on the channel, the token and its position in the block. The last three
are modules, one for keys and one for values, shared by all groups.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nsa_lab.attention import geometry, input_checks
from nsa_lab.attention.layout import Layout, Span
from nsa_lab.attention.segment_ops import gather_rows, zero_absent_rows
from nsa_lab.config import NSAConfig

# Hidden width of phi = mlp, in head widths. A hidden layer as wide as the flattened block (2048) would give phi 100 M
# weights, more than the 78 M of the default model.
MLP_PHI_EXPANSION = 4


def compress(
    x: Tensor, nsa: NSAConfig, phi: nn.Module | None = None, *, span: Span | None = None, layout: Layout | None = None
) -> Tensor:
    """Return phi of every block: x [B, T, G, D] -> [B, N, G, D]; block i covers tokens [i*d, i*d + l).

    N = 0 if T < l else (T - l)//d + 1. x is floating point, with B, T, G and D of at least 1; the result has x's dtype.
    `phi` is the module that `make_phi` returns for `nsa.phi` (linear, mlp, pool), and None for avg.

    With a `span`, x holds all its keys. Chunk: positions 0 .. start+length-1, so N follows from start + length. Packed:
    B = 1, and the N_i blocks of document i follow those of document i-1; with a capacity, rows of zeros are appended up to
    total // d. `layout`: the span's layout for `nsa`; None: build it. Raise ValueError for inputs that are not consistent.
    """
    check_phi(nsa, phi)
    if layout is None:
        input_checks.check_keys("x", x, span)
        if span is not None and span.kind == "packed":
            layout = span.layout(nsa, x.device)
    if layout is None or layout.token_indices is None:
        return _average_blocks(x, nsa) if phi is None else phi(unfold_blocks(x, nsa))
    # The number of kernel launches does not depend on the documents.
    blocks, inverse = cast(Tensor, layout.block_indices), cast(Tensor, layout.block_inverse)
    text = gather_rows(x, layout.token_indices, cast(Tensor, layout.token_inverse))
    if phi is None:
        return gather_rows(_average_blocks(text, nsa), blocks, inverse)
    # phi is applied only to whole blocks of one document, so a non-finite value stays within its document.
    return zero_absent_rows(phi(gather_rows(unfold_blocks(text, nsa), blocks, inverse)), blocks)


def find_first_rows(n_blocks: int, nsa: NSAConfig, layout: Layout | None, device: torch.device) -> Tensor:
    """Return the row of the first token of each of the `n_blocks` blocks of `compress`, int64 [N]; arbitrary for padding.

    `layout`: of a packed span; None: a single document.
    """
    if layout is None or layout.token_indices is None or layout.block_indices is None:
        return geometry.positions(0, n_blocks, device) * nsa.d
    return layout.token_indices[layout.block_indices.clamp_min(0) * nsa.d].clamp_min(0)


def check_phi(nsa: NSAConfig, phi: nn.Module | None) -> None:
    """Raise ValueError unless `phi` is the kind of module that `nsa.phi` needs."""
    if (phi is None) != (nsa.phi == "avg"):
        raise ValueError(
            f"nsa.phi = {nsa.phi!r} and phi = {type(phi).__name__}: avg takes phi=None, "
            "linear, mlp and pool take the module that make_phi(nsa, width) builds"
        )


def make_phi(nsa: NSAConfig, width: int) -> nn.Module | None:
    """Return the module for `nsa.phi` and heads of `width`; None for avg, which has no weights."""
    if nsa.phi == "avg":
        return None
    if nsa.phi == "pool":
        return BlockPool(nsa.l, width)
    return BlockMap(nsa.l, width, hidden=MLP_PHI_EXPANSION * width if nsa.phi == "mlp" else None)


def unfold_blocks(x: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the tokens of every block, [B, T, G, D] -> [B, N, G, D, l]."""
    if geometry.num_compressed(x.shape[1], nsa):
        return x.unfold(1, nsa.l, nsa.d)
    return x.new_empty(x.shape[0], 0, *x.shape[2:], nsa.l)


def _average_blocks(x: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the mean of every block, [B, T, G, D] -> [B, N, G, D].

    Each stride of d tokens is summed once; the l/d blocks that contain it share the sum.
    """
    n = geometry.num_compressed(x.shape[1], nsa)
    n_strides = n + nsa.l // nsa.d - 1 if n else 0
    acc_dtype = torch.promote_types(x.dtype, torch.float32)  # bf16 sums in float32
    sums = torch.unflatten(x[:, : n_strides * nsa.d], 1, (n_strides, nsa.d)).sum(2, dtype=acc_dtype)
    blocks = sums[:, :n]
    for shift in range(1, nsa.l // nsa.d):
        blocks = blocks + sums[:, shift : shift + n]
    return (blocks / nsa.l).to(x.dtype)


class BlockMap(nn.Module):
    """Add position encodings, then apply a linear layer or MLP to the flattened block: [B, N, G, D, l] -> [B, N, G, D]."""

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
        # Quantized layers take at most three dimensions; adapters that differ by row need the batch as the first.
        rows = tokens.flatten(-2).flatten(1, -2)
        return self.map(rows).view(blocks.shape[:-1])


class BlockPool(nn.Module):
    """Return the weighted mean of each block's tokens, with weights per channel: [B, N, G, D, l] -> [B, N, G, D].

    The weights of a channel are a softmax over the block, in float32, of a linear map of each token plus a bias per
    position in the block, as in the key/value compression of DeepSeek-V4. Both start at zero, where the module is `avg`.
    Unlike a plain mean, it can give one distinctive token more weight than the others of its block.
    """

    def __init__(self, block: int, width: int) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.empty(width, width))
        self.place = nn.Parameter(torch.empty(width, block))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.score)
        nn.init.zeros_(self.place)

    def forward(self, blocks: Tensor) -> Tensor:
        acc_dtype = torch.promote_types(blocks.dtype, torch.float32)
        score = (self.score.to(blocks.dtype) @ blocks).to(acc_dtype) + self.place.to(acc_dtype)  # [B, N, G, D, l]
        return (score.softmax(-1) * blocks.to(acc_dtype)).sum(-1).to(blocks.dtype)
