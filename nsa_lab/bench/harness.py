"""Benchmark harness: device and dtype, random inputs, parity gate, tables, JSON records and figures.

A `Benchmark` declares columns and a figure. `Benchmark.run` measures its cases one after another. Benchmarks without rows
(loss curves, trainer overhead) use `make_record` and `Output` directly.

Invariants
* A row that failed its parity check has no speed (`measure_if_correct`).
* A record carries the date, the device, the package versions and the commit. A commit with uncommitted changes is `dirty`.
* The JSON file is replaced after every case. An interrupted benchmark keeps its results; `not_measured` lists the rest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from nsa_lab.runs import tables
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.tables import Table

PARITY_FAILED = "FAILED PARITY: no speed"
TABLE_WIDTH = 170  # characters, if the output is not a terminal

T = TypeVar("T")
Case = TypeVar("Case")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Setup:
    """Device and dtype of a benchmark. Default: the GPU and bf16 if there is one, otherwise the CPU and float32."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def resolve(cls, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Setup:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(device, dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32))

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else str(self.device)

    def select(self, gpu: T, cpu: T) -> T:
        """Return the default for this device."""
        return gpu if self.is_gpu else cpu

    def describe_machine(self) -> dict[str, str]:
        try:
            import triton

            triton_version = triton.__version__
        except ImportError:
            triton_version = "not installed"
        return {
            "device": str(self.device),
            "gpu": torch.cuda.get_device_name(self.device) if self.is_gpu else "none",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "triton": triton_version,
        }


class RandomInputs:
    """Random tensors of one device and dtype; `seed` None: from torch's global generator."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype, generator=self._generator)

    def gates(self, *shape: int) -> Tensor:
        """Return uniform values in [0, 1), sampled in float32 and rounded, as a model's gates are."""
        return torch.rand(shape, device=self._device, generator=self._generator).to(self._dtype)


def make_leaves(*tensors: Tensor) -> list[Tensor]:
    """Return detached tensors that require gradients."""
    return [x.detach().requires_grad_() for x in tensors]


class HasNote(Protocol):
    note: str


def make_parity_note(is_correct: bool) -> str:
    """Return the note of a row: empty if its parity check passed. A row with a note is not timed."""
    return "" if is_correct else PARITY_FAILED


def measure_if_correct(row: HasNote, is_correct: bool, measure: Callable[[], object]) -> None:
    """Call `measure` if the row passed its parity check. Otherwise set its note; the row then has no speed."""
    row.note = make_parity_note(is_correct)
    if is_correct:
        measure()


@dataclass(frozen=True)
class RowColumn:
    """A table column. `content`: a field of the row (default: named as the column), or a function that formats the cell."""

    name: str
    content: str | Callable[[Any], str] = ""
    align: Literal["left", "right"] = "right"

    def format_cell(self, row: Any) -> str:
        if callable(self.content):
            return self.content(row)
        value = getattr(row, self.content or self.name)
        return str(value) if isinstance(value, (str, int)) else format_number(value)


def format_number(x: float | None) -> str:
    return "" if x is None else f"{x:.3f}" if x < 10 else f"{x:.1f}"


def make_table(
    title: str,
    columns: Sequence[RowColumn],
    rows: Sequence[Row],
    is_bold: Callable[[Row, Sequence[Row]], bool] = lambda row, rows: False,
) -> Table:
    """Return a table with a line per row. `is_bold`: whether to emphasize a row among all rows."""
    return Table(
        [tables.TableColumn(column.name, column.align) for column in columns],
        [[column.format_cell(row) for column in columns] for row in rows],
        title=title,
        is_boxed=True,
        styles={number: "bold" for number, row in enumerate(rows) if is_bold(row, rows)},
    )


def make_record(setup: Setup, **facts: Any) -> dict[str, Any]:
    """Return the header of a record made now: date, device, package versions, commit, and `facts`."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setup.device_name,
        "versions": get_versions(),
        "code": get_code_identity(),
        **facts,
    }


def describe_code(record: Mapping[str, Any]) -> str:
    """Return commit and date of a record, e.g. `commit 0123456789, 2026-11-22`, and whether it had uncommitted changes."""
    code = record.get("code") or {}
    dirty = " with uncommitted changes" if code.get("dirty") else ""
    commit = f"commit {code['commit'][:10]}" if code.get("commit") else "commit not recorded"
    return f"{commit}{dirty}, {record['when'][:10]}"


class Output:
    """Destinations of results: the console, and optionally a JSON file and a figure."""

    def __init__(self, json_path: Path | None = None, picture: Path | None = None, console: Console | None = None) -> None:
        self.json_path, self.picture = json_path, picture
        self.console = console or Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)

    def print(self, *objects: Any) -> None:
        self.console.print(*objects)

    def print_line(self, line: str) -> None:
        """Print plain text, without highlighting or wrapping."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def write(self, record: Mapping[str, Any], *, indent: int | None = 1) -> None:
        if self.json_path:
            Path(self.json_path).write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Benchmark(Generic[Row]):
    """A benchmark whose results are rows: table columns, figure, and JSON key."""

    title: str
    columns: Sequence[RowColumn]
    is_bold: Callable[[Any, Sequence[Any]], bool] = lambda line, lines: False
    plot: Callable[[list[Row], Path], None] | None = None
    has_table_per_case: bool = True
    """Print a table after each case; False: one table at the end, and a line per case."""
    split_row: Callable[[Row], Sequence[Any]] = lambda row: (row,)
    """Table lines of a row; columns format a line. Default: one line."""
    rows_key: str = "rows"
    to_json: Callable[[Row], Mapping[str, Any]] = field(default=asdict)  # pyright: ignore[reportAssignmentType]

    def run(
        self,
        cases: Sequence[Case],
        measure: Callable[[Case], list[Row]],
        output: Output,
        record: Mapping[str, Any],
        *,
        label: Callable[[Case], str] = str,
        extra_tables: Callable[[list[Row]], Iterable[Table]] = lambda rows: (),
        extra_facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> list[Row]:
        """Measure the cases in order; print tables, write the record, and save the figure. Returns all rows.

        `extra_tables`: more tables of the same rows. They may add to the rows, which are recorded after them.
        `extra_facts`: record entries that are known only after a case is measured.
        """
        rows: list[Row] = []
        for n_measured, case in enumerate(cases, 1):
            start = time.monotonic()
            new_rows = measure(case)
            rows += new_rows
            if self.has_table_per_case:
                output.print(self.make_table(new_rows), *extra_tables(new_rows))
            else:
                output.print_line(f"measured {label(case)} in {time.monotonic() - start:.0f} s")
            remaining = [label(other) for other in cases[n_measured:]]
            output.write(
                {
                    **record,
                    **extra_facts(),
                    self.rows_key: [self.to_json(row) for row in rows],
                    **({"not_measured": remaining} if remaining else {}),
                }
            )
        if not self.has_table_per_case:
            output.print(self.make_table(rows), *extra_tables(rows))
        output.print(describe_code(record))
        if output.picture and self.plot:
            self.plot(rows, output.picture)
        return rows

    def make_table(self, rows: list[Row]) -> Table:
        lines = [line for row in rows for line in self.split_row(row)]
        return make_table(self.title, self.columns, lines, self.is_bold)
