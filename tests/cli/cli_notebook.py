"""Notebooks that commands execute."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook


def write_notebook(folder: Path, *cells: str) -> Path:
    parameters = new_code_cell('run_dir: str = ""', metadata={"tags": ["parameters"]})
    path = folder / "training.ipynb"
    nbformat.write(new_notebook(cells=[parameters, *map(new_code_cell, cells)]), path)
    return path
