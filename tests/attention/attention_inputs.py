"""Inputs for attention tests: random tensors of any shape, configurations, and variants of the torch backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import brute_force
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa_lab.attention import geometry, torch_backend
from nsa_lab.config import NSAConfig

SMALL = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=5)
GEOMETRIES = {
    "default": NSAConfig(),
    "small": SMALL,
    "no overlap": NSAConfig(l=4, d=4, l_sel=8, n_sel=3, w=3),
    "compression longer than selection": NSAConfig(l=12, d=2, l_sel=4, n_sel=4, w=7),
    "stride one": NSAConfig(l=3, d=1, l_sel=2, n_sel=3, w=1),
    "all ones": NSAConfig(l=1, d=1, l_sel=1, n_sel=3, w=2),
    "selection not a power of two": NSAConfig(l=6, d=3, l_sel=15, n_sel=5, w=100),
}

# Name of a variant: the backend, and settings of the torch backend that select one of its code paths.
VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {},
    "torch": {},
    "torch, one query a chunk": {"CHUNK_BYTES": {"cpu": 1}},
    "torch, small chunks": {"CHUNK_BYTES": {"cpu": 4096}},
    "torch, gathering": {"GATHER_MIN_BUDGETS": 0},
    "torch, gathering in small chunks": {"GATHER_MIN_BUDGETS": 0, "CHUNK_BYTES": {"cpu": 4096}},
}
TORCH_VARIANTS = [variant for variant in VARIANTS if variant != "reference"]


def _parametrize_variants(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test with each of these variants; those with the smallest chunks are slow or nightly."""
    marks = {"torch, one query a chunk": [pytest.mark.slow], "torch, gathering in small chunks": [pytest.mark.nightly]}
    return pytest.mark.parametrize("variant", [pytest.param(variant, marks=marks.get(variant, [])) for variant in names])


every_variant, every_torch_variant = _parametrize_variants(VARIANTS), _parametrize_variants(TORCH_VARIANTS)


@contextmanager
def use_variant(variant: str, batch: int = 1) -> Iterator[str]:
    """Run the torch backend as `variant` in this context, and yield the backend's name.

    `batch`: multiply the chunk sizes, so that a batch has as many queries per chunk as a single sequence.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIANTS[variant].items():
            scaled = {device: size * batch for device, size in value.items()} if isinstance(value, dict) else value
            patch.setattr(torch_backend, name, scaled)
        yield variant.split(",")[0]


class Inputs(NamedTuple):
    """Arguments of `nsa_attention`, in its order."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    def map(self, change: Any) -> Inputs:
        return Inputs(*(change(x) for x in self))


@dataclass(frozen=True)
class Shape:
    """All sizes of a call."""

    nsa: NSAConfig = SMALL
    T: int = 21
    B: int = 1
    G: int = 2
    h: int = 3
    d_k: int = 6
    d_v: int = 4
    seed: int = 0

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Draw normal queries, keys and values. The queries are scaled up, so that the softmax is far from uniform."""
        generator = torch.Generator().manual_seed(self.seed)
        N = geometry.num_compressed(self.T, self.nsa)

        def normal(tokens: int, heads: int, width: int) -> Tensor:
            return torch.randn(self.B, tokens, heads, width, generator=generator, dtype=torch.float64)

        pairs = [normal(tokens, self.G, width) for tokens in (N, self.T, self.T) for width in (self.d_k, self.d_v)]
        q = 2 * normal(self.T, self.G * self.h, self.d_k)
        gates = normal(self.T, self.G * self.h, 3).sigmoid()
        return Inputs(q, *pairs, gates).map(lambda x: x.to(dtype))


@st.composite
def random_shapes(draw: st.DrawFn, max_tokens: int = 40) -> Shape:
    """Draw any shape that the configuration allows, small enough for the brute force."""
    d = draw(st.integers(1, 4))
    nsa = NSAConfig(
        l=d * draw(st.integers(1, 4)),
        d=d,
        l_sel=d * draw(st.integers(1, 4)),
        n_sel=draw(st.integers(3, 5)),
        w=draw(st.integers(1, 12)),
    )
    width = st.integers(1, 5)
    return Shape(
        nsa,
        draw(st.integers(1, max_tokens)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(width),
        draw(width),
        draw(st.integers(0, 2**16)),
    )


# Fixed examples in addition to those of hypothesis: the corner cases that implementations of NSA often get wrong.
CORNERS = {
    "one token": Shape(T=1),
    "shorter than a compression block": Shape(T=3),
    "shorter than a selection block": Shape(nsa=NSAConfig(l=2, d=2, l_sel=8, n_sel=3, w=3), T=7),
    "one whole compression block": Shape(T=4),
    "odd length, cut last block": Shape(T=29, B=2),
    "compression longer than selection": Shape(nsa=GEOMETRIES["compression longer than selection"], T=31),
    "stride equals compression": Shape(nsa=GEOMETRIES["no overlap"], T=37),
    "stride one": Shape(nsa=GEOMETRIES["stride one"], T=19, G=3, h=1),
    "all ones": Shape(nsa=GEOMETRIES["all ones"], T=17, G=1, h=5),
    "long against its budget": Shape(nsa=NSAConfig(l=2, d=1, l_sel=1, n_sel=3, w=2), T=41, h=2),
    "one group, values wider than keys": Shape(G=1, h=4, d_k=2, d_v=7),
}


def to_brute_force_geometry(nsa: NSAConfig) -> brute_force.Geometry:
    forced, reductions = (nsa.sink_blocks, nsa.local_blocks), (nsa.head_reduction, nsa.block_reduction)
    return brute_force.Geometry(nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w, *forced, *reductions)


def to_numpy(inputs: Inputs) -> list[np.ndarray]:
    return [x.numpy() for x in inputs]


def to_lists(blocks: Tensor) -> list[list[list[list[int]]]]:
    """Return blocks [B, T, G, n_sel] as lists, without padding."""
    return [[[[j for j in row if j >= 0] for row in groups] for groups in tokens] for tokens in blocks.tolist()]
