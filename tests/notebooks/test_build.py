"""notebooks/build.py: outputs stay while the code is the same, executing stores clean outputs, and nothing else changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jupytext
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from .conftest import ROOT


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script with an empty folder of notebooks."""
    spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "notebooks" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "jupytext.toml").write_bytes((ROOT / "notebooks" / "jupytext.toml").read_bytes())
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "PARAMETERS", {})
    return module


def run(build: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["build.py", *arguments])
    return build.main()


def write_source(folder: Path, *cells: nbformat.NotebookNode) -> Path:
    source = folder / "00_test.py"
    jupytext.write(new_notebook(cells=list(cells)), source, fmt="py:percent")
    return source.with_suffix(".ipynb")


def parameters_cell(source: str) -> nbformat.NotebookNode:
    return new_code_cell(source, metadata={"tags": ["parameters"]})


@pytest.mark.slow
def test_execution_uses_parameters_that_are_not_saved_and_hides_the_folder_of_runs(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.PARAMETERS["00_test"] = {"outputs": build.NEW_RUNS, "number": 7}
    code = 'print(number, f"{outputs}/run-1", __import__("os").path.exists(outputs))'
    target = write_source(
        tmp_path, new_markdown_cell("# Test"), parameters_cell('outputs: str = ""\nnumber: int = 1'), new_code_cell(code)
    )
    assert run(build, monkeypatch, "--execute") == 0
    notebook = nbformat.read(target, as_version=4)
    assert [cell.source for cell in notebook.cells] == ["# Test", 'outputs: str = ""\nnumber: int = 1', code]
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2]
    assert notebook.cells[2].outputs[0].text == "7 outputs/run-1 False\n"
    assert run(build, monkeypatch, "--check") == 0
    # Executed again, the file is the same.
    before = target.read_bytes()
    assert run(build, monkeypatch, "--execute", "00_test") == 0 and target.read_bytes() == before


def test_outputs_stay_if_only_the_text_changes(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_source(tmp_path, new_markdown_cell("# Test"), new_code_cell("print(1)"))
    assert run(build, monkeypatch) == 0
    notebook = nbformat.read(target, as_version=4)
    ids = [cell.id for cell in notebook.cells]
    notebook.cells[1].update(execution_count=1, outputs=[new_output("stream", text="1\n")])
    target.write_text(build.to_text(notebook))
    write_source(tmp_path, new_markdown_cell("# Another text"), new_code_cell("print(1)"))
    assert run(build, monkeypatch, "--check") == 1
    assert run(build, monkeypatch) == 0
    changed = nbformat.read(target, as_version=4)
    assert changed.cells[0].source == "# Another text" and changed.cells[1].outputs[0].text == "1\n"
    assert changed.cells[1].id == ids[1]
    write_source(tmp_path, new_markdown_cell("# Another text"), new_code_cell("print(2)"))
    assert run(build, monkeypatch) == 0
    cell = nbformat.read(target, as_version=4).cells[1]
    assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (new_output("stream", name="stderr", text="Warning: x"), "a cell printed on stderr: Warning: x"),
        (new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}}), "a cell created a widget"),
    ],
)
def test_outputs_that_cannot_be_committed_are_refused(
    build: ModuleType, output: nbformat.NotebookNode, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        build._check_outputs(new_code_cell("x", outputs=[output]))


def test_checked_cell_prints_text_only(build: ModuleType) -> None:
    picture = new_output("display_data", data={"image/png": "", "text/plain": "x"})
    for outputs in ([], [picture]):
        with pytest.raises(SystemExit, match="must print text only"):
            build._check_outputs(new_code_cell("# NBVAL_CHECK_OUTPUT", outputs=outputs))
    build._check_outputs(new_code_cell("# NBVAL_CHECK_OUTPUT", outputs=[new_output("stream", text="1")]))


def test_unknown_notebook_is_an_error(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_source(tmp_path, new_code_cell("1"))
    with pytest.raises(SystemExit):
        run(build, monkeypatch, "--execute", "07_more")
    assert "no notebook 07_more; there are 00_test" in capsys.readouterr().err
