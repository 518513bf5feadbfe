"""The launch table: the tiles with which the benchmarked shapes were measured."""

from __future__ import annotations

import ast
import functools

import pytest
import torch
from kernel_sources import TREES

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_table import RowTile, Tile

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
# dtype, head width, large shared memory -> rows, keys, warps, stages, registers, one_loop: compressed and window forward,
# dq; dk and dv.
SIMPLE = (32, 32, 4, 1, None, False)
BAND = {
    (FP32, 64, True): (SIMPLE,) * 5,
    (FP32, 128, False): (SIMPLE,) * 5,
    (BF16, 64, True): (
        (64, 64, 4, 3, 128, False),
        (64, 32, 4, 3, 96, False),
        (64, 64, 4, 3, 168, False),
        (64, 32, 4, 3, 96, False),
        (64, 64, 4, 3, None, False),
    ),
    (BF16, 128, True): (
        (128, 64, 8, 3, None, False),
        (128, 32, 8, 3, 128, False),
        (64, 64, 4, 2, None, False),
        (64, 32, 4, 2, 168, True),
        (64, 128, 8, 3, None, False),
    ),
    (BF16, 128, False): (
        (64, 32, 4, 3, 168, False),
        (128, 32, 8, 3, 128, False),
        (64, 32, 4, 2, None, False),
        (64, 32, 4, 2, 168, True),
        (32, 64, 4, 3, None, False),
    ),
}
BAND[FP32, 64, False] = BAND[FP32, 128, True] = BAND[FP32, 64, True]
BAND[BF16, 64, False] = BAND[BF16, 64, True]  # heads of width 64 fit on any GPU


BAND_FINDERS = (
    launch_table.band_forward,
    launch_table.band_dq,
    lambda dtype, width, _, device: launch_table.band_dkv(dtype, width, device),
)
WIDER = {
    (FP32, True): [(16, 16, 4, 1)] * 6,
    (FP32, False): [(16, 16, 4, 1)] * 6,
    (BF16, True): [(64, 32, 8, 2)] * 4 + [(32, 64, 8, 2)] * 2,
    (BF16, False): [(32, 32, 4, 2)] * 2 + [(32, 32, 4, 1)] * 4,
}


@pytest.mark.parametrize(("dtype", "width", "large_memory"), BAND, ids=str)
def test_band_tiles(dtype, width, large_memory, monkeypatch):
    monkeypatch.setattr(launch_table, "has_large_shared_memory", lambda device: large_memory)
    forward, dq = launch_table.band_forward, launch_table.band_dq
    tiles = [find(dtype, width, windowed, CPU) for find in (forward, dq) for windowed in (False, True)]
    assert (*map(tuple, tiles), tuple(launch_table.band_dkv(dtype, width, CPU))) == BAND[dtype, width, large_memory]


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_widths_up_to_64_share_tiles_and_so_do_wider_ones(dtype):
    for find in (launch_table.band_dkv, functools.partial(launch_table.selected_items, block=64)):
        tiles = [find(dtype, width, device=CPU) for width in (32, 64, 96, 128)]
        assert tiles[0] == tiles[1] != tiles[2] == tiles[3]


@pytest.mark.parametrize(
    ("dtype", "width", "blocks", "tile"),
    [
        (BF16, 64, 32, Tile(64, 32, 4, 3)),  # 2048 tokens
        (BF16, 64, 128, Tile(64, 32, 4, 3)),
        (BF16, 64, 256, Tile(64, 32, 4, 3)),
        (BF16, 64, 512, Tile(64, 32, 4, 3, 168)),  # 32,768 tokens
        (BF16, 64, 1024, Tile(64, 32, 4, 3, 168)),
        (BF16, 128, 512, Tile(64, 32, 4, 3)),
        (FP32, 64, 1024, Tile(32, 16, 4, 1)),
    ],
)
def test_block_topk_tiles(dtype, width, blocks, tile):
    assert launch_table.block_topk(dtype, width, 4, 1, blocks, CPU) == tile


@pytest.mark.parametrize(("strides", "spill", "keys"), [(1, 0, 128), (3, 1, 32), (16, 1, 16), (2, 7, 64), (4, 20, 64)])
def test_block_topk_step_has_room_for_the_spill(strides, spill, keys):
    assert launch_table.block_topk(BF16, 64, strides, spill, 32, CPU).keys == keys


def test_selected_tiles(monkeypatch):
    for hopper, stages in ((True, 3), (False, 2)):
        monkeypatch.setattr(launch_table, "is_hopper", lambda device, hopper=hopper: hopper)
        assert launch_table.selected_items(BF16, 64, 64, CPU) == RowTile(64, 4, 3)
        assert launch_table.selected_items(BF16, 128, 64, CPU) == RowTile(64, 4, stages)
        assert launch_table.selected_items(FP32, 64, 64, CPU) == RowTile(32, 4, 1)
        assert launch_table.selected_items(FP32, 128, 64, CPU) == RowTile(16, 4, 1)
    unions = [launch_table.selected_union(BF16, width) for width in (64, 128)]
    assert unions == [RowTile(64, 4, 3, 128), RowTile(64, 4, 2)]
    assert [launch_table.streaming_rows(width) for width in (64, 128)] == [32, 16]
    assert [launch_table.selected_columns(dtype, 128) for dtype in (BF16, FP32)] == [64, 128]
    assert [launch_table.gate_rows(width) for width in (64, 96, 128)] == [32, 16, 16]


def test_amd_gpus_get_small_tiles_without_register_limit(monkeypatch):
    """Torch reports capability 9 for MI300 as well as for Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.3")
    ways = (
        launch_table.has_large_shared_memory,
        launch_table.is_hopper,
        launch_table.is_blackwell,
        launch_table.supports_pdl,
    )
    assert [way.__wrapped__(torch.device("cuda")) for way in ways] == [False] * 4
    assert Tile(64, 64, 4, 3, 128).compile_options() == {"num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch_table.is_hopper.__wrapped__(torch.device("cuda"))
    assert Tile(64, 64, 4, 3, 128).compile_options() == {"num_warps": 4, "num_stages": 3, "maxnreg": 128}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("large_memory", [True, False])
def test_wider_heads(dtype, large_memory, monkeypatch):
    monkeypatch.setattr(launch_table, "has_large_shared_memory", lambda device: large_memory)
    for width in (144, 256):
        bands = [find(dtype, width, windowed, CPU) for find in BAND_FINDERS for windowed in (False, True)]
        assert [tile[:4] for tile in bands] == WIDER[dtype, large_memory]
        # A kv block of 64 keys and values of this width would fill the available shared memory.
        assert launch_table.selected_keys(dtype, width, CPU) == (64 if dtype == BF16 and large_memory else 32)
        # At least half of the columns of a tile, whose width is the next power of two.
        assert launch_table.selected_columns(dtype, width) == 128
    assert launch_table.selected_keys(dtype, 128, CPU) == 64


def test_split_width(monkeypatch):
    def tiles(widths, widest=256):
        return {width: tuple(launch_table.split_width("DK", width, CPU, widest).values()) for width in widths}

    one = {16: (16, 0), 48: (64, 0), 96: (128, 0), 128: (128, 0)}  # the timed variants
    assert tiles((*one, 144, 192, 256)) == one | {144: (256, 0), 192: (256, 0), 256: (256, 0)}
    assert tiles((32, 64, 80, 96, 128), 64) == {32: (32, 0), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (64, 64)}
    assert tiles((128, 192, 256), 128) == {128: (128, 0), 192: (128, 64), 256: (128, 128)}
    monkeypatch.setattr(launch_table, "is_hopper", lambda device: True)
    two = {144: (128, 16), 160: (128, 32), 192: (128, 64), 208: (256, 0), 256: (256, 0)}
    assert tiles((*one, *two)) == one | two
    assert launch_table.split_width("DV", 192, CPU) == {"DV_PART": 128, "DV_REST": 64}


def test_wider_heads_on_hopper(monkeypatch):
    """Timed at 192/128, not in float32. Wider heads have no shared memory for one more stage."""
    monkeypatch.setattr(launch_table, "is_hopper", lambda device: True)
    for width, stages in ((192, 3), (208, 2), (256, 2)):
        forward, dq, dkv = (find(BF16, width, False, CPU) for find in BAND_FINDERS)
        assert (forward, dq, dkv) == (Tile(64, 32, 4, 3), Tile(64, 32, 4, 2), Tile(32, 128, 8, stages))
        for block, rows in (
            (16, RowTile(32, 8, 1)),
            (32, RowTile(32, 8, 1)),
            (48, RowTile(128, 8, stages - 1)),
            (64, RowTile(128, 8, stages - 1)),
        ):
            assert launch_table.selected_items(BF16, width, block, CPU) == rows
        for strides, blocks in ((1, 64), (2, 32), (3, 32), (4, 32), (5, 16), (16, 16)):
            assert launch_table.block_topk(BF16, width, strides, 1, 512, CPU) == Tile(64, blocks, 4, 1)
    assert [find(FP32, 192, True, CPU) for find in BAND_FINDERS] == [Tile(16, 16, 4, 1)] * 3
    assert launch_table.selected_items(FP32, 192, 64, CPU) == RowTile(16, 4, 1)
    assert launch_table.block_topk(FP32, 192, 4, 1, 512, CPU) == Tile(16, 16, 4, 1)


@pytest.mark.parametrize(
    ("dtype", "width", "strides", "tile", "columns"),
    [
        (BF16, 64, 4, Tile(64, 32, 4, 3), 64),
        (BF16, 128, 4, Tile(64, 32, 4, 3), 128),
        (BF16, 128, 16, Tile(64, 16, 4, 3), 64),
        (BF16, 256, 16, Tile(32, 16, 4, 1), 128),
        (FP32, 256, 16, Tile(16, 16, 4, 1), 64),
        (FP32, 144, 4, Tile(16, 16, 4, 1), 256),
    ],
)
def test_block_topk_columns(dtype, width, strides, tile, columns):
    assert launch_table.block_topk_columns(dtype, width, strides, tile) == columns


def test_decoding_tiles(monkeypatch):
    """Only head width 128 in half precision was timed, without comparison to other tiles."""
    for large_memory, stages in ((True, 3), (False, 2)):
        monkeypatch.setattr(launch_table, "has_large_shared_memory", lambda device, large_memory=large_memory: large_memory)
        assert launch_table.decoding_tile(BF16, 128, 6, CPU) == Tile(16, 64, 4, stages)
        assert launch_table.decoding_tile(BF16, 64, 512, CPU) == Tile(64, 64, 4, stages)
        assert launch_table.decoding_tile(BF16, 192, 17, CPU) == Tile(32, 32, 8, stages)
    tiles = [launch_table.decoding_tile(FP32, width, 100, CPU) for width in (64, 128, 256)]
    assert tiles == [Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)]
    # 128K tokens have 8,191 compressed keys; one sequence of four groups, and 32 sequences.
    assert [launch_table.decoding_parts(programs, 128) for programs in (4, 8, 128, 1000)] == [32, 32, 2, 1]
    assert [launch_table.decoding_parts(4, tiles) for tiles in (0, 1, 5, 8)] == [1, 1, 8, 8]
    assert [launch_table.importance_blocks(scores) for scores in (1, 64, 128, 8192)] == [64, 64, 32, 1]
    assert [launch_table.topk_tile(blocks) for blocks in (0, 300, 1024, 10**5)] == [(32, 1), (512, 2), (1024, 4), (2048, 8)]


def test_launches_take_all_constants_from_the_table():
    """Tiles, warps, stages and registers in launches are not literals."""
    named = {"num_warps", "num_stages", "maxnreg", "ROWS", "KEYS", "QUERIES", "BLOCKS", "ENTRIES", "ELEMENTS", "AT_ONCE"}
    wrong = []
    for path, tree in TREES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
        for keyword in (keyword for call in calls for keyword in call.keywords):
            if keyword.arg in named and isinstance(keyword.value, ast.Constant):
                wrong.append(f"{path.name}: {keyword.arg}")
    assert not wrong
