"""Notebook pages: input cells are folded, and recorded runs are listed below the page of runs."""

from __future__ import annotations

import json
import re

from sphinx.application import Sphinx

RUNS_PAGE = "outputs/README"


def prepare_page(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == RUNS_PAGE:
        reports = [
            name.removeprefix("outputs/") for name in sorted(app.project.docnames) if re.match(r"outputs/.*/report$", name)
        ]
        source[0] += "\n".join(["", ":::{toctree}", ":hidden:", "", *reports, ":::", ""])
    elif app.env.doc2path(docname).suffix == ".ipynb":
        source[0] = fold_input_cells(source[0])


def fold_input_cells(text: str) -> str:
    """Return the notebook with the tag `hide-input` on every code cell."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tags = cell["metadata"].setdefault("tags", [])
            tags += ["hide-input"] * ("hide-input" not in tags)
    return json.dumps(notebook)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", prepare_page, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
