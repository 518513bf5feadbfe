"""The inverted index against plain Python lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
from selected_inputs import make_config, make_selection

from nsa_lab.attention.kernels.selected import inverted_index


@pytest.mark.parametrize(
    "bitmap_bytes", [pytest.param(2**28, id="one pass"), pytest.param(1, id="a pass a span", marks=pytest.mark.nightly)]
)
def test_index_is_the_transpose_of_the_selection(device, bitmap_bytes, monkeypatch, poisoned):
    monkeypatch.setattr(inverted_index, "BITMAP_BYTES_LIMIT", bitmap_bytes)
    nsa, (B, T, G), chunk = make_config(5, 16), (2, 600, 2), 40
    n_blocks = -(-T // 16)
    blocks = make_selection(B, T, G, nsa, device, "empty rows")
    index = inverted_index.build_inverted_index(blocks.contiguous(), 16, chunk, n_blocks, sort_items=True)
    entries, starts, work, order = (x.tolist() for x in index)
    starts = starts[: B * G * n_blocks + 1]
    rows = []
    for b in range(B):
        for g in range(G):
            t, slot = (blocks[b, :, g] >= 0).nonzero(as_tuple=True)
            block, entry = blocks[b, t, g, slot], t * 5 + slot
            rows += [entry[block == j].tolist() for j in range(n_blocks)]
    assert [entries[a:b] for a, b in pairwise(starts)] == rows
    items = [-1] * len(work)
    for row, members in enumerate(rows):
        for i in range(max(1, -(-len(members) // chunk))):
            assert items[starts[row] // chunk + row + i] == -1
            items[starts[row] // chunk + row + i] = row
    assert work == items

    def place(item: int) -> tuple[float, ...]:
        row = items[item]
        first = starts[row] + chunk * (item - (starts[row] // chunk + row))
        return (row // n_blocks, entries[first] // 5, item) if row >= 0 and first < starts[row + 1] else (B * G, 0, item)

    assert order == sorted(range(len(items)), key=place)
    unordered = inverted_index.build_inverted_index(blocks.contiguous(), 16, chunk, n_blocks)
    assert unordered.order is None and unordered.work.tolist() == items
