"""Run notebooks through papermill as a user would, with separate run directories."""

import json
import subprocess
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
CI = yaml.safe_load((ROOT / "params" / "ci.yaml").read_text())
CELL_TIMEOUT_S = 240


@pytest.fixture(autouse=True)
def as_a_user_would(monkeypatch):
    """Use one thread, because tiny models are slower with several on a busy machine.

    Do not use the Triton interpreter of the kernel tests: notebook 03 would check every kernel with it, which takes
    minutes.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def execute(tmp_path, forked):
    """Return execute(stem, cwd=..., **parameters) -> the executed notebook. Samples have 40 tokens."""

    def run(stem: str, cwd: Path = ROOT, **parameters):
        target = tmp_path / f"{stem}.ipynb"
        papermill.execute_notebook(
            ROOT / "notebooks" / f"{stem}.ipynb",
            target,
            parameters={"sample_tokens": 40, **parameters},
            cwd=str(cwd),
            execution_timeout=CELL_TIMEOUT_S,
            progress_bar=False,
        )
        return nbformat.read(target, as_version=4)

    return run


def committed(path: Path) -> str:
    """Return the text of a file in git. A notebook that is open in JupyterLab may have outputs that are not committed."""
    name = f"HEAD:{path.relative_to(ROOT).as_posix()}"
    shown = subprocess.run(["git", "-C", str(ROOT), "show", name], capture_output=True, text=True, check=False)
    return shown.stdout if shown.returncode == 0 else path.read_text(encoding="utf-8")


def printed(notebook) -> str:
    """Return everything that the notebook's cells print or show as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def pictures(notebook) -> list:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def status(run: Path) -> str:
    return json.loads((run / "status.json").read_text())["status"]
