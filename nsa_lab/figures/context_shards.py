"""Plot which rank holds and reads which tokens under context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.figures.style import CMP, FORCED, SEL, WIN

RANK_COLOURS = (CMP, SEL, WIN, FORCED)


def plot_context_shards(shards: Sequence[ContextShard], reads: Tensor) -> Figure:
    """Plot the shards of one text, one per rank, in rank order, and the reads between ranks.

    Left: the queries of each rank against the keys that they can attend to. Right: `reads` [ranks, ranks], the share of the
    reads of a rank's queries (row) whose keys come from each rank (column). Raises ValueError for more than four ranks,
    which have no colours.
    """
    if not 1 <= len(shards) <= len(RANK_COLOURS):
        raise ValueError(f"shards: expected 1 to {len(RANK_COLOURS)} ranks, got {len(shards)}; plot fewer ranks")
    n_tokens = shards[0].text.n_queries
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    figure.suptitle(f"{n_tokens:,} tokens on {len(shards)} ranks", fontsize=11)
    chunks, matrix = figure.subplots(1, 2)
    chunks.set_title("queries of each rank, and the keys they can read", fontsize=9)
    for shard, colour in zip(shards, RANK_COLOURS, strict=False):
        first_rows = _list_first_rows(shard)
        for piece in shard.pieces:
            start = first_rows[piece.query_rows.start]
            height, width = piece.query_rows.stop - piece.query_rows.start, piece.key_rows.stop - piece.key_rows.start
            corner = (piece.key_rows.start, start)
            chunks.add_patch(Rectangle(corner, width, height, facecolor=colour, alpha=0.3, linewidth=0))
        for part in shard.ranges:
            size = part.stop - part.start
            chunks.add_patch(Rectangle((part.start, part.start), size, size, facecolor=colour, edgecolor="white"))
            chunks.annotate(
                f"rank {shard.rank}",
                (n_tokens * 1.02, part.start + size / 2),
                va="center",
                fontsize=8,
                annotation_clip=False,
            )
    chunks.set(xlim=(0, n_tokens), ylim=(n_tokens, 0), xlabel="key (token of the text)", ylabel="query (token of the text)")
    handles = [
        Patch(color=RANK_COLOURS[0], alpha=0.3, label="keys before the chunk"),
        Patch(color=RANK_COLOURS[0], label="keys of the chunk"),
    ]
    chunks.legend(handles=handles, fontsize=7, loc="upper right", framealpha=0.9)
    matrix.set_title("share of a rank's reads, by the rank that holds the key", fontsize=9)
    matrix.imshow(reads.tolist(), cmap="Greys", vmin=0, vmax=1)
    for row, shares in enumerate(reads.tolist()):
        for column, share in enumerate(shares):
            colour = "white" if share > 0.5 else "black"
            matrix.annotate(f"{share:.2f}", (column, row), ha="center", va="center", fontsize=8, color=colour)
    ranks = range(len(shards))
    matrix.set_xticks(ranks)
    matrix.set_yticks(ranks)
    matrix.set(xlabel="rank that holds the key", ylabel="rank of the query")
    return figure


def _list_first_rows(shard: ContextShard) -> dict[int, int]:
    """Return the row of the text of the first query of each piece, by its row in the shard."""
    rows = [row for part in shard.ranges for row in range(part.start, part.stop)]
    return {piece.query_rows.start: rows[piece.query_rows.start] for piece in shard.pieces}
