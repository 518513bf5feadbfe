"""Splitting a large input into pieces: every query once, and the allocations of a piece fit into the workspace."""

from __future__ import annotations

import pytest
import torch
from looping import looped

from nsa_lab.attention.kernels.selected import inverted_index, workspace_pieces


@looped
@pytest.mark.parametrize("size", [10**9, 3 * 10**7, 10**7, 5 * 10**6, 2 * 10**6, "a byte less than a group"])
@pytest.mark.parametrize(("heads", "width"), [(3, 64), (16, 128)])
def test_pieces_are_disjoint_and_fit_the_workspace(size, heads, width, monkeypatch):
    sizes = workspace_pieces.Sizes(B=3, T=1000, H=4 * heads, G=4, n_sel=16, block=64, dk=width, dv=width)
    item = sizes.block * 2 * width * 4

    def forward(rows: int, queries: int) -> int:
        return rows * queries * sizes.n_sel * heads * (width * 2 + 4)

    def backward(rows: int, queries: int, n_sums: int) -> int:
        chunk = workspace_pieces.compute_item_entries(sizes, 2)
        work = inverted_index.compute_index_sizes(rows, queries, sizes.n_blocks, sizes.n_sel, chunk, sort_items=True).work
        return rows * queries * sizes.n_sel * heads * width * 2 + work * item + n_sums * sizes.n_blocks * item

    size = backward(1, sizes.T, 0) - 1 if isinstance(size, str) else size
    monkeypatch.setattr(workspace_pieces, "WORKSPACE_BYTES", size)
    split = workspace_pieces.split_into_pieces(sizes, 2)
    parts_of_groups = [p for p in split if p.t1 - p.t0 < sizes.T]
    n_sums = 0 if not parts_of_groups else sizes.G if any(p.g1 - p.g0 > 1 for p in parts_of_groups) else 1
    n_visits, checked = torch.zeros(3, 1000, 4, dtype=torch.int32), 0
    for piece in split:
        part = piece.slice_queries(n_visits)
        part += 1
        assert piece.slice_keys(n_visits).shape == (part.shape[0], 1000, part.shape[2])
        B, T, G = part.shape
        assert forward(B * G, T) <= size
        # If items and sums of dK and dV take more than half, the docstring guarantees only half for the rest.
        if n_sums != 1 or workspace_pieces.compute_backward_bytes(sizes, 2).per_group + sizes.n_blocks * item <= size // 2:
            assert backward(B * G, T, n_sums) <= size
            checked += 1
    assert (n_visits == 1).all()
    assert checked or size == 2 * 10**6
