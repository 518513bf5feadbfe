"""Run the console script in this process, and the settings of models that train in a second."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from nsa_lab import cli

TINY = """
model: {dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8}
nsa: {l: 8, d: 4, l_sel: 8, n_sel: 4, w: 16}
train: {steps: 6, seq_len: 32, batch_size: 2, log_every: 2, stats_every: 2, eval_every: 3, eval_batches: 1, save_every: 3}
runtime: {device: cpu}
data: {source: local, val_fraction: 0.4}
"""


class CliResult(NamedTuple):
    exit_code: int
    out: str
    err: str


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Return a function that runs the console script in this process, with outputs below `tmp_path`."""

    def run(*arguments: object, outputs: bool = True) -> CliResult:
        options = ["--outputs", str(tmp_path / "outputs")] if outputs else []
        monkeypatch.setattr(sys, "argv", ["nsa-lab", *map(str, arguments), *options])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        code = exit_info.value.code or 0
        out, err = capsys.readouterr()
        return CliResult(code, out, err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return the params file of a model that trains in a second; its training text is next to it."""
    text = tmp_path / "text"
    text.mkdir()
    for index in range(12):
        (text / f"{index}.txt").write_text(f"Document {index}: " + "the quick brown fox jumps over the lazy dog. " * 9)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("source: local", f"source: local, path: '{text}'"))
    return path


@pytest.fixture
def rates(tiny: Path, tmp_path: Path) -> Path:
    """Return the file of a sweep over the learning rates of the tiny model."""
    path = tmp_path / "rates.yaml"
    path.write_text(f"preset: '{tiny}'\nvariants: {{as_it_is: , slow: train.lr=1e-5}}\nseeds: [0, 1]\n")
    return path
