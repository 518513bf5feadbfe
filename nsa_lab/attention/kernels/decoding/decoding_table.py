"""Launch configuration of the kernels of a decoding step, as in `launch_table`, measured on one H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_table import Tile
from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width

DECODING_PROGRAMS = 256
"""Minimum number of programs of a decoding kernel: about two per multiprocessor of an H200.

A step of long_64k for 32 sequences of 65,536 tokens (one H200, 2026-11-28, as all times of steps below): 0.637 ms, with 132
programs 0.640, with 512 0.669, with 1024 0.721.
"""
DECODING_PARTS = 32
"""Maximum number of parts that the keys of a branch are split into. Each part costs a partial output."""
DECODING_ROWS = 64
MERGE_ELEMENTS, MERGE_WARPS = 4096, 2
"""For 32 sequences and 64 heads of width 128 on an H200: 4.5 us with two warps, 8.7 us with four, 23 us with eight."""
IMPORTANCE_ELEMENTS, IMPORTANCE_BLOCKS = 4096, 64
TOPK_BLOCKS = 2048
INDEX_BLOCKS = 8
"""Maximum number of selection blocks of a program that scores index keys.

A step as above: 0.601 ms, with 32 blocks 0.637; of one sequence 0.169 ms, with 4 blocks 0.172.
"""
MAX_PDL_TOKENS = 4
"""Maximum number of new tokens for programmatic dependent launch.

A step of one sequence takes 0.172 ms with it and 0.213 ms without. A step of 32 sequences takes 0.546 ms with it and
0.518 ms without, with the tiles below.
"""
APPEND_WARPS = 1  # a row has at most 256 elements
MAX_NARROW_ROWS = 4
"""Up to this many rows are multiplied elementwise, without tensor cores."""
MAX_LINEAR_ROWS = 64
"""Maximum number of rows for which a decoding step uses our linear kernel.

With more rows, reading the weights no longer dominates, and the matrix products of PyTorch are used.
"""


class LinearTile(NamedTuple):
    """Tile of `nsa_linear`: rows and columns of a program, and elements of the sum per step."""

    rows: int
    columns: int
    chunk: int
    warps: int
    stages: int


def linear_tile(dtype: torch.dtype, rows: int, columns: int, depth: int, is_gated: bool = False) -> LinearTile:
    """Return the tile for x [rows, depth] and projections with `columns` columns in all."""
    if rows <= MAX_NARROW_ROWS:
        # All layers of a step of one sequence take 89 us, with 8 columns 98 us.
        padded_rows, tile_columns = padded_width(rows), 4
        chunk = min(padded_width(depth), 4096 // padded_rows)
        return LinearTile(padded_rows, tile_columns, chunk, min(max(padded_rows * tile_columns * chunk // 2048, 1), 8), 1)
    # A tensor-core product needs 16 rows and 16 elements of the sum per warp. Few columns still need enough programs to
    # fill the GPU, so their weights are read again for every 16 rows; others are read once. In a step of 32 sequences all
    # layers take 130 us, without more programs 153 us.
    tile_rows = 16 if columns <= 1024 else min(max(padded_width(rows), 16), MAX_LINEAR_ROWS)
    tile_columns, warps, stages = 16, 4, 4
    chunk = 16 * warps if dtype == torch.float32 else 256
    # All stages but one are in shared memory. On AMD it has 64 KB, and x is in it in two layouts.
    copies, limit = (2, 64 * 1024) if launch_table.is_amd() else (1, 96 * 1024)
    stage_rows = copies * tile_rows + tile_columns * (1 + is_gated)
    while stage_rows * chunk * dtype.itemsize * (stages - 1) > limit:
        chunk //= 2
    return LinearTile(tile_rows, tile_columns, min(chunk, max(padded_width(depth), 16 * warps)), warps, stages)


def decoding_parts(n_programs: int, n_tiles: int) -> int:
    """Return the number of parts that the keys of each program are split into; the keys are at most `n_tiles` tiles."""
    n_parts = min(ceil_div(DECODING_PROGRAMS, n_programs), n_tiles, DECODING_PARTS)
    return padded_width(max(n_parts, 1))


def importance_blocks(scores: int) -> int:
    """Return the selection blocks per program. `scores`: scores per block, of all heads with the keys that start in it."""
    return max(min(IMPORTANCE_ELEMENTS // scores, IMPORTANCE_BLOCKS), 1)


def topk_blocks(n_blocks: int) -> int:
    """Return the selection blocks that are ranked at once if a query has at most `n_blocks` blocks."""
    return min(max(padded_width(max(n_blocks, 1)), 32), TOPK_BLOCKS)


class IndexTile(NamedTuple):
    """Tile of the kernel that scores index keys.

    `blocks`: selection blocks of a program; `blocks_at_once`, `strides`: blocks, and index keys of each, that are scored at
    once.
    """

    blocks: int
    blocks_at_once: int
    strides: int
    warps: int
    stages: int


def index_rows(rows: int) -> int:
    """Return the queries of a tile that scores index keys, for `rows` existing ones. A tensor-core product needs 8."""
    return min(max(padded_width(rows), 8), DECODING_ROWS)


def index_tile(dtype: torch.dtype, width: int, n_programs: int, n_blocks: int, strides: int) -> IndexTile:
    """Return the tile for selection blocks of `strides` index keys.

    `n_programs`: programs before the blocks are divided among several of them.
    """
    keys = 64 if dtype == torch.float32 else min(2**14 // padded_width(width), 256)
    at_once = min(padded_width(strides), 64)
    blocks_at_once = keys // at_once
    blocks = max(INDEX_BLOCKS, blocks_at_once)
    while blocks > blocks_at_once and n_programs * ceil_div(n_blocks, blocks) < DECODING_PROGRAMS // 2:
        blocks //= 2
    # A third stage does not fit into the 64 KB of shared memory on AMD.
    return IndexTile(blocks, blocks_at_once, at_once, 4, 1 if dtype == torch.float32 else 2 if launch_table.is_amd() else 3)


def decoding_tile(dtype: torch.dtype, width: int, rows: int, device: torch.device) -> Tile:
    """Return the tile of the kernels that read a cache, for `rows` existing rows. A tensor-core product needs 16 rows."""
    if dtype == torch.float32:
        return Tile(
            min(max(padded_width(rows), 16), 16 if width > launch_table.MAX_TIMED_WIDTH else 32),
            launch_table.float32_tile(width).keys,
            4,
            1,
        )
    padded_rows = min(max(padded_width(rows), 16), DECODING_ROWS)
    return Tile(
        padded_rows,
        32 if width > launch_table.MAX_TIMED_WIDTH else 64,
        8 if width > launch_table.MAX_TIMED_WIDTH else 4,
        3 if launch_table.has_large_shared_memory(device) else 2,
    )
