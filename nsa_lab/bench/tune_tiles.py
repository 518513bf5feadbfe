"""`nsa-lab bench tune`: time kernel tiles that are not in the launch table, each after a parity check.

A local search: starting from the table's tile, change one property at a time and continue from the fastest change, until no
change gains more than the variation between runs. The table is code (attention/kernels/launch_table.py), selected by shape,
dtype and device. Faster tiles are printed in its notation and entered by hand, together with its test.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from torch import Tensor

from nsa_lab.attention import resolve_backend
from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_table import RowTile, Tile
from nsa_lab.bench import attention_parity as parity
from nsa_lab.bench.attention_parts import Part, make_parts
from nsa_lab.bench.attention_rows import GPU_SHAPES, Shape
from nsa_lab.bench.harness import Benchmark, Output, RowColumn, Setup, make_record, measure_if_correct
from nsa_lab.bench.timing import make_forward_backward, time_ms
from nsa_lab.bench.tuned_kernels import ENTRIES, Entry
from nsa_lab.config import NSAConfig

AnyTile = Tile | RowTile

CPU_SHAPE = Shape(70, 1, 4, 2, 16)
MAX_CHECKED_TOKENS = 999  # length of the sequence for the parity check in float64; odd, so that tiles are partly filled
MIN_GAIN = 0.01
"""Minimum fraction of time that a tile must save; less is the variation between runs."""
MIN_TILE, MAX_TILE = 16, 256  # rows and keys of a tile; a tensor core needs at least 16
REGISTERS = (96, 128, 168, None)


@dataclass
class TileTiming:
    """A kernel with one tile at one shape. Field names are keys of the record.

    `ms`: time of its part, forward or forward and backward; None: see `note`.
    """

    shape: str
    kernel: str
    tile: str
    ms: float | None = None
    of_table: float | None = None
    """Time as a fraction of the time with the table's own tile."""
    note: str = ""
    parity: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


BENCHMARK = Benchmark[TileTiming](
    title="Kernel tiles, the launch table's first: ms of the part that uses them",
    columns=(
        RowColumn("shape", align="left"),
        RowColumn("kernel", align="left"),
        RowColumn("tile", align="left"),
        RowColumn("ms"),
        RowColumn("of the table's", "of_table"),
        RowColumn("note", align="left"),
    ),
    is_bold=lambda row, rows: row.ms is not None and row.ms == min(other.ms for other in rows if other.ms is not None),
)


def run_tune(
    shapes: Sequence[Shape] | None = None,
    json_path: Path | None = None,
    *,
    kernels: Sequence[str] | None = None,
    max_tiles: int = 40,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    nsa: NSAConfig | None = None,
    console: Console | None = None,
) -> list[TileTiming]:
    """Time up to `max_tiles` tiles of each kernel (keys of `ENTRIES`) at each shape.

    Prints a table and replaces the JSON file after each kernel. Defaults: every kernel; on a GPU the four shapes of `bench
    attention`. On a CPU, Triton is interpreted and times are meaningless: one tiny shape. Raises as `resolve_backend` does
    if the kernels cannot run.
    """
    setup, nsa = Setup.resolve(device, dtype), nsa or NSAConfig()
    backends = resolve_backend(setup.device, setup.dtype, nsa, backend="triton")

    @functools.lru_cache(maxsize=1)  # the parts of one shape at a time: they hold gigabytes
    def make_part_pairs(shape: Shape) -> dict[str, tuple[Part, Part]]:
        sizes = shape.H, shape.G, shape.D, nsa, backends, setup.device, setup.dtype
        short = make_parts(min(shape.T, MAX_CHECKED_TOKENS), 1, *sizes, Dv=shape.value_width)
        long = make_parts(shape.T, shape.B, *sizes, Dv=shape.value_width)
        return {part.name: (part, long_part) for part, long_part in zip(short, long, strict=True)}

    def measure_kernel(case: tuple[Shape, str]) -> list[TileTiming]:
        shape, name = case
        return _search_tiles(str(shape), name, *make_part_pairs(shape)[ENTRIES[name].part], nsa, max_tiles)

    return BENCHMARK.run(
        [
            (shape, name)
            for shape in shapes or setup.select(gpu=GPU_SHAPES, cpu=(CPU_SHAPE,))
            for name in kernels or ENTRIES
        ],
        measure_kernel,
        Output(json_path, console=console),
        make_record(setup, machine=setup.describe_machine(), dtype=str(setup.dtype), nsa=nsa.model_dump()),
        label=lambda case: f"{case[0]}: {case[1]}",
    )


def list_neighbors(tile: AnyTile, *, has_one_loop: bool) -> Iterator[AnyTile]:
    """Yield tiles that differ from `tile` in one property; `has_one_loop`: the kernel uses `one_loop`."""

    def replace_each(name: str, values: Sequence[object]) -> Iterator[AnyTile]:
        return (tile._replace(**{name: value}) for value in values)

    for name in ("rows", "keys"):
        size = getattr(tile, name, 0)
        yield from replace_each(name, [n for n in (size // 2, 2 * size) if MIN_TILE <= n <= MAX_TILE])
    yield from replace_each("warps", [n for n in (tile.warps // 2, 2 * tile.warps) if 2 <= n <= 8])
    yield from replace_each("stages", [n for n in (tile.stages - 1, tile.stages + 1) if 1 <= n <= 5])
    yield from replace_each("registers", [n for n in REGISTERS if n != tile.registers])
    if has_one_loop and isinstance(tile, Tile):
        yield from replace_each("one_loop", [not tile.one_loop])


def _search_tiles(shape: str, name: str, short: Part, long: Part, nsa: NSAConfig, max_tiles: int) -> list[TileTiming]:
    """Return the timing of the table's tile, followed by all other tiles in search order."""
    entry = ENTRIES[name]
    run = _make_pass(long, backward=entry.backward)
    table_tile = _find_requested_tile(entry.function, run)
    if table_tile is None:
        return [TileTiming(shape, name, "", note="not launched at this shape")]
    first = _time_tile(shape, name, table_tile, short, long, nsa, run)
    rows, timed_tiles, best = [first], {table_tile}, (first, table_tile)
    while best[0].ms is not None:
        neighbors = list_neighbors(best[1], has_one_loop=entry.function == "band_dq")
        neighbors = [tile for tile in neighbors if tile not in timed_tiles]
        neighbors = neighbors[: max_tiles - len(timed_tiles)]
        timed_tiles.update(neighbors)
        _compile_tiles(entry, neighbors, (_make_pass(short, backward=entry.backward), run))
        timings = [(_time_tile(shape, name, tile, short, long, nsa, run), tile) for tile in neighbors]
        rows += [timing for timing, _ in timings]
        limit_ms = (1 - MIN_GAIN) * best[0].ms
        faster = [(timing.ms, timing, tile) for timing, tile in timings if timing.ms and timing.ms < limit_ms]
        if not faster:
            break
        best = min(faster, key=lambda candidate: candidate[0])[1:]
    for row in rows:
        row.of_table = row.ms / first.ms if row.ms and first.ms else None
    return rows


def _compile_tiles(entry: Entry, tiles: Sequence[AnyTile], runs: Sequence[Callable[[], object]]) -> None:
    """Compile all tiles in parallel. Compilation errors are reported when a tile is timed."""
    from nsa_lab.attention.kernels import parallel_compile
    from nsa_lab.attention.kernels import tiles as kernel_tiles

    def run_every_tile() -> None:
        for tile in tiles:
            with _override_table(entry.function, lambda *_, tile=tile: tile):
                for run in runs:
                    run()

    if parallel_compile.CAN_COMPILE_IN_PARALLEL and not kernel_tiles.IS_INTERPRETED:
        parallel_compile.compile_in_parallel(run_every_tile, os.cpu_count() or 1, ignore_errors=True)


def _make_pass(part: Part, *, backward: bool) -> Callable[[], object]:
    """Return a call of the part; `backward`: with its gradients."""
    return make_forward_backward(part.run, part.inputs) if backward else lambda: part.run(*part.inputs)


def _find_requested_tile(function: str, run: Callable[[], object]) -> AnyTile | None:
    """Return the tile that the launch table returns while `run` runs; None if its function is not called."""
    select_tile, tiles = cast("Callable[..., AnyTile]", getattr(launch_table, function)), list[AnyTile]()
    with _override_table(function, lambda *arguments: tiles.append(select_tile(*arguments)) or tiles[-1]):
        run()
    return tiles[-1] if tiles else None


@contextmanager
def _override_table(function: str, answer: Callable[..., AnyTile]) -> Iterator[None]:
    original = getattr(launch_table, function)
    setattr(launch_table, function, answer)
    try:
        yield
    finally:
        setattr(launch_table, function, original)


def _time_tile(
    shape: str, name: str, tile: AnyTile, short: Part, long: Part, nsa: NSAConfig, run: Callable[[], object]
) -> TileTiming:
    from triton.errors import TritonError

    row = TileTiming(shape, name, str(tile))
    device = cast("Tensor", long.inputs[0]).device

    def measure() -> None:
        row.ms = time_ms(run, device)

    with _override_table(ENTRIES[name].function, lambda *_: tile):
        try:
            row.parity, is_correct = parity.check_parity(short, long, nsa)
            measure_if_correct(row, is_correct, measure)
        except (TritonError, RuntimeError) as error:
            # The tile is too large for the GPU or for the compiler. A fault of the device raises in synchronize.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            row.note = f"does not run: {str(error).splitlines()[0]}" if str(error) else "does not run"
    return row
