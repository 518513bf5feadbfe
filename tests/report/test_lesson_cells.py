"""A page that teaches: the code of a lesson stands open, and what a cell printed stays together."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from nsa_lab.report import export_notebook


def test_lessons_stand_open_and_what_was_printed_in_pieces_is_one(tmp_path: Path) -> None:
    pieces = [new_output("stream", name="stdout", text=f"line {n}\n") for n in range(3)]
    lesson = new_code_cell("learn = 1", metadata={"tags": ["lesson"]}, outputs=pieces)
    nbformat.write(new_notebook(cells=[lesson, new_code_cell("check = 2")]), tmp_path / "n.ipynb")
    page = export_notebook(tmp_path / "n.ipynb").read_text(encoding="utf-8")
    opened = re.findall(r'<details class="code"( open="")?>(.*?)</details>', page, re.DOTALL)
    assert [(bool(is_open), "learn" in code) for is_open, code in opened] == [(True, True), (False, False)]
    assert len(re.findall(r"<pre>\s*line 0\s*line 1\s*line 2\s*</pre>", page)) == 1
