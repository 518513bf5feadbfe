"""The benchmark of packed documents: a parity check before speed, each row compared with its reference."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nsa_lab.attention import torch_backend
from nsa_lab.bench import packed_attention
from nsa_lab.bench.packed_attention import GPU_SIZES, RowSizes, run_packed_bench, sample_corpus_lengths
from nsa_lab.cli import app
from nsa_lab.config import NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
SIZES = RowSizes(2, 12, 48, 24, 2, 1, 8)


def bench(tmp_path):
    console = Console(file=(tmp_path / "table.txt").open("w"), width=200)
    return run_packed_bench(tmp_path / "bench.json", device="cpu", backend="torch", nsa=NSA, sizes=SIZES, console=console)


def test_every_packing_is_checked_timed_and_recorded(tmp_path):
    lines = {line.name: line for line in bench(tmp_path)}
    assert list(lines) == ["even", "even, capacity", "corpus", "corpus, capacity"]
    assert [line.bar for line in lines.values()] == [1.03, 1.03, 1.15, 1.15]
    for line in lines.values():
        assert line.worst <= 1 and line.packed_ms > 0 and not line.note
        assert line.ratio == pytest.approx(line.packed_ms / line.beside_ms)
    recorded = json.loads((tmp_path / "bench.json").read_text())
    batched = {int(length): ms for length, ms in recorded["batched_ms"].items()}
    assert lines["even"].beside_ms == batched[12]
    # 24 tokens in total, or one sequence if that is longer.
    shares = [length * batched[64] / 64 for length in recorded["corpus"]]
    assert lines["corpus"].beside_ms == pytest.approx(sum(shares))
    assert [line["name"] for line in recorded["lines"]] == list(lines) and recorded["kernels_us"] == {}


def test_kernels_are_sorted_by_difference(tmp_path):
    console = Console(file=(tmp_path / "table.txt").open("w"), width=200)
    console.print(
        packed_attention._make_kernel_table({"same": (5.0, 5.0), "slower": (9.0, 4.0), "packed alone": (2.0, 0.0)})
    )
    console.file.close()
    told = (tmp_path / "table.txt").read_text()
    assert told.index("slower") < told.index("packed alone") < told.index("same") and "-5.0" not in told


def test_documents_that_read_each_other_get_no_speed(tmp_path, monkeypatch):
    honest = torch_backend.window_attention
    monkeypatch.setattr(torch_backend, "window_attention", lambda *x, span=None: honest(*x))
    for line in bench(tmp_path):
        assert "FAILED PARITY" in line.note and line.packed_ms is None


def test_the_corpus_has_one_long_document_among_many_short_ones():
    lengths = sample_corpus_lengths(GPU_SIZES)
    assert sum(lengths) == 131072 and lengths.count(65536) == 1 and min(lengths) > 0
    assert sorted(lengths)[len(lengths) // 2] < 3000 and lengths == sample_corpus_lengths(GPU_SIZES)


def test_shapes_are_rejected_with_packed():
    result = CliRunner().invoke(app, ["bench", "attention", "--packed", "--shape", "2048x8"])
    assert result.exit_code == 2 and "fixed shapes" in " ".join(result.output.split())
