"""Notebook pages.

The site shows all cells of a notebook as one document, which JupyterLab and forges do not:

* link definitions (`[1]: page.md`) hold for one cell, so their labels are made unique;
* one title per page: if a notebook has several headings of level 1, all headings after the first move one level down;
* input cells are folded. In a lesson (a notebook with cells tagged `lesson`) the code is part of the text: only set-up,
  figures and answers are folded.

Reports of recorded runs are notebooks, too, and listed below the page of runs.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

RUNS_PAGE = "outputs/README"
REPORT = re.compile(r"outputs/(.*/report)$")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(?=#{1,5} )", re.MULTILINE)
SET_UP = re.compile(r"%|import |from ")
DISPLAY = ("show_figure(", "show_folded(", "Markdown(")
LINK_DEFINITION = re.compile(r"^\[([^\]\n]+)\]: ", re.MULTILINE)


def prepare_page(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == RUNS_PAGE:
        reports = [match[1] for name in sorted(app.project.docnames) if (match := REPORT.match(name))]
        source[0] += "\n".join(["", ":::{toctree}", ":hidden:", "", *reports, ":::", ""])
    elif app.env.doc2path(docname).suffix == ".ipynb":
        source[0] = json.dumps(join_cells(json.loads(source[0])))


def join_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with its cells changed as the module says."""
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    is_lesson = any("lesson" in cell.get("metadata", {}).get("tags", []) for cell in notebook["cells"])
    has_several_titles, is_title_shown = sum(map(count_titles, texts)) > 1, False
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            tags = cell["metadata"].setdefault("tags", [])
            is_folded = not is_lesson or is_aside(tags, "".join(cell["source"]))
            tags += ["hide-input"] * (is_folded and "hide-input" not in tags)
        elif cell["cell_type"] == "markdown":
            text = make_labels_unique("".join(cell["source"]), number)
            cell["source"] = lower_headings(text) if has_several_titles and is_title_shown else text
            is_title_shown = is_title_shown or count_titles(text) > 0
    return notebook


def is_aside(tags: list[str], code: str) -> bool:
    """Return True for a cell of a lesson that sets up or shows something, and is not a step of the text."""
    shows = any(call in code for call in DISPLAY)
    return "lesson" not in tags and ("parameters" in tags or SET_UP.match(code) is not None or shows)


def make_labels_unique(text: str, number: int) -> str:
    """Add the number of the cell to the labels of link definitions, and to the links that use them."""
    for label in LINK_DEFINITION.findall(text):
        text = text.replace(f"[{label}]: ", f"[{label}-{number}]: ").replace(f"][{label}]", f"][{label}-{number}]")
    return text


def count_titles(text: str) -> int:
    return len(re.findall(r"^# ", CODE_BLOCK.sub("", text), re.MULTILINE))


def lower_headings(text: str) -> str:
    """Move all headings one level down, except in code blocks."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else HEADING.sub("#", part) for part in parts)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", prepare_page, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
