"""Tile search: each tile is checked before it is timed, the search follows the fastest, the table stays unchanged."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from looping import looped
from rich.console import Console
from typer.testing import CliRunner

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_table import RowTile, Tile
from nsa_lab.bench import attention_parity, tune_tiles
from nsa_lab.bench.attention_parts import Part
from nsa_lab.bench.attention_rows import Shape
from nsa_lab.cli import app
from nsa_lab.config import NSAConfig

triton_errors = pytest.importorskip("triton.errors")

OWN = Tile(64, 64, 4, 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the tiles with which a part was run. The part reads a tile from the table, computes nothing, passes parity."""
    tiles: list[Any] = []
    monkeypatch.setattr(launch_table, "band_forward", lambda *_: OWN)
    monkeypatch.setattr(attention_parity, "check_parity", lambda *_: ({"out": [0.0, 1.0]}, True))

    def run(x: torch.Tensor) -> torch.Tensor:
        tiles.append(launch_table.band_forward(x.dtype, 64, False, x.device))
        return x

    monkeypatch.setattr(tune_tiles, "part", Part("compressed", "triton", run, [torch.zeros(1)], 1.0), raising=False)
    return tiles


def tried(most: int = 40, kernel: str = "band_forward, compressed") -> list[tune_tiles.TileTiming]:
    part = tune_tiles.part  # pyright: ignore[reportAttributeAccessIssue]
    return tune_tiles._search_tiles("shape", kernel, part, part, NSAConfig(), most)


def timed_by(monkeypatch: pytest.MonkeyPatch, asked: list[Any], ms: Callable[[Any], float]) -> None:
    def time_ms(run: Callable[[], object], device: torch.device) -> float:
        run()
        return ms(asked[-1])

    monkeypatch.setattr(tune_tiles, "time_ms", time_ms)


@looped
@pytest.mark.parametrize("tile", [OWN, Tile(16, 256, 8, 1, 168, one_loop=True), RowTile(32, 2, 5)])
@pytest.mark.parametrize("loops", [True, False])
def test_neighbors_differ_in_one_property_within_bounds(tile: Any, loops: bool) -> None:
    found = list(tune_tiles.list_neighbors(tile, has_one_loop=loops))
    assert len(set(found)) == len(found) and tile not in found
    changed = set()
    for other in found:
        (name,) = (name for name in tile._fields if getattr(other, name) != getattr(tile, name))
        changed.add(name)
        assert 16 <= other.rows <= 256 and 2 <= other.warps <= 8 and 1 <= other.stages <= 5
    assert changed == set(tile._fields) - (set() if loops else {"one_loop"})


def test_the_search_continues_from_the_fastest_change(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    """Two steps: fewer rows, then eight warps. A gain of half a percent is too small."""
    cost = {"rows": {32: 0.8}, "warps": {8: 0.9}, "stages": {3: 0.995}}

    def ms(tile: Tile) -> float:
        took = 100.0
        for name, shares in cost.items():
            took *= shares.get(getattr(tile, name), 1.0)
        return took

    timed_by(monkeypatch, asked, ms)
    rows = tried()
    assert rows[0].tile == str(OWN) and rows[0].of_table == 1.0
    best = min(rows, key=lambda row: row.ms or 1e9)
    assert best.ms == pytest.approx(0.8 * 0.9 * 100, rel=0.006) and best.of_table == pytest.approx(best.ms / 100)
    assert "rows=32" in best.tile and "warps=8" in best.tile
    assert not any("stages=4" in row.tile for row in rows), "the search does not continue from a gain of half a percent"
    assert len({row.tile for row in rows}) == len(rows), "no tile is timed twice"
    assert launch_table.band_forward() == OWN  # pyright: ignore[reportCallIssue]


def test_the_number_of_tiles_is_limited(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    timed_by(monkeypatch, asked, lambda tile: 100.0 / tile.stages)
    assert len(tried(most=3)) == 3 and len(tried(most=1)) == 1


def test_a_tile_that_fails_parity_has_no_speed(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    timed_by(monkeypatch, asked, lambda tile: float(tile.rows))

    def check(short: Part, long: Part, nsa: NSAConfig) -> tuple[dict[str, list[float]], bool]:
        short.run(*short.inputs)
        return {"out": [1.0, 0.5]}, asked[-1].rows >= 64

    monkeypatch.setattr(attention_parity, "check_parity", check)
    rows = tried()
    failed = [row for row in rows if "rows=32" in row.tile]
    assert failed and all(row.ms is None and "FAILED PARITY" in row.note for row in failed)
    assert min(row.ms for row in rows if row.ms) == 64.0


@pytest.mark.parametrize("error", [triton_errors.TritonError("too large\nmore"), RuntimeError("PassManager::run failed")])
def test_a_tile_that_does_not_run_is_noted_and_the_search_continues(
    monkeypatch: pytest.MonkeyPatch, asked: list[Any], error: Exception
) -> None:
    def ms(tile: Tile) -> float:
        if tile.rows == 128:
            raise error
        return 5.0

    timed_by(monkeypatch, asked, ms)
    rows = tried()
    (failed,) = (row for row in rows if row.note)
    assert failed.ms is None and failed.note == f"does not run: {str(error).splitlines()[0]}"
    assert launch_table.band_forward() == OWN  # pyright: ignore[reportCallIssue]


def test_other_exceptions_are_raised(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    def ms(tile: Tile) -> float:
        raise KeyError("ours")

    timed_by(monkeypatch, asked, ms)
    with pytest.raises(KeyError):
        tried()
    assert launch_table.band_forward() == OWN  # pyright: ignore[reportCallIssue]


def test_a_kernel_that_is_not_launched_is_noted(asked: list[Any]) -> None:
    (row,) = tried(kernel="choice")
    assert row.note == "not launched at this shape" and row.ms is None


@pytest.mark.slow
def test_every_kernel_takes_its_tile_from_the_table(tmp_path) -> None:
    """Forward and backward; at so few tokens the selected branch uses no inverted index in the forward pass."""
    console = Console(file=io.StringIO(), width=200)
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=13)
    found = tune_tiles.run_tune(
        [Shape(37, 1, 2, 1, 16)], tmp_path / "tune.json", max_tiles=1, device="cpu", nsa=nsa, console=console
    )
    assert [row.kernel for row in found] == list(tune_tiles.ENTRIES)
    for row in found:
        assert row.ms and row.of_table == 1.0 and all(error <= limit for error, limit in row.parity.values()), row
    assert [row["kernel"] for row in json.loads((tmp_path / "tune.json").read_text())["rows"]] == list(tune_tiles.ENTRIES)


def test_an_unknown_kernel_is_a_one_line_error() -> None:
    told = CliRunner().invoke(app, ["bench", "tune", "--kernel", "band"])
    assert told.exit_code and "--kernel: kernel 'band': expected one of 'band_forward, compressed'" in str(told.exception)
