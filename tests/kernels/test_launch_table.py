"""Limits that every tile of the launch table satisfies, for all supported widths, dtypes and GPUs."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch
from kernel_sources import TREES

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import decoding_table
from nsa_lab.attention.kernels.launch_table import MAX_TIMED_WIDTH, Tile
from nsa_lab.attention.kernels.launch_utils import padded_width
from nsa_lab.attention.kernels.selected import launch as selected

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES, WIDTHS, BLOCKS = (FP32, BF16), range(16, 257, 16), (16, 32, 48, 64, 128, 256)
# Shared memory of at least 160 KB, Hopper, Blackwell.
GPUS = {"A100": (True, False, False), "H100": (True, True, False), "B200": (True, False, True), "small": (False,) * 3}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the table believe that the device is this GPU."""
    names = ("has_large_shared_memory", "is_hopper", "is_blackwell")
    for name, value in zip(names, GPUS[request.param], strict=True):
        monkeypatch.setattr(launch_table, name, lambda device, value=value: value)
    return request.param


def assert_valid(tile: tuple[int, ...], *, rows_and_keys: int) -> None:
    """Assert that sizes are powers of two that a tensor-core product takes, and that warps and stages are positive."""
    *sizes, warps, stages = tile[: rows_and_keys + 2]
    assert all(size >= 16 and size == padded_width(size) for size in sizes), tile
    assert warps in (1, 2, 4, 8) and 1 <= stages <= 4, tile


def test_tiles_are_valid_on_every_gpu(gpu: str) -> None:
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        for window in (False, True):
            assert_valid(launch_table.band_forward(dtype, width, window, CPU), rows_and_keys=2)
            assert_valid(launch_table.band_dq(dtype, width, window, CPU), rows_and_keys=2)
        assert_valid(launch_table.band_dkv(dtype, width, CPU), rows_and_keys=2)
        assert_valid(launch_table.selected_union(dtype, width), rows_and_keys=1)
        for rows in (1, 6, 17, 512):
            tile = decoding_table.decoding_tile(dtype, width, rows, CPU)
            assert_valid(tile, rows_and_keys=2)
            assert tile.rows <= 2 * max(rows, 16)
        for block in BLOCKS:
            tile = launch_table.selected_items(dtype, width, block, CPU)
            assert_valid(tile, rows_and_keys=1)
            # With 128 rows and at most 32 keys the backward kernel needs 288 KB for wide heads.
            assert tile.rows <= 64 or width <= MAX_TIMED_WIDTH or block > 32, (width, block)


def test_block_topk_keys_fit_in_96_kb_and_have_room_for_the_spill(gpu: str) -> None:
    for dtype, width, strides, spill, blocks in itertools.product(DTYPES, WIDTHS, (1, 2, 3, 4, 16), (0, 1, 7), (32, 1024)):
        tile = launch_table.block_topk(dtype, width, strides, spill, blocks, CPU)
        assert_valid(tile, rows_and_keys=2)
        assert tile.keys >= 2 * spill
        at_once = min(strides, launch_table.block_topk_strides(dtype, width))
        columns = launch_table.block_topk_columns(dtype, width, at_once, tile)
        assert padded_width(width) % columns == 0
        assert columns == 16 or tile.keys * at_once * columns * dtype.itemsize * tile.stages <= 96 * 1024
        rows = launch_table.block_topk_without_lse(tile, CPU).rows
        assert rows <= 32 if gpu == "B200" else rows == tile.rows, (
            "Triton 3.7.1 does not compile more rows for tensor memory"
        )


def test_block_score_tiles_fit_in_96_kb(gpu: str) -> None:
    """Keys of all stages; in tensor memory, fewer queries than Triton 3.7.1 fails to compile."""
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        tile = launch_table.block_scores(dtype, width, CPU)
        assert_valid(tile, rows_and_keys=2)
        ranking = launch_table.block_ranking(tile)
        assert_valid(ranking, rows_and_keys=2)
        assert tile.rows % ranking.rows == 0
        assert tile.keys * padded_width(width) * dtype.itemsize * tile.stages <= 96 * 1024
        assert gpu != "B200" or tile.rows <= 32


def test_backward_columns_are_at_least_half_a_tile() -> None:
    """The backward kernel of the selected branch processes the columns of dk and dv in at most two parts."""
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        assert 2 * launch_table.selected_columns(dtype, width) >= padded_width(width), (dtype, width)


def test_kv_blocks_of_wide_heads_fit_small_shared_memory(gpu: str) -> None:
    """Keys and values of one block, in float32 or on a small GPU, take at most 64 KB."""
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        keys = launch_table.selected_keys(dtype, width, CPU)
        assert keys in (32, 64)
        assert gpu != "small" or 2 * keys * padded_width(width) * dtype.itemsize <= 64 * 1024


def test_two_tiles_hold_every_column(gpu: str) -> None:
    for width, widest in itertools.product(WIDTHS, (64, 128, 256)):
        if width > 2 * widest:
            continue
        part, rest = launch_table.split_width("DK", width, CPU, widest).values()
        assert part == padded_width(part) <= widest and rest in (0, *(padded_width(n) for n in range(16, widest + 1)))
        assert part + rest >= width and (rest == 0 or part < width)
        padded = padded_width(width)
        saves_columns = padded // 2 + max(padded_width(width - padded // 2), 16) < padded
        is_split = padded > widest or (gpu == "H100" and width > MAX_TIMED_WIDTH and saves_columns)
        assert (rest > 0) == is_split, (width, widest)
    assert list(launch_table.split_width("DV", 192, CPU)) == ["DV_PART", "DV_REST"]


def test_amd_gpus_get_small_tiles_without_register_limit(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_decoding_splits_keys_within_its_limits() -> None:
    for programs, tiles in itertools.product((1, 4, 8, 128, 1000), (0, 1, 5, 8, 128)):
        parts = decoding_table.decoding_parts(programs, tiles)
        assert parts == padded_width(parts) and 1 <= parts <= decoding_table.DECODING_PARTS
        assert parts < 2 * max(tiles, 1), "no part without a tile, but for the rounding to a power of two"
    for scores in (1, 64, 128, 8192):
        blocks = decoding_table.importance_blocks(scores)
        assert 1 <= blocks <= decoding_table.IMPORTANCE_BLOCKS
        assert blocks == 1 or blocks * scores <= decoding_table.IMPORTANCE_ELEMENTS
    for blocks in (0, 300, 1024, 10**5):
        at_once = decoding_table.topk_blocks(blocks)
        assert min(blocks, decoding_table.TOPK_BLOCKS) <= at_once == padded_width(at_once)
    for dtype, programs, blocks, strides, width in itertools.product(
        DTYPES, (1, 32), (1, 1024, 8192), (1, 4, 64), (16, 96, 256)
    ):
        tile = decoding_table.index_tile(dtype, width, programs, blocks, strides)
        assert all(size == padded_width(size) for size in tile[:4]) and tile.strides <= strides
        assert tile.blocks % tile.blocks_at_once == 0
        assert tile.blocks_at_once * tile.strides * padded_width(width) * dtype.itemsize * tile.stages <= 96 * 1024
    for n_sel in range(1, 65):
        at_once = launch_table.slots_at_once(n_sel)
        assert at_once <= launch_table.SLOTS_AT_ONCE and -(-n_sel // at_once) == -(-n_sel // launch_table.SLOTS_AT_ONCE)
    for dtype, rows, columns, depth, is_gated in itertools.product(
        DTYPES, (1, 3, 4, 5, 64), (40, 5000), (48, 4096), (False, True)
    ):
        tile = decoding_table.linear_tile(dtype, rows, columns, depth, is_gated)
        assert all(size == padded_width(size) for size in tile[:4]) and tile.warps <= 8
        assert tile.rows <= decoding_table.MAX_LINEAR_ROWS and (tile.rows >= 16 or rows <= tile.rows)
        assert tile.rows * tile.chunk <= 4096 if rows <= 4 else tile.chunk >= 16 * tile.warps


def test_the_only_length_threshold_is_that_of_the_selected_branch() -> None:
    """The measurements of both strategies are in docs/log/kernels.md."""
    longest = selected.UNION_TOKENS
    strategies = [selected.get_forward_strategy(T, 64) for T in (1, longest, longest + 1, 16 * longest)]
    assert strategies == ["union", "union", "gather", "gather"]
    thresholds = {
        (path.name, target.id)
        for path, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_TOKENS")
    }
    assert thresholds == {("launch.py", "UNION_TOKENS"), ("decoding_table.py", "MAX_PDL_TOKENS")}


def test_launches_take_all_constants_from_the_table() -> None:
    """Tiles, warps, stages and registers in launches are not literals."""
    named = {"num_warps", "num_stages", "maxnreg", "ROWS", "KEYS", "QUERIES", "BLOCKS", "ENTRIES", "ELEMENTS", "AT_ONCE"}
    wrong = []
    for path, tree in TREES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
        for keyword in (keyword for call in calls for keyword in call.keywords):
            if keyword.arg in named and isinstance(keyword.value, ast.Constant):
                wrong.append(f"{path.name}: {keyword.arg}")
    assert not wrong
