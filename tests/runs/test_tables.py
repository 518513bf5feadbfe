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


def test_control_characters_in_a_value_are_shown() -> None:
    """A name with a line feed, an escape sequence or a mark that reverses the text takes one line in every form."""
    table = Table(("r\nun", "n"), [("a\nb\tc\r\x1b[31m\x9b2J\u202ed\u2028", 1), ("x", 2)], title="t", caption="c")
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(table)
    shown, escapes = console.file.getvalue(), "a\\nb\\tc\\x0d\\x1b[31m\\x9b2J\\u202ed\\u2028"
    assert (
        len(shown.split("\n")) == 6
        and escapes in shown
        and "\x1b" not in shown.replace("\x1b[0m", "").replace("\x1b[3m", "")
    )
    assert table.to_text().split("\n")[1].startswith(escapes) and table.to_text().count("\n") == 2
    assert table.to_markdown().split("\n")[2] == "| a b c \\x1b[31m\\x9b2J\\u202ed | 1 |"


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
