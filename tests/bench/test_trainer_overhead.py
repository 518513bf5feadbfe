"""`nsa-lab bench trainer`, tiny, on a CPU: all code runs, and the numbers are from the run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nsa_lab.bench.trainer_overhead import run_trainer_bench
from nsa_lab.config import ConfigError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this is a measurement, not a test")


@pytest.mark.nightly
def test_overheads_are_measured_on_a_real_run(tmp_path: Path) -> None:
    report = run_trainer_bench(tmp_path / "trainer.json", steps=4)
    assert json.loads((tmp_path / "trainer.json").read_text()) == report
    assert len(report["telemetry"]["on_s"]) == len(report["telemetry"]["off_s"]) == 2
    assert all(seconds > 0 for seconds in report["telemetry"]["on_s"] + report["telemetry"]["off_s"])
    assert report["save"]["bytes"] > 10_000 and report["save"]["verify_s"] > 0
    assert report["resume_s"] > 0


@pytest.mark.nightly
def test_ranks_are_compared_with_one() -> None:
    said = io.StringIO()
    ranks = run_trainer_bench(ranks=2, parallel="fsdp", steps=8, console=Console(file=said))["ranks"]
    *lines, code = said.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 rank", "2 ranks", "on cpu", "2 ranks, fsdp"]
    assert "commit" in code
    assert ranks["parallel"] == "fsdp"
    assert ranks["one_tokens_per_s"] > 0 and ranks["all_tokens_per_s"] > 0
    assert ranks["ratio"] == ranks["all_tokens_per_s"] / ranks["one_tokens_per_s"]


def test_more_ranks_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--ranks 2: this machine has 1 CUDA device"):
        run_trainer_bench(ranks=2)
