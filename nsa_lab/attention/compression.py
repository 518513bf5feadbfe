"""The compression operator phi (eq. 7): overlapping blocks of l tokens, every d tokens, to one key or value each.

`avg` has no weights. `linear` and `mlp` add a learned intra-block position encoding to each token and map the flattened
block; `pool` is a mean that is weighted by channel, by what a token is and where it stands in the block. They are modules,
one for keys and one for values, shared by the groups.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_lab.attention import geometry, input_checks
from nsa_lab.attention.layout import Span
from nsa_lab.attention.segment_ops import gather_rows, map_rows, zero_absent_rows
from nsa_lab.config import NSAConfig

# Hidden width of phi = mlp, in head widths. As wide as the flattened block (2048), it would put 100 M weights into the phi
# of a model of 78 M.
MLP_PHI_EXPANSION = 4


def compress(x: Tensor, nsa: NSAConfig, phi: nn.Module | None = None, *, span: Span | None = None) -> Tensor:
    """x [B, T, G, D] -> [B, N, G, D], N = 0 if T < l else (T - l)//d + 1; block i is phi of tokens [i*d, i*d + l).

    Floating point, B, T, G and D of at least 1; the result has x's dtype. `phi` is the module of `make_phi` for `nsa.phi`
    linear, mlp and pool, and None for avg. With a span, x holds all its keys: positions 0 .. start+length-1 of a chunk,
    so that N follows from start + length; or packed documents, B = 1, whose N_i blocks lie one after another, followed
    by rows of zeros up to total // d if the span has a capacity. Raises ValueError.
    """
    input_checks.check_keys("x", x, span)
    check_phi(nsa, phi)
    if span is not None and span.kind == "packed":
        return compress_packed(x, nsa, phi, get_packed_indices(span, nsa, x.device))
    return _average_blocks(x, nsa) if phi is None else phi(_unfold_blocks(x, nsa))


class PackedBlockIndices(NamedTuple):
    """How packed documents are compressed as one text, of `Span.packed`; int64 on the device, as `packing.take` has them.

    In that text every document begins with a stride of d tokens and ends with its last whole one, and l/d strides of zeros
    stand at the end: S strides in all.
    """

    token_indices: Tensor
    """[S * d], the rows of x that make the text."""
    token_inverse: Tensor
    """[T]"""
    block_indices: Tensor
    """[N], those of the text's blocks that lie within one document."""
    block_inverse: Tensor
    """[S - l/d + 1]"""


def get_packed_indices(span: Span, nsa: NSAConfig, device: torch.device) -> PackedBlockIndices:
    """Made once per span, device, l and d; shapes as in `Span.packed`."""
    return span.get_or_build(("block_rows", device, nsa.l, nsa.d), lambda span: _build_packed_indices(span, nsa, device))


def _build_packed_indices(span: Span, nsa: NSAConfig, device: torch.device) -> PackedBlockIndices:
    # A document of L >= l tokens has L // d whole strides, and all of them lie in its blocks, since d divides l.
    strides = tuple(accumulate((document.end // nsa.d for document in span.documents), initial=0))
    most = strides[-1] if span.capacity is None else span.n_queries // nsa.d
    tokens, text, blocks = span.copy_bounds([span.bounds, strides, span.compressed_bounds(nsa)], device)
    return PackedBlockIndices(
        token_indices=map_rows((most + nsa.l // nsa.d) * nsa.d, text * nsa.d, tokens),
        token_inverse=map_rows(span.n_queries, tokens, text * nsa.d),
        block_indices=map_rows(span.num_compressed(nsa), blocks, text),
        block_inverse=map_rows(most + 1, text, blocks),
    )


def compress_packed(x: Tensor, nsa: NSAConfig, phi: nn.Module | None, packed_indices: PackedBlockIndices) -> Tensor:
    """As `compress`, for documents packed as `rows` say. What it launches does not depend on the documents."""
    text = gather_rows(x, packed_indices.token_indices, packed_indices.token_inverse)
    if phi is None:
        return gather_rows(_average_blocks(text, nsa), packed_indices.block_indices, packed_indices.block_inverse)
    # Only whole blocks of one document meet phi's weights: what is not finite elsewhere stays where it is.
    return zero_absent_rows(
        phi(gather_rows(_unfold_blocks(text, nsa), packed_indices.block_indices, packed_indices.block_inverse)),
        packed_indices.block_indices,
    )


def check_phi(nsa: NSAConfig, phi: nn.Module | None) -> None:
    """Raises ValueError unless `phi` is what `nsa.phi` needs."""
    if (phi is None) != (nsa.phi == "avg"):
        raise ValueError(
            f"nsa.phi = {nsa.phi!r} and phi = {type(phi).__name__}: avg takes phi=None, "
            "linear, mlp and pool take the module that make_phi(nsa, width) builds"
        )


def make_phi(nsa: NSAConfig, width: int) -> nn.Module | None:
    """The module for `nsa.phi` and heads of `width`; None for avg, which has no weights."""
    if nsa.phi == "avg":
        return None
    if nsa.phi == "pool":
        return BlockPool(nsa.l, width)
    return BlockMap(nsa.l, width, hidden=MLP_PHI_EXPANSION * width if nsa.phi == "mlp" else None)


def _unfold_blocks(x: Tensor, nsa: NSAConfig) -> Tensor:
    """[B, T, G, D] -> [B, N, G, D, l], the tokens of every block."""
    if geometry.num_compressed(x.shape[1], nsa):
        return x.unfold(1, nsa.l, nsa.d)
    return x.new_empty(x.shape[0], 0, *x.shape[2:], nsa.l)


def _average_blocks(x: Tensor, nsa: NSAConfig) -> Tensor:
    """[B, T, G, D] -> [B, N, G, D]. Strides of d tokens are summed once and shared by the l/d blocks that overlap them."""
    n = geometry.num_compressed(x.shape[1], nsa)
    strides = n + nsa.l // nsa.d - 1 if n else 0
    wide = x.dtype if x.dtype == torch.float64 else torch.float32  # bf16 sums in float32
    sums = torch.unflatten(x[:, : strides * nsa.d], 1, (strides, nsa.d)).sum(2, dtype=wide)
    blocks = sums[:, :n]
    for shift in range(1, nsa.l // nsa.d):
        blocks = blocks + sums[:, shift : shift + n]
    return (blocks / nsa.l).to(x.dtype)


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


class BlockPool(nn.Module):
    """[B, N, G, D, l] -> [B, N, G, D]: a mean over the block's tokens, weighted by channel.

    The weights of a channel are a softmax over the block, in float32, of a linear map of each token and a bias of its
    place, as DeepSeek-V4 compresses keys and values; both start at zero, and phi as `avg`. A token that tells much can so
    outweigh the others of its block, where a mean of many keys drowns it.
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
        wide = torch.promote_types(blocks.dtype, torch.float32)
        score = (self.score.to(blocks.dtype) @ blocks).to(wide) + self.place.to(wide)  # [B, N, G, D, l]
        return (score.softmax(-1) * blocks.to(wide)).sum(-1).to(blocks.dtype)
