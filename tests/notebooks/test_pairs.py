"""The committed notebooks: in step with their sources, free of outputs, parameters typed and explained."""

import subprocess
import sys

import nbformat
import papermill
import pytest
from jupytext.cli import jupytext

from .conftest import NOTEBOOKS, ROOT

TRAINING = ("03_smoke_training", "04_production_run")


@pytest.mark.slow  # a fast check of its own: make check-notebooks
def test_build_has_nothing_to_do():
    done = subprocess.run(
        [sys.executable, ROOT / "notebooks" / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestEachNotebook:
    def test_jupytext_sees_no_difference(self, path, capsys):
        jupytext(["--diff", str(path.with_suffix(".py")), str(path)])
        assert capsys.readouterr().out == ""  # its exit code is 0 even when they differ

    def test_only_checked_cells_keep_an_output(self, path):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                checked = "NBVAL_CHECK_OUTPUT" in cell.source
                assert bool(cell.outputs) == checked, cell.source
                # nbval compares only cells that say that they were run.
                assert (cell.execution_count is not None) == checked

    def test_parameters_are_tagged_typed_and_explained(self, path):
        cells = nbformat.read(path, as_version=4).cells
        assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1
        known = papermill.inspect_notebook(str(path))
        assert known
        for name, parameter in known.items():
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
