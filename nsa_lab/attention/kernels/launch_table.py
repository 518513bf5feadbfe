"""How every kernel is launched: tile sizes, warps, stages and registers, by device, dtype and head width. Said only here.

Measured on one H200 (docs/kernel_log.md has the figures). On GPUs of compute capability 8.x other than 8.0, a block has 99
KB of shared memory, where an A100's has 163; the tiles for them fit. tests/kernels/test_launch_table.py holds what the
benchmarked shapes get: whoever enters a faster tile changes that test too.
"""

# torch does not annotate the properties of a device.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from nsa_lab.attention.kernels.launch_utils import ceil_div, padded_width


def is_amd() -> bool:
    """Whether this torch is for AMD's GPUs. Kernels compile for gfx942 (MI300), and none has run there."""
    return torch.version.hip is not None


def _make_compile_options(warps: int, stages: int, registers: int | None) -> dict[str, int]:
    """What Triton's compiler is told; for AMD's GPUs it takes no cap on registers."""
    cap = {} if registers is None or is_amd() else {"maxnreg": registers}
    return {"num_warps": warps, "num_stages": stages, **cap}


class Tile(NamedTuple):
    """A tile's rows (or queries) and its keys (or blocks), and how its kernel is compiled.

    `registers` is the most that a thread may use, so that more tiles share a multiprocessor. `one_loop`, for the band's dq:
    one loop, which masks every tile; a second loop, for tiles that need no mask, can cost more in spilled registers than it
    saves in masks.
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
    """Whether a block may use 160 KB of shared memory (A100, H100, B200 and their kin), not the 99 KB of smaller GPUs."""
    if device.type != "cuda":
        return True
    return not is_amd() and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one ahead still runs: Hopper and what came after it."""
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def is_blackwell(device: torch.device) -> bool:
    """B200 and its kin, whose tensor cores have a memory of their own; not the smaller GPUs of capability 12."""
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device)[0] == 10


FLOAT32_TILE = Tile(32, 32, 4, 1)
MAX_TIMED_WIDTH = 128
"""Columns of the widest heads that were timed at several shapes. Of wider ones, in half precision, the tiles for Hopper
were found at H=64 G=4 192/128 (`nsa-lab bench tune`, one H200); all others by what ptxas says of registers, spills and
shared memory for sm_80, sm_86 and sm_90, and have not been timed."""

MAX_TILE_WIDTH = 256
MAX_TWO_TILE_WIDTH = 192
"""Columns of the widest heads that are two tiles of fewer than 256 columns together (`parts`), and so leave shared memory
for one more stage."""


def split_width(name: str, width: int, device: torch.device, max_width: int = MAX_TILE_WIDTH) -> dict[str, int]:
    """X_PART and X_REST of the width X: the columns of the two tiles that it is worked on as, side by side; 0: of one.

    A tile has a power of two of columns, and 192 in one of 256 are a third more work than there is. Heads up to `WIDEST`
    are one tile all the same, as they were timed, unless `widest` columns are too few. So are wider ones on other GPUs than
    Hopper: for sm_80 ptxas would leave the kernel of dK and dV 32 registers, and spill all else.
    """
    whole = padded_width(width)
    part, rest = whole // 2, max(padded_width(width - whole // 2), 16)
    two = whole > max_width or (whole > MAX_TIMED_WIDTH and part + rest < whole and is_hopper(device))
    return {f"{name}_PART": part if two else whole, f"{name}_REST": rest if two else 0}


def _float32_tile(width: int) -> Tile:
    return Tile(16, 16, 4, 1) if width > MAX_TIMED_WIDTH else FLOAT32_TILE


def band_forward(dtype: torch.dtype, width: int, has_window: bool, device: torch.device) -> Tile:
    if dtype == torch.float32:
        return _float32_tile(width)
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
        return _float32_tile(width)
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
        return _float32_tile(width)
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
    """`keys` are selection blocks, each of `strides` compressed keys; the next step scores `spill` of them again."""
    padded = padded_width(strides)
    least = max(padded_width(2 * spill), 16)  # 16: what a tensor core takes at least
    if dtype == torch.float32 and width > MAX_TIMED_WIDTH:
        return Tile(16, least, 4, 1)
    if dtype != torch.float32 and width > MAX_TIMED_WIDTH and is_hopper(device):
        # Timed at four strides to a block; with fewer, as many keys would spill four times what they do there.
        return Tile(64, max(32 if padded == 4 else 64 // padded, least), 4, 1)
    if dtype == torch.float32 or width > MAX_TIMED_WIDTH:
        return Tile(32, max(64 // padded, least), 4, 1)
    return Tile(64, max(128 // padded, least), 4, 3, 168 if n_selection > 256 and width <= 64 else None)


def block_topk_without_lse(tile: Tile, device: torch.device) -> Tile:
    """`tile` of `choice`, where there is no LSE and scores are reshaped as they come out of the product.

    On Blackwell, of fewer queries than its tensor memory takes: Triton 3.7.1 does not compile that reshape there. Not
    measured.
    """
    return tile._replace(rows=min(tile.rows, 32)) if is_blackwell(device) else tile


def block_topk_strides(dtype: torch.dtype, width: int) -> int:
    """The most strides of every selection block that are scored at once, where blocks are chosen without an LSE."""
    return 2 if dtype == torch.float32 and width > MAX_TIMED_WIDTH else 8


def block_topk_columns(dtype: torch.dtype, width: int, strides_at_once: int, tile: Tile) -> int:
    """Of a key's width, how much is scored at once, so that the keys of `tile` fit 96 KB in all stages."""
    columns = padded_width(width)
    while columns > 16 and tile.keys * strides_at_once * columns * dtype.itemsize * tile.stages > 96 * 1024:
        columns //= 2
    return columns


class RowTile(NamedTuple):
    """Rows of a tile, where its keys are a kv block or there are none. `registers` as in `Tile`."""

    rows: int
    warps: int
    stages: int
    registers: int | None = None

    def compile_options(self) -> dict[str, int]:
        return _make_compile_options(self.warps, self.stages, self.registers)


def selected_keys(dtype: torch.dtype, width: int, device: torch.device) -> int:
    """The most keys of a kv block that a tile of the selected branch holds."""
    return 32 if width > MAX_TIMED_WIDTH and (dtype == torch.float32 or not has_large_shared_memory(device)) else 64


def _selected_tile(dtype: torch.dtype, width: int, stages_wide: int) -> RowTile:
    if width > MAX_TIMED_WIDTH:
        return RowTile(16, 4, 1) if dtype == torch.float32 else RowTile(32, 8, 1)
    if dtype == torch.float32:
        return RowTile(16 if width > 64 else 32, 4, 1)
    return RowTile(64, 4, stages_wide if width > 64 else 3)


def selected_union(dtype: torch.dtype, width: int) -> RowTile:
    tile = _selected_tile(dtype, width, 2)
    # Four tiles to a multiprocessor, as many as its shared memory holds.
    return tile._replace(registers=128) if dtype != torch.float32 and width <= 64 else tile


def selected_items(dtype: torch.dtype, width: int, block: int, device: torch.device) -> RowTile:
    """Of the kernels that work through the inverted index in blocks of `block` keys, forward and backward.

    On Hopper a third stage costs no memory (`_gather_rows` says how); elsewhere it costs a tile. Wide heads' many rows are
    for tiles of 64 keys: with 16 or 32 the backward kernel turns its sums in shared memory, and would take 288 KB of it.
    """
    if width > MAX_TIMED_WIDTH and dtype != torch.float32 and block > 32 and is_hopper(device):
        return RowTile(128, 8, 2 if width <= MAX_TWO_TILE_WIDTH else 1)
    return _selected_tile(dtype, width, 3 if is_hopper(device) else 2)


def selected_columns(dtype: torch.dtype, width: int) -> int:
    """Columns of dk and dv that the backward kernel works on at once: at least half of a tile's."""
    return 128 if dtype == torch.float32 or width > MAX_TIMED_WIDTH else 64


def streaming_rows(width: int) -> int:
    """Rows of a program that only sums partial results: as many as keep the loads of all slots in flight at once."""
    return 16 if width > 64 else 32


GATE_ELEMENTS = 2048  # of each tensor, per program; with twice as many the backward pass takes a seventh longer


def gate_rows(width: int) -> int:
    return GATE_ELEMENTS // padded_width(width)


STREAMING_WARPS = 4
"""Of every kernel that multiplies no matrices."""

SUM_CHUNKS_KEYS, SUM_CHUNKS_AT_ONCE = 4, 8
DELTA_ROWS = 64
SUM_ITEMS_ELEMENTS, SUM_ITEMS_AT_ONCE = 1024, 4
SLOTS_AT_ONCE = 16  # more spill registers, and ptxas takes half a minute


def slots_at_once(n_sel: int) -> int:
    """Of the blocks of a query, how many partial results are loaded together: an equal share of them."""
    return ceil_div(n_sel, ceil_div(n_sel, SLOTS_AT_ONCE))


COUNT_ENTRIES, COUNT_COLUMNS, COUNT_WARPS = 4096, 64, 8
SCATTER_ENTRIES = 1024
FIRST_QUERY_ITEMS = 256


DECODING_PROGRAMS = 256
"""Programs that a kernel of a decoding step is split into at least: about two for each multiprocessor of an H200."""
DECODING_PARTS = 32
"""Parts that the keys of a branch are split into at most; each costs a partial output."""
DECODING_ROWS = 64
MERGE_ELEMENTS, MERGE_WARPS = 4096, 2
"""For 32 sequences and 64 heads of 128 on an H200: 4.5 us with two warps, 8.7 with four, 23 with eight."""
IMPORTANCE_ELEMENTS, IMPORTANCE_BLOCKS = 4096, 64
TOPK_BLOCKS, TOPK_BLOCKS_PER_THREAD = 2048, 8
LOGSUMEXP_KEYS = 256
MAX_PDL_TOKENS = 4
"""New tokens up to which kernels begin before the ones ahead have ended: for 32 sequences a step takes longer by it."""
APPEND_WARPS = 1  # for a row of 256 numbers at most
MAX_LINEAR_ROWS = 64
"""Rows up to which linear maps of a decoding step are ours. Many rows are a library's business: reading weights is then
the lesser part."""


class LinearTile(NamedTuple):
    """Of `nsa_linear`: rows and columns of a program, and how much of the sum it takes at once."""

    rows: int
    columns: int
    chunk: int
    warps: int
    stages: int


def linear_tile(dtype: torch.dtype, rows: int, columns: int, depth: int) -> LinearTile:
    """For so many rows of `depth` numbers, and maps that have so many columns together."""
    if rows <= 4:
        padded, few = padded_width(rows), 4 if columns <= 1024 else 8  # few columns still have to fill the GPU
        chunk = min(padded_width(depth), 4096 // padded)
        return LinearTile(padded, few, chunk, min(max(padded * few * chunk // 2048, 1), 8), 1)
    # A tensor core takes 16 rows. Weights that several programs read come from the cache.
    tile, columns_at_once = min(max(padded_width(rows), 16), MAX_LINEAR_ROWS), 16
    while tile > 16 and ceil_div(columns, columns_at_once) * ceil_div(rows, tile) < DECODING_PROGRAMS // 2:
        tile //= 2
    return LinearTile(tile, columns_at_once, (2048 if dtype == torch.float32 else 4096) // tile, 4, 3)


def decoding_parts(programs: int, tiles: int) -> int:
    """Into how many parts the keys of each of so many programs are split, where they are so many tiles at most."""
    wanted = min(ceil_div(DECODING_PROGRAMS, programs), tiles, DECODING_PARTS)
    return padded_width(max(wanted, 1))


def importance_blocks(scores: int) -> int:
    """Selection blocks that a program weighs, each by so many scores: those of all heads to the keys that begin in it."""
    return max(min(IMPORTANCE_ELEMENTS // scores, IMPORTANCE_BLOCKS), 1)


def topk_tile(blocks: int) -> tuple[int, int]:
    """(selection blocks that are ranked at once, warps), where a query has so many blocks at most."""
    at_once = min(max(padded_width(max(blocks, 1)), 32), TOPK_BLOCKS)
    return at_once, min(max(at_once // (32 * TOPK_BLOCKS_PER_THREAD), 1), 8)


def logsumexp_blocks(programs: int, blocks: int, strides_at_once: int) -> int:
    """Selection blocks that each of so many programs, times their parts, scores: so many of an indexer's keys at once."""
    each = max(LOGSUMEXP_KEYS // strides_at_once, 16)
    while each > 8 and programs * ceil_div(blocks, each) < DECODING_PROGRAMS:
        each //= 2
    return each


def decoding_tile(dtype: torch.dtype, width: int, rows: int, device: torch.device) -> Tile:
    """Of the kernels that read a cache. `rows` are those that there are; a tensor core takes 16 at least."""
    if dtype == torch.float32:
        return Tile(
            min(max(padded_width(rows), 16), 16 if width > MAX_TIMED_WIDTH else 32), _float32_tile(width).keys, 4, 1
        )
    padded = min(max(padded_width(rows), 16), DECODING_ROWS)
    return Tile(
        padded,
        32 if width > MAX_TIMED_WIDTH else 64,
        8 if width > MAX_TIMED_WIDTH else 4,
        3 if has_large_shared_memory(device) else 2,
    )
