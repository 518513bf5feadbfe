"""Build every notebook from its .py source, or execute notebooks to renew their outputs.

    python notebooks/build.py                      update the .ipynb files; outputs of unchanged code stay
    python notebooks/build.py --execute [STEM ...]    also execute all notebooks, or these (make notebooks)
    python notebooks/build.py --check              write nothing; exit with 1 if a pair is out of sync

A pair is in sync if its cells are equal, with or without outputs. Notebooks are committed with outputs, so that a forge
and the documentation show them. They have no widgets, no paths of a machine and no output on stderr. nbval compares the
text of cells marked NBVAL_CHECK_OUTPUT with their committed outputs.

Some notebooks are executed with other parameters than their own (`PARAMETERS`). These are not saved.
"""

from __future__ import annotations

import argparse
import base64
import copy
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).resolve().parent
CHECKED = "NBVAL_CHECK_OUTPUT"
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
CELL_TIMEOUT_S = 3600
LIMIT_BYTES = 1_000_000
WIDGET = "application/vnd.jupyter.widget-view+json"
# Stands for an empty folder of runs. In outputs it is shown as `outputs`, its default.
NEW_RUNS = "NEW_RUNS"
PARAMETERS: dict[str, dict[str, Any]] = {
    "00_start_here": {"outputs": NEW_RUNS},
    "04_smoke_training": {"outputs": NEW_RUNS},
    # Training needs a GPU. The outputs show the recorded run and its dense baseline; the sample is of the untrained model.
    "05_production_run": {
        "run_dir": "production_50k-20261121",
        "reference": "production_50k_dense-20261121",
        "sample_tokens": 100,
    },
    "10_convert": {"outputs": NEW_RUNS},
}
# Pictures of other pages: file in docs/pictures, and the notebook and start of the alt text of the figure.
PICTURES = {
    "nsa_architecture.png": ("01_branches", "NSA for one query"),
    "nsa_less_dense.png": ("06_health_analysis", "NSA minus dense"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a pair is out of sync")
    parser.add_argument("--execute", nargs="*", metavar="STEM", help="execute all notebooks, or these: 01_branches ...")
    options = parser.parse_args()
    sources = sorted(FOLDER.glob("[0-9]*.py"))
    stems = [source.stem for source in sources]
    if unknown := sorted(set(options.execute or []) - set(stems)):
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(stems)}")
    to_execute = [] if options.execute is None else options.execute or stems
    stale, without_outputs = [], []
    for source in sources:
        target = source.with_suffix(".ipynb")
        built = build(source, target)
        if options.check:
            current = target.exists() and get_cells(nbformat.read(target, as_version=4)) == get_cells(built)
        else:
            if source.stem in to_execute:
                execute(built, source.stem)
            if any(cell.cell_type == "code" and cell.execution_count is None for cell in built.cells):
                without_outputs.append(source.stem)
            current = target.exists() and target.read_text(encoding="utf-8") == to_text(built)
        if not current:
            stale.append(target.name)
            if not options.check:
                target.write_text(to_text(built), encoding="utf-8")
    if options.check and stale:
        print(f"out of sync with their .py: {', '.join(stale)}; run: python notebooks/build.py", file=sys.stderr)
        return 1
    print(f"written: {', '.join(stale)}" if stale else "every .ipynb is in sync with its .py")
    if without_outputs:
        print(f"without outputs, because their code has changed: make notebooks STEMS='{' '.join(without_outputs)}'")
    return 0


def build(source: Path, target: Path) -> NotebookNode:
    """Return the notebook of `source`, with the cell ids of `target`, and with its outputs if the code is the same."""
    config = load_jupytext_config(str(source))
    notebook = jupytext.read(source, config=config)
    keeps_outputs = False
    if target.exists():
        previous = jupytext.read(target, config=config)
        # The output of a cell depends on all the code before it, so any change of code invalidates all outputs.
        keeps_outputs = get_code(previous) == get_code(notebook)
        notebook = combine_inputs_with_outputs(notebook, previous)
    notebook.metadata["kernelspec"] = KERNEL
    # JupyterLab writes the text representation only into the .py.
    notebook.metadata["jupytext"].pop("text_representation", None)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        if not target.exists() or "id" not in cell:
            cell["id"] = f"{source.stem[:2]}-{number:03d}"
        if cell.cell_type == "code":
            cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
            if not keeps_outputs:
                cell.outputs, cell.execution_count = [], None
    _make_ids_unique(notebook, source.stem[:2])
    return notebook


def execute(notebook: NotebookNode, stem: str) -> None:
    """Execute the notebook in its folder with the parameters of `PARAMETERS`, and store the outputs in its cells."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs = str(Path(folder) / "outputs")
        parameters = {key: runs if value == NEW_RUNS else value for key, value in PARAMETERS.get(stem, {}).items()}
        executed = copy.deepcopy(notebook)
        _insert_parameters(executed, parameters)
        NotebookClient(
            executed,
            timeout=CELL_TIMEOUT_S,
            kernel_name=KERNEL["name"],
            coalesce_streams=True,
            record_timing=False,
            extra_arguments=["--log-level=50"],  # the kernel warns that it uses TCP
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute()
        _remove_parameters(executed, parameters)
        executed = _replace_text(_strip_paths(executed), {runs: "outputs", folder: "outputs"})
    code_cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code_cells, 1):
        _check_outputs(cell)
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
    for cell, executed_cell in zip(notebook.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = executed_cell.outputs, executed_cell.execution_count
    _write_pictures(notebook, stem)
    size = len(to_text(notebook).encode())
    print(f"{stem}: {size / 1e6:.2f} MB, {time.monotonic() - start:.0f} s", flush=True)
    if size > LIMIT_BYTES:
        raise SystemExit(f"{stem}: {size:,} bytes, expected at most {LIMIT_BYTES:,}; show fewer or smaller figures")


def get_code(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def get_cells(notebook: NotebookNode) -> list[tuple[str, str, list[str]]]:
    """Return kind, source and tags of each cell, which are what the .py contains."""
    return [(cell.cell_type, cell.source, list(cell.metadata.get("tags", []))) for cell in notebook.cells]


def to_text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook) + "\n"


def _insert_parameters(notebook: NotebookNode, parameters: dict[str, Any]) -> None:
    """Insert a cell that sets `parameters` after the cell tagged `parameters`, as papermill does."""
    if parameters:
        (place,) = (n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
        lines = [f"{name} = {value!r}" for name, value in parameters.items()]
        notebook.cells.insert(place + 1, new_code_cell("\n".join(lines), metadata={"tags": ["injected-parameters"]}))


def _remove_parameters(notebook: NotebookNode, parameters: dict[str, Any]) -> None:
    if parameters:
        notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]


def _strip_paths(notebook: NotebookNode) -> NotebookNode:
    # Imported here because it imports torch, which --check does not need.
    from nsa_lab.report.strip_paths import strip_paths

    return strip_paths(notebook)


def _replace_text(notebook: NotebookNode, replacements: dict[str, str]) -> NotebookNode:
    text = nbformat.writes(notebook)
    for old, new in replacements.items():
        text = text.replace(old, new)
    return nbformat.reads(text, as_version=4)


def _check_outputs(cell: NotebookNode) -> None:
    """Refuse outputs that do not belong into a committed notebook."""
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            raise SystemExit(f"a cell printed on stderr: {output.text[:500]}\n\n{cell.source}")
        if WIDGET in output.get("data", {}):
            raise SystemExit(f"a cell created a widget, which has no content without a kernel:\n{cell.source}")
    if CHECKED in cell.source:
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        if not cell.outputs or kinds - {"text/plain"}:
            raise SystemExit(f"a cell marked {CHECKED} must print text only:\n{cell.source}")


def _write_pictures(notebook: NotebookNode, stem: str) -> None:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    for file, (source_stem, alt) in PICTURES.items():
        if source_stem == stem:
            figure = next(f for f in figures if f.metadata["image/png"]["alt"].startswith(alt))
            (FOLDER.parent / "docs" / "pictures" / file).write_bytes(base64.b64decode(figure.data["image/png"]))


def _make_ids_unique(notebook: NotebookNode, stem: str) -> None:
    seen: set[str] = set()
    for number, cell in enumerate(notebook.cells):
        if cell["id"] in seen:
            cell["id"] = f"{stem}-{number:03d}-{os.urandom(2).hex()}"
        seen.add(cell["id"])


if __name__ == "__main__":
    sys.exit(main())
