"""The committed notebooks: in sync with their sources, and with typed and explained parameters."""

import importlib.util
import shutil
import subprocess
import sys

import nbformat
import papermill
import pytest
from jupytext import TextFileContentsManager
from jupytext.cli import jupytext
from nbformat.v4 import new_output

from .conftest import NOTEBOOKS, ROOT

TRAINING = ("04_smoke_training", "05_production_run")


@pytest.mark.slow  # also run separately: make check-notebooks
def test_pairs_are_in_sync():
    completed = subprocess.run(
        [sys.executable, ROOT / "notebooks" / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """Return a copy of the notebooks, its check, and a function that saves a notebook as JupyterLab does."""
    folder = shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    spec = importlib.util.spec_from_file_location("build", folder / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setattr(sys, "argv", ["build.py", "--check"])
    manager = TextFileContentsManager(root_dir=str(tmp_path))

    def save_in_lab(name: str, ran: int) -> None:
        notebook = manager.get(f"notebooks/{name}")["content"]
        notebook.metadata["language_info"] = {"name": "python", "version": "3.11.0", "file_extension": ".py"}
        for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
            # "Run all cells" first clears all outputs.
            cell.execution_count = number + 1 if number < ran else None
            cell.outputs = (cell.outputs or [new_output("stream", text="ran\n")]) if number < ran else []
            cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
        manager.save({"type": "notebook", "format": "json", "content": notebook}, f"notebooks/{name}")

    return folder, build.main, save_in_lab


@pytest.mark.slow
@pytest.mark.parametrize("ran", [1, 1000], ids=["half-way", "at the end"])
def test_pairs_are_in_sync_after_jupyterlab_saves(pairs, capsys, ran):
    folder, check, save_in_lab = pairs
    for path in NOTEBOOKS:
        before = path.with_suffix(".py").read_bytes()
        save_in_lab(path.name, ran)
        assert (folder / path.name).read_bytes() != path.read_bytes(), "outputs were saved"
        assert (folder / path.with_suffix(".py").name).read_bytes() == before, path.stem
    assert check() == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("what", ["source", "tags", "cells"])
def test_a_changed_notebook_is_out_of_sync(pairs, capsys, what):
    folder, check, _ = pairs
    path = folder / NOTEBOOKS[3].name
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.metadata.get("tags"))
    if what == "source":
        cell.source += "\nmore = 1"
    elif what == "tags":
        cell.metadata["tags"] = []
    else:
        notebook.cells.pop()
    nbformat.write(notebook, path)
    assert check() == 1
    assert f"out of sync with their .py: {path.name};" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestEachNotebook:
    def test_jupytext_sees_no_difference(self, path, capsys):
        jupytext(["--diff", str(path.with_suffix(".py")), str(path)])
        assert capsys.readouterr().out == ""  # its exit code is 0 even when they differ

    def test_parameters_are_tagged_typed_and_explained(self, path):
        cells = nbformat.read(path, as_version=4).cells
        (cell,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
        parameters = papermill.inspect_notebook(str(path))
        # papermill omits a line that it cannot parse, for example one with "=" in its comment.
        assert len(parameters) == len(cell.source.splitlines())
        for name, parameter in parameters.items():
            assert parameter["inferred_type_name"] not in ("", "None"), name
            assert parameter["help"], name


@pytest.mark.parametrize("stem", TRAINING)
def test_training_notebooks_take_the_sections_of_a_params_file(stem):
    known = papermill.inspect_notebook(str(ROOT / "notebooks" / f"{stem}.ipynb"))
    assert {"name", "model", "nsa", "runtime", "train", "data", "run_dir"} <= set(known)


def test_both_training_notebooks_run_the_same_code():
    sources = []
    for stem in TRAINING:
        cells = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells
        sources.append([cell.source for cell in cells if cell.cell_type == "code" and not cell.metadata.get("tags")])
    assert sources[0] == sources[1]
