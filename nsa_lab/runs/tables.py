"""Tables for people: one description, shown in a terminal, as Markdown, as plain text or as CSV.

Cells are one line of plain text in every form: markup of rich or Markdown and control characters in a value are shown, not
interpreted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from nsa_lab.runs.text_output import make_one_line

if TYPE_CHECKING:
    from rich.table import Table as RichTable

EMPTY_CELL = "–"


@dataclass(frozen=True)
class Styled:
    """A cell with a style of rich, which other forms ignore."""

    text: str
    style: str


Cell = str | int | float | Styled | None
"""Text, or a number: integers with thousands separators, others with three digits. None is a dash."""


@dataclass(frozen=True)
class TableColumn:
    """A column. `is_whole`: a terminal never wraps its cells."""

    name: str
    align: Literal["left", "right"] = "left"
    is_whole: bool = False


@dataclass
class Table:
    """Columns, given as names or `TableColumn`s, and rows of as many cells.

    A terminal shows `title` above and `caption` below. `styles`: style of rich by row number.
    """

    columns: Sequence[str | TableColumn]
    rows: Iterable[Sequence[Cell]] = ()
    title: str | None = None
    caption: str | None = None
    is_boxed: bool = False
    styles: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = [TableColumn(column) if isinstance(column, str) else column for column in self.columns]
        self.rows = [list(row) for row in self.rows]

    def __rich__(self) -> RichTable:
        """Return the table for `rich.console.Console.print`."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        title, caption = (None if text is None else Text(text) for text in (self.title, self.caption))
        table = RichTable(
            title=title, caption=caption, box=box.HEAVY_HEAD if self.is_boxed else None, pad_edge=self.is_boxed
        )
        rows = [
            [
                Text(make_one_line(format_cell(cell)), cell.style if isinstance(cell, Styled) else "", overflow="fold")
                for cell in row
            ]
            for row in self.rows
        ]
        for number, column in enumerate(self._get_columns()):
            name = Text(make_one_line(column.name))
            # With its width, rich need not measure each cell again.
            width = max(text.cell_len for text in (name, *(row[number] for row in rows))) if column.is_whole else None
            table.add_column(name, justify=column.align, no_wrap=column.is_whole, overflow="fold", width=width)
        for number, cells in enumerate(rows):
            table.add_row(*cells, style=self.styles.get(number))
        return table

    def to_markdown(self) -> str:
        """Return the table as Markdown, without a line end."""
        columns = self._get_columns()
        rules = ["---:" if column.align == "right" else "---" for column in columns]
        lines = [[column.name for column in columns], rules, *([format_cell(cell) for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(map(_escape_markdown, line))} |" for line in lines)

    def to_text(self, first_width: int = 32, width: int = 18) -> str:
        """Return the table as lines of text, the first column to the left of a box character.

        The character keeps the lines unwrapped on a page.
        """
        lines = [
            [make_one_line(column.name) for column in self._get_columns()],
            *([make_one_line(format_cell(cell)) for cell in row] for row in self.rows),
        ]
        return "\n".join(f"{name:<{first_width}}│" + "".join(f"{text:>{width}}" for text in rest) for name, *rest in lines)

    def _get_columns(self) -> list[TableColumn]:
        return [column for column in self.columns if isinstance(column, TableColumn)]


def format_cell(cell: Cell) -> str:
    """Return a cell as text."""
    if cell is None:
        return EMPTY_CELL
    if isinstance(cell, Styled):
        return cell.text
    if isinstance(cell, float):
        return f"{cell:.3f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def write_csv(file: TextIO, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as CSV with a header, one at a time. Return their number. Missing values are empty cells."""
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    count = 0
    for row in rows:
        writer.writerow(row)
        count += 1
    return count


def _escape_markdown(text: str) -> str:
    return make_one_line(" ".join(text.split())).replace("|", "\\|")
