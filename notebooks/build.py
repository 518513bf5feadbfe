"""Build every notebook from its .py source. With --check, list the pairs that are out of sync.

A pair is in sync if the cells are equal. A notebook that was opened, executed and saved in JupyterLab has additional
metadata and perhaps outputs, and is still in sync. A test checks which outputs are committed.

The .ipynb is committed without outputs, with one exception: a cell marked NBVAL_CHECK_OUTPUT keeps its text output, which
nbval compares with the computed one. If the code of a notebook has changed, this script executes it to renew these
outputs; --execute renews all of them.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
CHECKED = "NBVAL_CHECK_OUTPUT"
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
CELL_TIMEOUT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a pair is out of sync")
    parser.add_argument("--execute", action="store_true", help="renew the outputs of all checked cells")
    options = parser.parse_args()
    stale = []
    for source in sorted(FOLDER.glob("[0-9]*.py")):
        target = source.with_suffix(".ipynb")
        built, complete = build(source, target, fresh=options.execute)
        if not complete and not options.check:
            print(f"{target.name}: executing, to renew the outputs of its checked cells", flush=True)
            execute(built)
        if options.check:
            current = target.exists() and get_cells(nbformat.read(target, as_version=4)) == get_cells(built)
        else:
            current = target.exists() and target.read_text(encoding="utf-8") == to_text(built)
        if not current:
            stale.append(target.name)
            if not options.check:
                target.write_text(to_text(built), encoding="utf-8")
    if options.check and stale:
        print(f"out of sync with their .py: {', '.join(stale)}; run: make notebooks", file=sys.stderr)
        return 1
    print(f"built: {', '.join(stale)}" if stale else "every .ipynb is in sync with its .py")
    return 0


def build(source: Path, target: Path, *, fresh: bool = False) -> tuple[NotebookNode, bool]:
    """Return the notebook of `source`, and whether all checked outputs exist.

    It has the cell ids and the checked outputs of `target`; with `fresh`, no outputs.
    """
    config = load_jupytext_config(str(source))
    notebook = jupytext.read(source, config=config)
    if target.exists():
        previous = jupytext.read(target, config=config)
        # A checked output depends on all the code before it, so any change of code renews all outputs.
        fresh = fresh or get_code(previous) != get_code(notebook)
        notebook = combine_inputs_with_outputs(notebook, previous)
    notebook.metadata["kernelspec"] = KERNEL
    # JupyterLab writes the text representation only into the .py.
    notebook.metadata["jupytext"].pop("text_representation", None)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    complete, n_code_cells = True, 0
    for number, cell in enumerate(notebook.cells):
        if not target.exists() or "id" not in cell:
            cell["id"] = f"{source.stem[:2]}-{number:03d}"
        if cell.cell_type != "code":
            continue
        n_code_cells += 1
        # nbval compares only cells with an execution count.
        cell.execution_count = n_code_cells if CHECKED in cell.source else None
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
        if CHECKED in cell.source and not fresh:
            complete &= bool(cell.outputs)
        else:
            complete &= CHECKED not in cell.source
            cell.outputs = []
    _make_ids_unique(notebook, source.stem[:2])
    return notebook, complete


def execute(notebook: NotebookNode) -> None:
    """Execute a copy in the notebooks' folder and keep the outputs of checked cells, which must be text."""
    executed = copy.deepcopy(notebook)
    NotebookClient(
        executed,
        timeout=CELL_TIMEOUT_S,
        kernel_name=KERNEL["name"],
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    for cell, executed_cell in zip(notebook.cells, executed.cells, strict=True):
        if cell.cell_type == "code" and CHECKED in cell.source:
            cell.outputs = executed_cell.outputs
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = cell.execution_count
            if not cell.outputs or any(set(output.get("data", {})) - {"text/plain"} for output in cell.outputs):
                raise SystemExit(f"a cell marked {CHECKED} must print text only:\n{cell.source}")


def get_code(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def get_cells(notebook: NotebookNode) -> list[tuple[str, str, list[str]]]:
    """Return kind, source and tags of each cell, which are what the .py contains."""
    return [(cell.cell_type, cell.source, list(cell.metadata.get("tags", []))) for cell in notebook.cells]


def to_text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook) + "\n"


def _make_ids_unique(notebook: NotebookNode, stem: str) -> None:
    seen: set[str] = set()
    for number, cell in enumerate(notebook.cells):
        if cell["id"] in seen:
            cell["id"] = f"{stem}-{number:03d}-{os.urandom(2).hex()}"
        seen.add(cell["id"])


if __name__ == "__main__":
    sys.exit(main())
