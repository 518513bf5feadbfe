"""The bench of a decoding step: parity before speed, dense attention beside it, bytes counted by the definition."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from nsa_lab.bench import decode_kernels
from nsa_lab.bench.decode_kernels import Step, run_decode_bench
from nsa_lab.config import NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=50)
STEPS = (Step(301, 2, 6, 2, 32), Step(40, 1, 2, 1, 16))


def bench(tmp_path, **options):
    console = Console(file=(tmp_path / "table.txt").open("w"), width=200)
    return run_decode_bench(STEPS, tmp_path / "bench.json", device="cpu", nsa=NSA, console=console, **options)


def test_every_contender_is_checked_timed_and_recorded(tmp_path):
    record = bench(tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == record["rows"]
    by = [[row for row in record["rows"] if row["shape"] == str(step)] for step in STEPS]
    for step, rows in zip(STEPS, by, strict=True):
        *dense, ours = rows
        assert ours["by"] == "NSA, torch" and len(dense) == 2
        best = min(row["ms"] for row in dense)
        for row in rows:
            assert row["parity"][0] <= row["parity"][1] and row["ratio"] == pytest.approx(best / row["ms"])
        every = step.B * step.T * step.G * 2 * step.D * 4 / 1e6
        assert [row["read_mb"] for row in dense] == pytest.approx([every, every])
    # 301 tokens: 74 compressed keys, three blocks of 16 and the 13 tokens that the last has, a window of 50.
    assert by[0][-1]["read_mb"] == pytest.approx(2 * (74 + 61 + 50) * 2 * 2 * 32 * 4 / 1e6)


def test_a_wrong_step_gets_no_speed(tmp_path, monkeypatch):
    honest = decode_kernels.cached_attention
    monkeypatch.setattr(decode_kernels, "cached_attention", lambda *x, **options: honest(*x, **options) * 1.001)
    ours = [row for row in bench(tmp_path)["rows"] if row["by"].startswith("NSA")]
    assert len(ours) == 2 and all("FAILED PARITY" in row["note"] and row["ms"] is None for row in ours)


def test_what_there_is_no_time_for_is_said(tmp_path):
    assert [row["note"] for row in bench(tmp_path, seconds=-1)["rows"]] == ["left out: no time"] * 2
