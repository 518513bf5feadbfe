"""The benchmark harness: records, tables and the parity gate; and the shares on the documentation page."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nsa_lab.bench import harness
from nsa_lab.bench.attention_rows import AttentionRow, read_record
from nsa_lab.bench.attention_speed import _compute_shares
from nsa_lab.bench.harness import Benchmark, Output, RowColumn, Setup, make_record
from nsa_lab.config import ConfigError
from nsa_lab.runs import environment

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
# attention-renamed-h200.json holds four records, of two commits in turns.
RECORDS = sorted(path for path in DOCS.glob("*.json") if "-renamed-" not in path.name)
CPU = Setup.resolve("cpu")


@dataclass
class Row:
    name: str
    ms: float | None = None
    note: str = ""


def run(tmp_path: Path, measure, cases=("a", "b", "c"), **options):
    file = io.StringIO()
    benchmark = Benchmark[Row]("Title", (RowColumn("name"), RowColumn("ms"), RowColumn("note")), **options)
    output = Output(tmp_path / "bench.json", tmp_path / "bench.png", Console(file=file, width=100))
    return benchmark.run(cases, measure, output, make_record(CPU, what="test")), file.getvalue()


def test_a_record_has_date_device_versions_and_commit() -> None:
    record = make_record(CPU, what="test")
    assert set(record) == {"when", "device", "versions", "code", "what"} and record["device"] == "cpu"
    assert record["code"]["commit"] == environment.get_code_identity()["commit"] and record["versions"]["torch"]


def test_uncommitted_changes_are_reported() -> None:
    code = {"commit": "0123456789abcdef", "dirty": True}
    text = harness.describe_code({"when": "2026-11-22T00:00:00", "code": code})
    assert text == "commit 0123456789 with uncommitted changes, 2026-11-22"
    assert "uncommitted" not in harness.describe_code({"when": "2026-11-22T00:00:00", "code": code | {"dirty": False}})
    assert "commit not recorded" in harness.describe_code({"when": "2026-11-22T00:00:00"})


def test_only_records_are_read(tmp_path: Path) -> None:
    for record in RECORDS:
        assert read_record(record)["when"]
    turns = json.loads((DOCS / "attention-renamed-h200.json").read_text(encoding="utf-8"))
    assert turns.keys() == {"before", "after"}
    for part in turns.values():
        for number, run in enumerate(part["runs"]):
            path = tmp_path / f"{number}.json"
            path.write_text(json.dumps(run))
            assert read_record(path)["when"]
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo: expected a regular file"):
        read_record(tmp_path / "fifo")
    for content in ("[]", "{}", '{"when": 1}', "not JSON", "[" * 100_000):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ConfigError, match="expected a record written by nsa-lab bench --json"):
            read_record(tmp_path / "other.json")


def test_the_defaults_follow_the_device() -> None:
    assert (CPU.dtype, CPU.select(gpu=1, cpu=2), CPU.is_gpu) == (torch.float32, 2, False)
    gpu = Setup.resolve("cuda")
    assert (gpu.dtype, gpu.select(gpu=1, cpu=2), gpu.is_gpu) == (torch.bfloat16, 1, True)
    assert Setup.resolve("cpu", torch.bfloat16).dtype == torch.bfloat16


def test_random_inputs_follow_their_seed() -> None:
    first, second, other = (harness.RandomInputs("cpu", torch.float32, seed) for seed in (1, 1, 2))
    x = first.normal(2, 3)
    assert x.shape == (2, 3) and torch.equal(x, second.normal(2, 3)) and not torch.equal(x, other.normal(2, 3))
    gates = first.gates(100)
    assert gates.min() >= 0 and gates.max() < 1
    x = x.requires_grad_()
    (leaf,) = harness.make_leaves(x)
    assert leaf.requires_grad and leaf is not x


def test_a_row_that_fails_parity_is_not_measured() -> None:
    for is_correct in (True, False):
        row = Row("a")
        harness.measure_if_correct(row, is_correct, lambda row=row: setattr(row, "ms", 1.0))
        assert (row.ms, row.note) == ((1.0, "") if is_correct else (None, "FAILED PARITY: no speed"))


def test_rows_are_printed_recorded_and_plotted(tmp_path: Path) -> None:
    plotted = []
    rows, text = run(tmp_path, lambda case: [Row(case, 2.0), Row(case + case)], plot=lambda *args: plotted.append(args))
    assert [row.name for row in rows] == ["a", "aa", "b", "bb", "c", "cc"] and text.count("Title") == 3
    assert "2.000" in text and "commit" in text.splitlines()[-1]
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["rows"][0] == {"name": "a", "ms": 2.0, "note": ""} and len(record["rows"]) == 6
    assert "not_measured" not in record and record["what"] == "test"
    assert plotted == [(rows, tmp_path / "bench.png")]


def test_one_table_at_the_end_of_all_cases(tmp_path: Path) -> None:
    rows, text = run(tmp_path, lambda case: [Row(case)], has_table_per_case=False, rows_key="lines")
    assert text.count("Title") == 1 and "measured a" in text and text.index("measured c") < text.index("Title")
    assert len(json.loads((tmp_path / "bench.json").read_text())["lines"]) == len(rows) == 3


def test_an_interrupted_benchmark_records_its_results_and_the_remaining_cases(tmp_path: Path) -> None:
    def measure(case: str) -> list[Row]:
        if case == "b":
            raise KeyboardInterrupt
        return [Row(case, 1.0)]

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, measure)
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in record["rows"]] == ["a"] and record["not_measured"] == ["b", "c"]


def test_a_column_formats_its_cell() -> None:
    table = harness.make_table("", (RowColumn("upper", lambda row: row.name.upper()), RowColumn("time", "ms")), [Row("a")])
    assert table.rows == [["A", ""]]
    assert [harness.format_number(x) for x in (None, 1.23456, 12.3456)] == ["", "1.235", "12.3"]


def test_shares_are_of_flash_and_of_the_fastest() -> None:
    row = AttentionRow("2048x8", "whole", "triton", forward_ms=1.0, backward_ms=1.0)
    assert _compute_shares(row, {"SDPA flash": 8.0, "SDPA cuDNN": 4.0}) == (0.25, 0.5)
    assert _compute_shares(row, {"SDPA math": 4.0}) == (None, 0.5)
    assert _compute_shares(AttentionRow("", "whole", ""), {"SDPA flash": 8.0}) == (None, None)


@pytest.mark.parametrize("name", ["attention-h200.json", "attention-wide-h200.json"])
def test_the_shares_on_the_page_are_those_of_the_record(name: str) -> None:
    """Check the whole operator against SDPA flash and cuDNN."""
    rows = json.loads((DOCS / name).read_text())["rows"]
    page = (DOCS / "README.md").read_text().splitlines()
    for by, told in (("SDPA flash", "| whole attention |"), ("SDPA cuDNN", "| whole attention, of cuDNN |")):
        (line,) = [line for line in page if line.startswith(told)]
        for shape in dict.fromkeys(row["shape"] for row in rows):
            took = {(r["part"], r["by"]): r["forward_ms"] + (r["backward_ms"] or 0) for r in rows if r["shape"] == shape}
            assert f"{took['whole', 'triton'] / took['dense', by]:.3f}" in line, (shape, by)
