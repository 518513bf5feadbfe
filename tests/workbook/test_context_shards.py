"""Plot of context parallelism: chunks and keys of each rank, shares of reads."""

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from nsa_lab import figures
from nsa_lab.attention import Span
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.figures.context_shards import RANK_COLOURS


def make_shards(text, size):
    return [ContextShard(text, rank, size) for rank in range(size)]


def get_boxes(axes, alpha):
    """Return (colour, x, y, width, height) of the boxes: chunks have no alpha, keys before them are pale."""
    return {
        (patch.get_facecolor()[:3], patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height())
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_alpha() == alpha
    }


def test_chunks_are_in_zigzag_order():
    figure = figures.plot_context_shards(make_shards(Span.full(16), 2), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    chunks, matrix = figure.axes
    first, second = (to_rgba(colour)[:3] for colour in RANK_COLOURS[:2])
    # Rank 0 holds the first and the last quarter, rank 1 the two in between.
    assert get_boxes(chunks, None) == {(first, 0, 0, 4, 4), (first, 12, 12, 4, 4), (second, 4, 4, 8, 8)}
    assert get_boxes(chunks, 0.3) == {(first, 0, 0, 4, 4), (first, 0, 12, 16, 4), (second, 0, 4, 12, 8)}
    assert [text.get_text() for text in matrix.texts] == ["0.75", "0.25", "0.50", "0.50"]


def test_keys_of_packed_documents_begin_with_the_document():
    text = Span.packed(torch.tensor([0, 5, 12], dtype=torch.int32))
    chunks, _ = figures.plot_context_shards(make_shards(text, 2), torch.full((2, 2), 0.5)).axes
    keys = {box[1:] for box in get_boxes(chunks, 0.3)}
    # Rank 1 holds rows 3 to 8: the end of the first document, and the start of the second.
    assert keys == {(0, 0, 3, 3), (0, 3, 5, 2), (5, 5, 4, 4), (5, 9, 7, 3)}


def test_more_ranks_than_colours_are_refused():
    with pytest.raises(ValueError, match="expected 1 to 4 ranks, got 5"):
        figures.plot_context_shards(make_shards(Span.full(16), 5), torch.zeros(5, 5))
