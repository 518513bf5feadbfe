"""Pages of lessons: the code of a lesson cell is open, and the output of a cell is one piece."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from nsa_lab.report import export_notebook


def test_lesson_cells_are_open_and_output_pieces_are_joined(tmp_path: Path) -> None:
    pieces = [new_output("stream", name="stdout", text=f"line {n}\n") for n in range(3)]
    lesson = new_code_cell("learn = 1", metadata={"tags": ["lesson"]}, outputs=pieces)
    nbformat.write(new_notebook(cells=[lesson, new_code_cell("check = 2")]), tmp_path / "n.ipynb")
    page = export_notebook(tmp_path / "n.ipynb").read_text(encoding="utf-8")
    opened = re.findall(r'<details class="code"( open="")?>(.*?)</details>', page, re.DOTALL)
    assert [(bool(is_open), "learn" in code) for is_open, code in opened] == [(True, True), (False, False)]
    assert len(re.findall(r"<pre>\s*line 0\s*line 1\s*line 2\s*</pre>", page)) == 1
