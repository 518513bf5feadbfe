"""Tables: the same cells in a terminal, as Markdown, as text and as CSV, and values that look like markup."""

from __future__ import annotations

import io

from rich.console import Console

from nsa_lab.runs.tables import Styled, Table, TableColumn, write_csv

ROWS = [
    ["[red]a[/red]", 1234, Styled("ok", "green")],
    ["b | c\nd", 0.12345, None],
    ["[/]", None, "[link=x]y"],
]


def make_table() -> Table:
    return Table(("name", TableColumn("number", "right"), TableColumn("mark", is_whole=True)), ROWS, styles={1: "bold"})


def test_markup_in_a_value_is_shown() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(make_table())
    text = console.file.getvalue()
    assert all(part in text for part in ("[red]a[/red]", "1,234", "0.123", "[/]", "[link=x]y", "–", "ok"))


def test_markdown_has_one_line_per_row() -> None:
    lines = make_table().to_markdown().splitlines()
    assert lines[:2] == ["| name | number | mark |", "| --- | ---: | --- |"]
    assert lines[3] == "| b \\| c d | 0.123 | – |" and len(lines) == 5


def test_text_is_aligned() -> None:
    lines = Table(("", "a", "b"), [("x", 0.5, "y"), ("longer", None, 7)]).to_text(8, 6).splitlines()
    assert lines == ["        │     a     b", "x       │ 0.500     y", "longer  │     –     7"]


def test_rows_may_be_an_iterator() -> None:
    table = Table(("a",), ((str(n),) for n in range(3)))
    assert table.to_markdown() == table.to_markdown() and table.to_markdown().count("\n") == 4


def test_csv_has_empty_cells_for_missing_values() -> None:
    file = io.StringIO()
    assert write_csv(file, ["a", "b"], iter([{"a": 1}, {"b": None, "a": "x,y"}])) == 2
    assert file.getvalue() == 'a,b\n1,\n"x,y",\n'
