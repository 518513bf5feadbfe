"""`nsa-lab bench tune`: other tiles of the kernels beside those of the launch table, each checked before it is timed.

From the table's tile one thing at a time is changed, and the quickest change is gone on from, until none gains more than
runs differ by. The table is code (attention/kernels/launch_table.py), read by shape, dtype and device: what is quicker is
printed as it would stand there, and entered by hand, with the test that holds the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nsa_lab.attention import resolve_backend
from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.launch_table import RowTile, Tile
from nsa_lab.bench import attention_parity as parity
from nsa_lab.bench import records
from nsa_lab.bench.attention_parts import Part, make_parts
from nsa_lab.bench.attention_speed import GPU_SHAPES, TABLE_WIDTH, Shape, describe_machine, format_number
from nsa_lab.bench.timing import time_ms
from nsa_lab.config import NSAConfig

AnyTile = Tile | RowTile

CPU_SHAPE = Shape(70, 1, 4, 2, 16)
MAX_CHECKED_TOKENS = 999  # of the sequence that every tile is checked on, in float64; odd, so that tiles have edges
MIN_GAIN = 0.01
"""Share of its time by which a tile has to be quicker: less is what runs differ by."""
MIN_TILE, MAX_TILE = 16, 256  # rows and keys of a tile: a tensor core takes 16 at least
REGISTERS = (96, 128, 168, None)


@dataclass(frozen=True)
class Entry:
    """A function of the launch table, a part of attention that asks it, and whether its backward pass does."""

    function: str
    part: str
    backward: bool


ENTRIES = {
    f"{function}, {part}": Entry(function, part, backward)
    for part in ("compressed", "window")
    for function, backward in (("band_forward", False), ("band_dq", True), ("band_dkv", True))
} | {
    "choice": Entry("choice", "choice", False),
    "selected_union": Entry("selected_union", "selected, smooth", True),
    "selected_items": Entry("selected_items", "selected, smooth", True),
}


@dataclass
class TileTiming:
    """A kernel with one tile at one shape; `ms` is of its part, forward or with the backward pass, None as `note` says."""

    shape: str
    kernel: str
    tile: str
    ms: float | None = None
    of_table: float | None = None
    """Time as a share of what the part takes with the table's own tile."""
    note: str = ""
    parity: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


def parse_kernel(text: str) -> str:
    """One of `ENTRIES`. ValueError for anything else."""
    if text not in ENTRIES:
        raise ValueError(f"kernel {text!r}: expected one of {', '.join(map(repr, ENTRIES))}")
    return text


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
    """Time up to `most` tiles of each of `kernels`, keys of `ENTRIES`, at each shape; print tables, and write JSON there.

    Defaults: every kernel; a GPU, bf16 and the four shapes of `bench attention`; on a CPU, where Triton interprets and
    times mean nothing, float32 and one tiny shape. Raises what `resolve_backend` raises where kernels cannot run.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    nsa = nsa or NSAConfig()
    choices = resolve_backend(device, dtype, nsa, backend="triton")
    console = console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    report: dict[str, Any] = {
        **records.origin(records.device_name() if device.type == "cuda" else str(device), records.OPERATOR),
        "machine": describe_machine(device),
        "dtype": str(dtype),
        "nsa": nsa.model_dump(),
    }
    rows: list[TileTiming] = []
    shapes = shapes or (GPU_SHAPES if device.type == "cuda" else (CPU_SHAPE,))
    left = [f"{shape}: {name}" for shape in shapes for name in kernels or ENTRIES]
    for shape in shapes:
        sizes = shape.H, shape.G, shape.D, nsa, choices, device, dtype
        short, long = (
            {part.name: part for part in make_parts(*tokens, *sizes, Dv=shape.value_width)}
            for tokens in ((min(shape.T, MAX_CHECKED_TOKENS), 1), (shape.T, shape.B))
        )
        for name in kernels or ENTRIES:
            part = ENTRIES[name].part
            found = _search_tiles(str(shape), name, short[part], long[part], nsa, max_tiles)
            rows += found
            console.print(_make_table(found))
            left.remove(f"{shape}: {name}")
            if json_path:  # after every kernel: what is broken off keeps what it measured, and says what it did not
                told = {"not_measured": left} if left else {}
                records.write(json_path, {**report, "rows": [asdict(row) for row in rows], **told})
    console.print(records.code_text(report))
    return rows


def list_neighbors(tile: AnyTile, *, has_one_loop: bool) -> Iterator[AnyTile]:
    """Tiles that differ from `tile` in one thing; `loops`: its kernel looks at `one_loop`."""

    def changed(name: str, values: Sequence[object]) -> Iterator[AnyTile]:
        return (tile._replace(**{name: value}) for value in values)

    for name in ("rows", "keys"):
        size = getattr(tile, name, 0)
        yield from changed(name, [n for n in (size // 2, 2 * size) if MIN_TILE <= n <= MAX_TILE])
    yield from changed("warps", [n for n in (tile.warps // 2, 2 * tile.warps) if 2 <= n <= 8])
    yield from changed("stages", [n for n in (tile.stages - 1, tile.stages + 1) if 1 <= n <= 5])
    yield from changed("registers", [n for n in REGISTERS if n != tile.registers])
    if has_one_loop and isinstance(tile, Tile):
        yield from changed("one_loop", [not tile.one_loop])


def _search_tiles(shape: str, name: str, short: Part, long: Part, nsa: NSAConfig, max_tiles: int) -> list[TileTiming]:
    """The table's tile first, then what was tried, in order."""
    entry = ENTRIES[name]
    run = _make_pass(long, backward=entry.backward)
    own = _find_requested_tile(entry.function, run)
    if own is None:
        return [TileTiming(shape, name, "", note="not launched at this shape")]
    first = _time_tile(shape, name, own, short, long, nsa, run)
    rows, tried, best = [first], {own}, (first, own)
    while best[0].ms is not None:
        beside = [tile for tile in list_neighbors(best[1], has_one_loop=entry.function == "band_dq") if tile not in tried]
        beside = beside[: max_tiles - len(tried)]
        tried.update(beside)
        _compile_tiles(entry, beside, (_make_pass(short, backward=entry.backward), run))
        found = [(_time_tile(shape, name, tile, short, long, nsa, run), tile) for tile in beside]
        rows += [timed for timed, _ in found]
        quicker = [(timed.ms, timed, tile) for timed, tile in found if timed.ms and timed.ms < (1 - MIN_GAIN) * best[0].ms]
        if not quicker:
            break
        best = min(quicker, key=lambda one: one[0])[1:]
    for row in rows:
        row.of_table = row.ms / first.ms if row.ms and first.ms else None
    return rows


def _compile_tiles(entry: Entry, tiles: Sequence[AnyTile], runs: Sequence[Callable[[], object]]) -> None:
    """All tiles side by side; what does not compile says so when it is timed."""
    from nsa_lab.attention.kernels import parallel_compile
    from nsa_lab.attention.kernels import tiles as kernel_tiles

    def every_one() -> None:
        for tile in tiles:
            with _override_table(entry.function, lambda *_, tile=tile: tile):
                for run in runs:
                    run()

    if parallel_compile.CAN_COMPILE_IN_PARALLEL and not kernel_tiles.IS_INTERPRETED:
        parallel_compile.compile_in_parallel(every_one, os.cpu_count() or 1, ignore_errors=True)


def _make_pass(part: Part, *, backward: bool) -> Callable[[], object]:
    """A call of the part, with its gradients where the entry is one of the backward pass."""
    if not backward:
        return lambda: part.run(*part.inputs)
    wanting = [x for x in part.inputs if x.requires_grad]
    d_out = torch.randn_like(part.run(*part.inputs))
    return lambda: torch.autograd.grad(part.run(*part.inputs), wanting, d_out)


def _find_requested_tile(function: str, run: Callable[[], object]) -> AnyTile | None:
    """What the table answers while `run` runs; None where it is not asked."""
    own, answers = cast("Callable[..., AnyTile]", getattr(launch_table, function)), list[AnyTile]()
    with _override_table(function, lambda *told: answers.append(own(*told)) or answers[-1]):
        run()
    return answers[-1] if answers else None


@contextmanager
def _override_table(function: str, answer: Callable[..., AnyTile]) -> Iterator[None]:
    own = getattr(launch_table, function)
    setattr(launch_table, function, answer)
    try:
        yield
    finally:
        setattr(launch_table, function, own)


def _time_tile(
    shape: str, name: str, tile: AnyTile, short: Part, long: Part, nsa: NSAConfig, run: Callable[[], object]
) -> TileTiming:
    from triton.errors import TritonError

    found = TileTiming(shape, name, str(tile))
    device = cast("Tensor", long.inputs[0]).device
    with _override_table(ENTRIES[name].function, lambda *_: tile):
        try:
            found.parity, passed = parity.check_parity(short, long, nsa)
            if passed:
                found.ms = time_ms(run, device)
            else:
                found.note = "FAILED PARITY: no speed"
        except (TritonError, RuntimeError) as error:
            # Too large for the GPU, or for the compiler. What has broken the device itself ends here, as an error.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.note = f"does not run: {str(error).splitlines()[0]}" if str(error) else "does not run"
    return found


def _make_table(rows: list[TileTiming]) -> Table:
    table = Table(title="Tiles of kernels, the launch table's first; ms of the part that asks for them")
    for name in ("shape", "kernel", "tile", "ms", "of the table's", "note"):
        table.add_column(name, justify="right" if name in ("ms", "of the table's") else "left")
    quickest: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.ms is not None:
            key = row.shape, row.kernel
            quickest[key] = min(row.ms, quickest.get(key, row.ms))
    for row in rows:
        best = row.ms is not None and row.ms == quickest[row.shape, row.kernel]
        cells = row.shape, row.kernel, row.tile, format_number(row.ms), format_number(row.of_table), row.note
        table.add_row(*cells, style="bold" if best else None)
    return table
