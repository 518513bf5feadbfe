"""Builds every notebook from its .py source, or with --check says which pairs are out of step.

A pair is in step when its cells are: a notebook that was opened and executed in JupyterLab, and saved then or half-way, has
metadata of its own, and outputs or none, and is in step all the same. Which outputs are committed, a test says.

The .ipynb is committed without outputs, with one exception: a cell marked NBVAL_CHECK_OUTPUT keeps its text output, which
nbval compares with what it computes. Such outputs are made here, by executing the notebook, when its code has changed;
--execute makes them all anew.
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
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a pair is out of step")
    parser.add_argument("--execute", action="store_true", help="make the outputs of all checked cells anew")
    options = parser.parse_args()
    stale = []
    for source in sorted(FOLDER.glob("[0-9]*.py")):
        target = source.with_suffix(".ipynb")
        built, complete = build(source, target, fresh=options.execute)
        if not complete and not options.check:
            print(f"{target.name}: executing, for the outputs of its checked cells", flush=True)
            execute(built)
        if options.check:
            current = target.exists() and cells_of(nbformat.read(target, as_version=4)) == cells_of(built)
        else:
            current = target.exists() and target.read_text(encoding="utf-8") == text_of(built)
        if not current:
            stale.append(target.name)
            if not options.check:
                target.write_text(text_of(built), encoding="utf-8")
    if options.check and stale:
        print(f"out of step with their .py: {', '.join(stale)}; run: make notebooks", file=sys.stderr)
        return 1
    print(f"built: {', '.join(stale)}" if stale else "every .ipynb is what its .py says")
    return 0


def build(source: Path, target: Path, *, fresh: bool = False) -> tuple[NotebookNode, bool]:
    """The notebook that `source` describes, with the ids and checked outputs of `target`; whether all of them are there."""
    config = load_jupytext_config(str(source))
    notebook = jupytext.read(source, config=config)
    if target.exists():
        earlier = jupytext.read(target, config=config)
        # A checked output hangs on all the code before it, so any change of code makes them all anew.
        fresh = fresh or code_of(earlier) != code_of(notebook)
        notebook = combine_inputs_with_outputs(notebook, earlier)
    notebook.metadata["kernelspec"] = KERNEL
    # As JupyterLab leaves it: the representation is a matter of the .py.
    notebook.metadata["jupytext"].pop("text_representation", None)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    complete, counted = True, 0
    for number, cell in enumerate(notebook.cells):
        if not target.exists() or "id" not in cell:
            cell["id"] = f"{source.stem[:2]}-{number:03d}"
        if cell.cell_type != "code":
            continue
        counted += 1
        # nbval compares only cells that say that they were run.
        cell.execution_count = counted if CHECKED in cell.source else None
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
        if CHECKED in cell.source and not fresh:
            complete &= bool(cell.outputs)
        else:
            complete &= CHECKED not in cell.source
            cell.outputs = []
    _unique_ids(notebook, source.stem[:2])
    return notebook, complete


def execute(notebook: NotebookNode) -> None:
    """Run a copy from the notebooks' folder and keep the outputs of checked cells, which must be text."""
    ran = copy.deepcopy(notebook)
    NotebookClient(
        ran,
        timeout=CELL_TIMEOUT_S,
        kernel_name=KERNEL["name"],
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    for cell, done in zip(notebook.cells, ran.cells, strict=True):
        if cell.cell_type == "code" and CHECKED in cell.source:
            cell.outputs = done.outputs
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = cell.execution_count
            if not cell.outputs or any(set(output.get("data", {})) - {"text/plain"} for output in cell.outputs):
                raise SystemExit(f"a cell marked {CHECKED} prints text and nothing else:\n{cell.source}")


def code_of(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def cells_of(notebook: NotebookNode) -> list[tuple[str, str, list[str]]]:
    """Of each cell, what a reader of the .py sees: its kind, source and tags."""
    return [(cell.cell_type, cell.source, list(cell.metadata.get("tags", []))) for cell in notebook.cells]


def text_of(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook) + "\n"


def _unique_ids(notebook: NotebookNode, stem: str) -> None:
    seen: set[str] = set()
    for number, cell in enumerate(notebook.cells):
        if cell["id"] in seen:
            cell["id"] = f"{stem}-{number:03d}-{os.urandom(2).hex()}"
        seen.add(cell["id"])


if __name__ == "__main__":
    sys.exit(main())
