"""Run all kernels under a memory checker: the operator, forward and backward, on every path with small odd shapes, and
decoding steps with full caches.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/kernels/memcheck.py

Without the variable, PyTorch returns parts of larger allocations, and reads past the end of a tensor can go undetected.
Needs a CUDA device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_lab.attention import Span
from nsa_lab.attention.cached_attention import cached_attention
from nsa_lab.attention.geometry import num_compressed
from nsa_lab.attention.kernels import nsa_attention, select_blocks
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig


class Case(NamedTuple):
    """Sizes, and the path that they should take (see `force_path`)."""

    sizes: tuple[int, int, int, int, int, int]  # B, T, H, G, Dk, Dv
    dtype: torch.dtype
    is_union: bool = False
    is_sorted: bool = False  # work items are sorted by their queries
    in_pieces: bool = False
    nsa: NSAConfig = NSAConfig()
    documents: tuple[int, ...] = ()  # lengths of packed documents

    @property
    def span(self) -> Span | None:
        return Span.packed(torch.tensor([0, *self.documents]).cumsum(0).int()) if self.documents else None


CASES = [
    Case((1, 1111, 6, 1, 64, 64), torch.bfloat16, is_union=True),
    Case((1, 1111, 6, 1, 64, 64), torch.bfloat16),
    Case((1, 1111, 32, 2, 128, 128), torch.bfloat16),
    Case((1, 1111, 32, 2, 128, 128), torch.bfloat16, is_sorted=True),
    Case((1, 1111, 32, 2, 128, 128), torch.bfloat16, is_sorted=True, in_pieces=True),
    Case((1, 333, 5, 1, 96, 32), torch.float32),
    Case((2, 257, 6, 2, 32, 96), torch.float16, in_pieces=True, nsa=NSAConfig(l=16, d=8, l_sel=48, n_sel=5, w=100)),
    Case((2, 1, 4, 2, 64, 128), torch.float16, is_union=True),  # no compressed block
    Case((1, 1111, 6, 1, 64, 64), torch.bfloat16, is_union=True, documents=(1, 0, 800, 31, 279)),
    Case((1, 1111, 32, 2, 128, 128), torch.bfloat16, is_sorted=True, in_pieces=True, documents=(279, 31, 800, 0, 1)),
    Case((1, 60, 3, 1, 32, 32), torch.float16, nsa=NSAConfig(l=64, d=4, l_sel=16, n_sel=3), documents=(29, 31)),
]


def force_path(case: Case) -> tuple[bool, bool, bool]:
    """Set the limits so that the kernels take the path of the case. Return (is_union, is_sorted, in_pieces)."""
    B, T, H, G, Dk, Dv = case.sizes
    element_size = case.dtype.itemsize
    selected.UNION_TOKENS = T if case.is_union else 0
    workspace_pieces.SORT_ABOVE_BYTES = 0 if case.is_sorted else 2**62
    meta = {"dtype": case.dtype, "device": "meta"}
    q, v = torch.empty(B, T, H, Dk, **meta), torch.empty(B, T, G, Dv, **meta)
    sizes = selected._make_sizes(q, v, case.nsa.n_sel, case.nsa.l_sel)
    bytes_needed = workspace_pieces.compute_backward_bytes(sizes, element_size)
    # Workspace for half of a group's queries.
    workspace_pieces.WORKSPACE_BYTES = (
        bytes_needed.per_group + sizes.heads * bytes_needed.per_row * T // 2 if case.in_pieces else 2**62
    )
    split = workspace_pieces.split_into_pieces(sizes, element_size)
    is_union = selected.get_forward_strategy(T, selected.get_kernel_block(q, v, case.nsa.l_sel)) == "union"
    return (
        is_union,
        all(workspace_pieces.should_sort_items(sizes, piece.t1 - piece.t0, element_size) for piece in split),
        len(split) > 1,
    )


def run(case: Case) -> None:
    """Run forward and backward. Raise AssertionError if a gradient is not finite."""
    B, T, H, G, Dk, Dv = case.sizes
    N = num_compressed(T, case.nsa) if case.span is None else case.span.num_compressed(case.nsa)
    shapes = [(B, T, H, Dk), (B, N, G, Dk), (B, N, G, Dv), *[(B, T, G, Dk), (B, T, G, Dv)] * 2]
    inputs = [torch.randn(s, dtype=case.dtype, device="cuda", requires_grad=True) for s in shapes]
    gates = torch.rand(B, T, H, 3, dtype=torch.float32, device="cuda", requires_grad=True)
    nsa_attention(*inputs, gates, case.nsa, span=case.span).float().square().sum().backward()
    torch.cuda.synchronize()
    assert all(torch.isfinite(x.grad).all() for x in (*inputs, gates))


# Index heads per group, index width, geometry.
INDEXERS = [(1, 64, NSAConfig(l=8, d=8)), (2, 64, NSAConfig(l=1, d=1)), (3, 96, NSAConfig(l=1, d=1, l_sel=48, n_sel=5))]


def select(heads: int, width: int, nsa: NSAConfig, documents: tuple[int, ...]) -> None:
    """Select blocks by an indexer. Raise AssertionError if a query does not select its own block."""
    span = Span.packed(torch.tensor([0, *documents]).cumsum(0).int())
    q = torch.randn(1, sum(documents), 2 * heads, width, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, span.num_compressed(nsa), 2, width, dtype=torch.bfloat16, device="cuda")
    own_block = span.positions(q.device) // nsa.l_sel
    assert (select_blocks(q, k, None, nsa, span=span) == own_block[None, :, None, None]).any(-1).all()


# Cached tokens, new tokens, (B, H, G, Dk, Dv), dtype.
STEPS = [
    (1110, 1, (2, 6, 1, 64, 64), torch.bfloat16),
    (1103, 8, (1, 32, 2, 128, 128), torch.bfloat16),
    (331, 2, (1, 5, 1, 96, 32), torch.float32),
    (0, 1, (2, 4, 2, 64, 128), torch.float16),
]


def decode(n_before: int, n_new: int, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, has_indexer: bool) -> None:
    """Run one decoding step with a cache that has no spare rows. Raise AssertionError if an output is not finite."""
    B, H, G, Dk, Dv = sizes
    nsa, indexer_nsa = NSAConfig(w=77), NSAConfig(l=8, d=8)
    cache_rows = (num_compressed(n_before + n_new, nsa), n_before + n_new, nsa.w + n_new - 1)
    cache = [torch.randn(B, n, G, width, dtype=dtype, device="cuda") for n in cache_rows for width in (Dk, Dv)]
    index = [
        torch.randn(B, n, G, Dk, dtype=dtype, device="cuda") for n in (n_new, num_compressed(n_before + n_new, indexer_nsa))
    ]
    q, gates = (torch.randn(B, n_new, H, width, dtype=dtype, device="cuda") for width in (Dk, 3))
    lengths = torch.full((B,), n_before, dtype=torch.int32, device="cuda")
    options = {"index_q": index[0], "selection_nsa": indexer_nsa} if has_indexer else {}
    caches = LayerCache(*cache, index[1] if has_indexer else None)
    out = cached_attention(q, gates, caches, lengths, nsa, backend="triton", **options)
    assert torch.isfinite(out).all()


if __name__ == "__main__":
    torch.manual_seed(0)
    paths = {(case.is_union, case.is_sorted, case.in_pieces) for case in CASES}
    assert paths >= {(True, False, False), (False, False, False), (False, True, False), (False, True, True)}
    for case in CASES:
        assert force_path(case) == (case.is_union, case.is_sorted, case.in_pieces)
        run(case)
        print(
            *case.sizes,
            str(case.dtype),
            "union" if case.is_union else "gather",
            "sorted" * case.is_sorted,
            "in pieces" * case.in_pieces,
            f"{len(case.documents)} documents" * bool(case.documents),
            "ok",
            flush=True,
        )
    for indexer in INDEXERS:
        for documents in ((1531,), (1, 0, 1200, 31, 299)):
            select(*indexer, documents)
            print("selection", *indexer[:2], f"{len(documents)} documents", "ok", flush=True)
    for step in STEPS:
        for indexed in (False, True):
            decode(*step, has_indexer=indexed)
            print("decoding", *step, "indexer" * indexed, "ok", flush=True)
