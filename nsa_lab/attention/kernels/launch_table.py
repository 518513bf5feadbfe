"""Launch configuration of the kernels: tile sizes, warps, stages and registers, by device, dtype and head width.

All such constants are in this file, except for a decoding step (`decoding/decoding_table.py`). Measured on one H200
(docs/log/kernels.md). GPUs of compute capability 8.x other than 8.0 have 99 KB of shared memory per thread block, an A100
has 163 KB; the tiles for the smaller GPUs fit in 99 KB. If you change a tile, measure it with `nsa-lab bench attention`;
tests/kernels/test_launch_table.py checks the limits.
"""

# The device properties of torch have no type annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width


def is_amd() -> bool:
    """Return True if torch was built for AMD GPUs. The kernels compile for gfx942 (MI300) but have not run there."""
    return torch.version.hip is not None


def _make_compile_options(warps: int, stages: int, registers: int | None) -> dict[str, int]:
    """Return the options of Triton's compiler. It supports no register limit for AMD GPUs."""
    cap = {} if registers is None or is_amd() else {"maxnreg": registers}
    return {"num_warps": warps, "num_stages": stages, **cap}


class Tile(NamedTuple):
    """Rows (or queries) and keys (or blocks) of a tile, and the compile options of its kernel.

    `registers`: limit per thread, so that more tiles share a multiprocessor. `one_loop`, only for dq of the band kernels:
    use one loop that masks every tile. A second loop without masks can cost more in spilled registers than it saves.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    one_loop: bool = False

    def compile_options(self) -> dict[str, int]:
        return _make_compile_options(self.warps, self.stages, self.registers)


@functools.cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return True if a thread block may use 160 KB of shared memory (A100, H100, B200); smaller GPUs have 99 KB."""
    if device.type != "cuda":
        return True
    return not is_amd() and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return True if the device supports programmatic dependent launch: Hopper and later."""
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def is_blackwell(device: torch.device) -> bool:
    """Return True for compute capability 10 (B200), which has tensor memory; GPUs of capability 12 do not."""
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device)[0] == 10


FLOAT32_TILE = Tile(32, 32, 4, 1)
MAX_TIMED_WIDTH = 128
"""Widest heads that were timed at several shapes.

Tiles for wider heads in half precision on Hopper were tuned at H=64 G=4 192/128 (`nsa-lab bench tune`, one H200). All other
tiles for wider heads were selected by the registers, spills and shared memory that ptxas reports for sm_80, sm_86 and
sm_90. They have not been timed.
"""

MAX_TILE_WIDTH = 256
MAX_TWO_TILE_WIDTH = 192
"""Widest heads that `split_width` splits into two tiles of less than 256 columns in all, which leaves shared memory for one
more stage."""


def split_width(name: str, width: int, device: torch.device, max_width: int = MAX_TILE_WIDTH) -> dict[str, int]:
    """Return X_PART and X_REST of the width X: the columns of the two tiles that hold it; X_REST = 0: a single tile.

    The columns of a tile are a power of two, so 192 columns in a tile of 256 are a third more work than needed. Heads up to
    `MAX_TIMED_WIDTH` still use one tile, as they were timed, unless it would exceed `max_width` columns. Wider heads use
    one tile on GPUs other than Hopper: for sm_80, ptxas would leave the dK/dV kernel 32 registers and spill everything
    else.
    """
    padded = padded_width(width)
    part, rest = padded // 2, max(padded_width(width - padded // 2), 16)
    is_split = padded > max_width or (padded > MAX_TIMED_WIDTH and part + rest < padded and is_hopper(device))
    return {f"{name}_PART": part if is_split else padded, f"{name}_REST": rest if is_split else 0}


def float32_tile(width: int) -> Tile:
    """Return the tile of the band and decoding kernels in float32."""
    return Tile(16, 16, 4, 1) if width > MAX_TIMED_WIDTH else FLOAT32_TILE


def band_forward(dtype: torch.dtype, width: int, has_window: bool, device: torch.device) -> Tile:
    if dtype == torch.float32:
        return float32_tile(width)
    if width > MAX_TIMED_WIDTH and is_hopper(device):
        return Tile(64, 32, 4, 3)
    if width > MAX_TIMED_WIDTH:
        return Tile(64, 32, 8, 2) if has_large_shared_memory(device) else Tile(32, 32, 4, 2)
    match width > 64, has_window, has_large_shared_memory(device):
        case True, True, _:
            return Tile(128, 32, 8, 3, 128)
        case True, False, True:
            return Tile(128, 64, 8, 3)
        case True, False, False:
            return Tile(64, 32, 4, 3, 168)
        case False, True, _:
            return Tile(64, 32, 4, 3, 96)
        case _:
            return Tile(64, 64, 4, 3, 128)


def band_dq(dtype: torch.dtype, width: int, has_window: bool, device: torch.device) -> Tile:
    if dtype == torch.float32:
        return float32_tile(width)
    if width > MAX_TIMED_WIDTH and is_hopper(device):
        return Tile(64, 32, 4, 2)
    if width > MAX_TIMED_WIDTH:
        return Tile(64, 32, 8, 2) if has_large_shared_memory(device) else Tile(32, 32, 4, 1)
    match width > 64, has_window, has_large_shared_memory(device):
        case True, True, _:
            return Tile(64, 32, 4, 2, 168, one_loop=True)
        case True, False, True:
            return Tile(64, 64, 4, 2)
        case True, False, False:
            return Tile(64, 32, 4, 2)
        case False, True, _:
            return Tile(64, 32, 4, 3, 96)
        case _:
            return Tile(64, 64, 4, 3, 168)


def band_dkv(dtype: torch.dtype, width: int, device: torch.device) -> Tile:
    if dtype == torch.float32:
        return float32_tile(width)
    if width > MAX_TIMED_WIDTH and is_hopper(device):
        return Tile(32, 128, 8, 3 if width <= MAX_TWO_TILE_WIDTH else 2)
    if width > MAX_TIMED_WIDTH:
        return Tile(32, 64, 8, 2) if has_large_shared_memory(device) else Tile(32, 32, 4, 1)
    match width > 64, has_large_shared_memory(device):
        case True, True:
            return Tile(64, 128, 8, 3)
        case True, False:
            return Tile(32, 64, 4, 3)
        case _:
            return Tile(64, 64, 4, 3)


def block_topk(dtype: torch.dtype, width: int, strides: int, spill: int, n_selection: int, device: torch.device) -> Tile:
    """Return a tile whose `keys` are selection blocks of `strides` compressed keys; each step rescores `spill` of them."""
    padded = padded_width(strides)
    min_blocks = max(padded_width(2 * spill), 16)  # 16: the smallest size of a tensor-core product
    if dtype == torch.float32 and width > MAX_TIMED_WIDTH:
        return Tile(16, min_blocks, 4, 1)
    if dtype != torch.float32 and width > MAX_TIMED_WIDTH and is_hopper(device):
        # Timed with four strides per block. With fewer strides, the same number of keys would spill four times as much.
        return Tile(64, max(32 if padded == 4 else 64 // padded, min_blocks), 4, 1)
    if dtype == torch.float32 or width > MAX_TIMED_WIDTH:
        return Tile(32, max(64 // padded, min_blocks), 4, 1)
    return Tile(64, max(128 // padded, min_blocks), 4, 3, 168 if n_selection > 256 and width <= 64 else None)


def block_topk_without_lse(tile: Tile, device: torch.device) -> Tile:
    """Return the variant of a tile where the scores of a product are reshaped directly, as for keys without an LSE.

    On Blackwell it has fewer queries than tensor memory needs, because Triton 3.7.1 does not compile that reshape there.
    Not measured.
    """
    return tile._replace(rows=min(tile.rows, 32)) if is_blackwell(device) else tile


MAX_STRIDES_AT_ONCE = 16
"""With an LSE, up to this many strides of a selection block are scored at once."""
BLOCK_SCORES_PROGRAMS = 528
"""Programs of a launch that computes log-sum-exps of blocks: twice as many as an H200 runs at once.

Their results wait in a workspace, 512 bytes per program and block: 4 KB per token in the longest sequence.
"""
RANKED_BLOCKS, RANKED_QUERIES, RANKING_WARPS = 64, 16, 1
"""Blocks that are read from this workspace at once, maximum number of queries per program that ranks them, and warps.

At 65,536 tokens with two heads, ranking takes (one H200, 2026-11-28): 0.58 ms. Queries, blocks, warps: (8, 64, 1) 0.64,
(64, 64, 2) 0.65, (32, 128, 2) 0.68, (16, 64, 2) 0.77, (16, 64, 4) 1.30, (128, 64, 4) 1.23. At 8,192 tokens 16 queries and
one warp are the fastest as well: 0.02 ms.
"""


def block_scores(dtype: torch.dtype, width: int, device: torch.device) -> Tile:
    """Return the tile of the kernel that computes log-sum-exps of blocks, for queries of one head.

    For Hopper, 65,536 tokens and two heads: 4.38 ms, with eight warps 4.60, with 64 queries 5.21 to 5.42. The others are
    not measured.
    """
    if dtype == torch.float32:
        tile = Tile(16, 32, 4, 1) if width > MAX_TIMED_WIDTH else Tile(32, 32, 4, 1)
    elif width > MAX_TIMED_WIDTH:
        tile = Tile(64, 64, 4, 2) if has_large_shared_memory(device) else Tile(32, 64, 4, 1)
    elif width > 64 or not is_hopper(device):
        tile = Tile(64, 128 if has_large_shared_memory(device) else 64, 4, 2)
    else:
        tile = Tile(128, 128, 4, 3)
    return block_topk_without_lse(tile, device)


def block_ranking(tile: Tile) -> Tile:
    """Return the tile that ranks the blocks of queries of a `block_scores` tile: of all of them, or of a part."""
    return Tile(min(tile.rows, RANKED_QUERIES), RANKED_BLOCKS, RANKING_WARPS, 1)


def block_topk_strides(dtype: torch.dtype, width: int) -> int:
    """Return the maximum number of strides per selection block that are scored at once, if they are scored in slices."""
    return 2 if dtype == torch.float32 and width > MAX_TIMED_WIDTH else 8


def block_topk_columns(dtype: torch.dtype, width: int, strides_at_once: int, tile: Tile) -> int:
    """Return the columns of the keys that are scored at once, so that the keys of `tile` fit in 96 KB in all stages."""
    columns = padded_width(width)
    while columns > 16 and tile.keys * strides_at_once * columns * dtype.itemsize * tile.stages > 96 * 1024:
        columns //= 2
    return columns


class RowTile(NamedTuple):
    """Rows of a tile whose keys are one kv block, or that has no keys, and the compile options; see `Tile`."""

    rows: int
    warps: int
    stages: int
    registers: int | None = None

    def compile_options(self) -> dict[str, int]:
        return _make_compile_options(self.warps, self.stages, self.registers)


def selected_keys(dtype: torch.dtype, width: int, device: torch.device) -> int:
    """Return the maximum number of keys of a kv block in a tile of the selected branch."""
    return 32 if width > MAX_TIMED_WIDTH and (dtype == torch.float32 or not has_large_shared_memory(device)) else 64


def _selected_tile(dtype: torch.dtype, width: int, stages_wide: int) -> RowTile:
    if width > MAX_TIMED_WIDTH:
        return RowTile(16, 4, 1) if dtype == torch.float32 else RowTile(32, 8, 1)
    if dtype == torch.float32:
        return RowTile(16 if width > 64 else 32, 4, 1)
    return RowTile(64, 4, stages_wide if width > 64 else 3)


def selected_union(dtype: torch.dtype, width: int) -> RowTile:
    tile = _selected_tile(dtype, width, 2)
    # Four tiles per multiprocessor, the maximum that fit in its shared memory.
    return tile._replace(registers=128) if dtype != torch.float32 and width <= 64 else tile


def selected_items(dtype: torch.dtype, width: int, block: int, device: torch.device) -> RowTile:
    """Return the tile of the forward and backward kernels that process the inverted index, for kv blocks of `block` keys.

    On Hopper a third stage costs no memory (see `_gather_rows`); elsewhere it costs a tile. The 128 rows for wide heads
    need tiles of 64 keys: with 16 or 32 keys the backward kernel transposes its sums in shared memory, which takes 288 KB.
    """
    if width > MAX_TIMED_WIDTH and dtype != torch.float32 and block > 32 and is_hopper(device):
        return RowTile(128, 8, 2 if width <= MAX_TWO_TILE_WIDTH else 1)
    return _selected_tile(dtype, width, 3 if is_hopper(device) else 2)


def selected_columns(dtype: torch.dtype, width: int) -> int:
    """Return the columns of dk and dv that the backward kernel processes at once: at least half a tile."""
    return 128 if dtype == torch.float32 or width > MAX_TIMED_WIDTH else 64


def streaming_rows(width: int) -> int:
    """Return the rows of a program that only sums partial results, so that the loads of all slots are in flight at once."""
    return 16 if width > 64 else 32


GATE_ELEMENTS = 2048  # of each tensor, per program; with 4096 the backward pass takes a seventh longer


def gate_rows(width: int) -> int:
    return GATE_ELEMENTS // padded_width(width)


STREAMING_WARPS = 4
"""Warps of all kernels without matrix products."""

SUM_CHUNKS_KEYS, SUM_CHUNKS_AT_ONCE = 4, 8
DELTA_ROWS = 64
SUM_ITEMS_ELEMENTS, SUM_ITEMS_AT_ONCE = 1024, 4
SLOTS_AT_ONCE = 16  # with more, registers spill and ptxas takes half a minute


def slots_at_once(n_sel: int) -> int:
    """Return how many partial results of a query are loaded together: the n_sel slots in equal groups."""
    return ceil_div(n_sel, ceil_div(n_sel, SLOTS_AT_ONCE))


BLOCK_MASS_BLOCKS = 8
"""Blocks per program of the kernels that compute the attention mass of blocks; see `block_mass`."""


def block_mass(dtype: torch.dtype, width: int, keys_per_block: int) -> Tile:
    """Return the tile of keys of one block for the heads of one sampled query.

    64 queries of 65,536 tokens, six heads per group and then two, forward, with the gradient of the two (one H200,
    2026-11-28): 0.98 ms. 4 or 16 blocks per program 1.01 and 1.00, 4 warps, 3 stages and 16 blocks 1.30, one warp 1.23.
    """
    is_large = dtype == torch.float32 or width > MAX_TIMED_WIDTH
    keys = min(max(padded_width(keys_per_block), 16), 32 if is_large else 64)
    return Tile(16, keys, 4 if is_large else 2, 1)


def block_mass_dk(dtype: torch.dtype, width: int) -> Tile:
    """Return the tile of rows of sampled queries and of keys for the gradient of the keys.

    Measured as `block_mass`: 0.07 ms, with 32 rows and 64 keys 0.11.
    """
    is_large = dtype == torch.float32 or width > MAX_TIMED_WIDTH
    return Tile(16, 32, 4, 1) if is_large else Tile(16, 128, 4, 2)


COUNT_ENTRIES, COUNT_COLUMNS, COUNT_WARPS = 4096, 64, 8
SCATTER_ENTRIES = 1024
FIRST_QUERY_ITEMS = 256
