"""The recorded environment distinguishes runs and contains nothing private to the machine."""

from __future__ import annotations

import json
import platform
import socket
import sys
from pathlib import Path

import pytest

from nsa_lab.config import RunConfig
from nsa_lab.runs import environment as module
from nsa_lab.runs.environment import collect_environment, list_gpus, set_openmp_wait_policy
from nsa_lab.runs.lifecycle import create_run


def test_no_folder_host_or_kernel_build_is_recorded() -> None:
    record = json.dumps(collect_environment())
    for private in (
        sys.executable,
        str(Path.home()),
        str(Path(module.__file__).parents[1]),
        socket.gethostname(),
        platform.release(),
    ):
        assert private not in record
    assert {"versions", "code", "system", "architecture", "cpus", "gpus"} == set(collect_environment())


def test_gpus_are_read_from_nvidia_smi(monkeypatch) -> None:
    monkeypatch.setattr(module, "_run_command", lambda *command: "NVIDIA H200, 570.1\nNVIDIA A, B, 570.1")
    assert list_gpus() == [{"name": "NVIDIA H200", "driver": "570.1"}, {"name": "NVIDIA A, B", "driver": "570.1"}]
    monkeypatch.setattr(module, "_run_command", lambda *command: None)
    assert list_gpus() == []


def test_relative_data_path_is_recorded_unchanged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text " * 10_000)
    run = create_run(RunConfig.from_dict({"name": "x", "data": {"source": "local", "path": "texts"}}), tmp_path / "runs")
    assert "path: texts\n" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
    ],
)
def test_openmp_wait_policy_is_set_unless_set_already(environ: dict[str, str], expected: dict[str, str]) -> None:
    settings = dict(environ)
    set_openmp_wait_policy(settings)
    assert settings == expected


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, NotADirectoryError, OSError])
def test_commands_that_cannot_be_started_are_missing(error: type[OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    """PermissionError: a folder on PATH may not be searched."""

    def refuse(*_: object, **__: object) -> None:
        raise error("no")

    monkeypatch.setattr(module.subprocess, "run", refuse)
    record = collect_environment()
    assert record["gpus"] == [] and record["code"]["commit"] is None and record["code"]["source"]
