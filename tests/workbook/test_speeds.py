"""Speeds in notebook 03: benchmark rows, plots and tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from nsa_lab.bench.attention_rows import AttentionRow
from nsa_lab.bench.decode_speed import StepTime
from nsa_lab.config import ModelConfig
from nsa_lab.figures.style import get_title
from nsa_lab.workbook import speeds

ROWS = [
    AttentionRow("1000x2", "dense", "SDPA flash", 1.0, 3.0, share=None),
    AttentionRow("1000x2", "dense", "SDPA cuDNN", 1.0, 1.0),
    AttentionRow("1000x2", "whole", "triton", 1.0, 2.0, share=0.75),
    AttentionRow("4000x1", "dense", "SDPA flash", 9.0, 11.0),
    AttentionRow("4000x1", "dense", "SDPA cuDNN", 4.0, 6.0),
    AttentionRow("4000x1", "whole", "triton", 2.0, 3.0, 512.25, share=0.25),
    AttentionRow("4000x1", "window", "FlexAttention", note="parity failed"),
]


def test_nsa_must_be_faster_than_every_dense_baseline() -> None:
    assert speeds.describe_crossover(ROWS).splitlines() == [
        "T =  1,000: 0.75 of SDPA flash, 1.50 of SDPA cuDNN",
        "T =  4,000: 0.25 of SDPA flash, 0.50 of SDPA cuDNN",
        "of these lengths, NSA is faster from T = 4,000 on",
    ]
    assert speeds.describe_crossover(ROWS[:3]).endswith("dense attention is faster at all of them")
    assert "was not measured" in speeds.describe_crossover(ROWS[:2])


def test_curves_are_nanoseconds_per_token() -> None:
    curves = speeds.build_curves(ROWS)
    assert [length for length, _ in curves["whole", "triton"]] == [1000, 4000]
    assert [ns for _, ns in curves["whole", "triton"]] == pytest.approx([1500.0, 1250.0])
    assert ("window", "FlexAttention") not in curves
    assert "parity failed" in speeds.format_table(ROWS) and "537" in speeds.format_table(ROWS)  # 512.25 MiB in MB


def test_record_with_unknown_fields(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    rows = [{**asdict(row), "younger": 1} for row in ROWS]
    machine = {"gpu": "NVIDIA H200", "device": "cuda"}
    record.write_text(json.dumps({"when": "2026-11-22T02:49:54+00:00", "machine": machine, "rows": rows}))
    assert speeds.read_record(record) == (ROWS, "NVIDIA H200, 2026-11-22")


def test_committed_record_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    shown, folded = [], []
    monkeypatch.setattr(speeds, "show_figure", shown.append)
    monkeypatch.setattr(speeds, "show_folded", lambda summary, text: folded.append(text))
    speeds.show_attention_speeds(measure=False)
    assert "NVIDIA H200" in get_title(shown[0]) and "whole" in folded[0]
    assert "NSA is faster from T =" in capsys.readouterr().out
    monkeypatch.setattr(speeds, "RECORD_PATH", Path("no", "record.json"))
    speeds.show_attention_speeds(measure=False)
    assert "there is no record no/record.json" in capsys.readouterr().out and len(shown) == 1


def test_decoding_speeds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [StepTime("model", by, length, 1, ms, 0) for length in (1024, 4096) for by, ms in (("nsa", 2.0), ("dense", 4.0))]
    plots = []
    monkeypatch.setattr(speeds, "time_models", lambda config, lengths: rows)
    monkeypatch.setattr(speeds, "show_figure", plots.append)
    speeds.show_decoding_speeds(ModelConfig(n_layers=3), [1024, 4096])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  1,024 tokens of context, dense: 4.0 ms, 250 tokens/s" and len(lines) == 4
    nsa, dense = plots[0].axes[0].lines
    assert list(nsa.get_ydata()) == [500.0, 500.0] and list(dense.get_xdata()) == [1024, 4096]
    assert "3 layers" in get_title(plots[0])
