"""Training notebooks through papermill with params/ci.yaml: repeated, killed, and with mistakes. Others: `make nbval`."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from papermill.exceptions import PapermillExecutionError

from nsa_lab.config import RunConfig
from nsa_lab.runs import lifecycle

from .conftest import CELL_TIMEOUT_S, CI, ROOT, pictures, printed, status


@pytest.mark.nightly
def test_training_again_and_its_health(execute, tmp_path):
    outputs = tmp_path / "runs"
    first = execute("05_production_run", **CI, outputs=str(outputs))
    (run,) = outputs.glob("ci-*")
    assert status(run) == "DONE" and run.name.startswith("ci-")
    assert "new run" in printed(first) and "trial run, no failures" in printed(first)
    assert len(pictures(first)) >= 7

    second = execute("05_production_run", cwd=ROOT / "notebooks", **CI, outputs=str(outputs))
    assert list(outputs.glob("ci-*")) == [run]
    assert "this run is finished" in printed(second)

    # `nsa-lab run` passes only the run directory.
    shown = execute("04_smoke_training", run_dir=str(run))
    assert "this run is finished" in printed(shown)

    dense = lifecycle.ensure(RunConfig.from_yaml(ROOT / "params" / "ci.yaml", {"model.attention": "dense"}), outputs)
    assert lifecycle.wait(dense, CELL_TIMEOUT_S) and status(dense) == "DONE"
    health = execute("06_health_analysis", run_dir=str(run), other_run=str(dense))
    for line in (
        "every step once",
        "as good as dense",
        "time as planned: the plan has no throughput",
        "Is the gate alive?",
        "same training: same configuration except for attention",
        "cached decoding is exact: step-00000020",
    ):
        assert line in printed(health) + str(health.cells), line
    assert any("Blocks selected" in output["metadata"]["image/png"]["alt"] for output in pictures(health))


@pytest.mark.nightly
def test_papermill_alone_and_a_killed_kernel_leave_the_trainer_alone(tmp_path, execute):
    outputs = tmp_path / "runs"
    parameters = {**CI, "train": {**CI["train"], "steps": 150, "save_every": 50}}
    command = [
        sys.executable,
        "-m",
        "papermill",
        ROOT / "notebooks" / "05_production_run.ipynb",
        tmp_path / "out.ipynb",
        "-f",
        ROOT / "params" / "ci.yaml",
        "-y",
        f"{{train: {parameters['train']}}}",
        "-p",
        "outputs",
        outputs,
    ]
    notebook = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run = _first_run(outputs, notebook)
        (kernel,) = [child for child in psutil.Process(notebook.pid).children() if "ipykernel" in " ".join(child.cmdline())]
        os.kill(kernel.pid, signal.SIGKILL)
        assert notebook.wait(60) != 0
    finally:
        notebook.kill()
    second = execute("05_production_run", **parameters, outputs=str(outputs))
    assert list(outputs.glob("ci-*")) == [run]
    assert status(run) == "DONE"
    assert "attached to the running run" in printed(second) or "this run is finished" in printed(second)
    assert "none missing, none duplicated; one attempt" in printed(second)


@pytest.mark.slow
def test_a_mistake_is_one_line_in_the_notebook_and_leaves_nothing(execute, tmp_path):
    outputs = tmp_path / "runs"
    data = {"source": "local", "path": "no/such/folder"}
    with pytest.raises(PapermillExecutionError) as caught:
        execute("04_smoke_training", name="ci", data=data, outputs=str(outputs), sample_tokens=1)
    assert caught.value.ename == "Stop" and "no/such/folder" in caught.value.evalue
    assert len(caught.value.traceback) == 1
    # The lock that two notebooks with the same parameters share may stay.
    assert {path.name for path in outputs.glob("*")} <= {".creation.lock"}


def _first_run(outputs, notebook):
    deadline = time.monotonic() + CELL_TIMEOUT_S
    while time.monotonic() < deadline and notebook.poll() is None:
        for run in outputs.glob("ci-*"):
            if (run / "events.jsonl").is_file() and '"kind":"step"' in (run / "events.jsonl").read_text():
                return run
        time.sleep(0.2)
    raise AssertionError("the notebook started no run")
