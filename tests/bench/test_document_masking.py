"""`nsa-lab bench train --documents`, tiny, on a CPU: the code of a GPU measurement."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nsa_lab.bench import document_masking, training_speed
from nsa_lab.cli import app
from nsa_lab.config import RunConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these are measurements, not tests")


@pytest.mark.slow
def test_masked_and_unmasked_rows_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "short.jsonl"
    text.write_text("".join(json.dumps({"text": f"document number {i}."}) + "\n" for i in range(400)))
    seen, measure = [], training_speed.measure_configs
    monkeypatch.setattr(
        document_masking, "measure_configs", lambda configs, steps: seen.extend(configs.values()) or measure(configs, steps)
    )
    table = Console(file=(tmp_path / "table.txt").open("w"), width=200)
    (row,) = document_masking.run_documents_bench(((64, 2),), tmp_path / "bench.json", text=text, steps=3, console=table)
    assert [config.data.documents for config in seen] == ["cross", "mask"]
    assert (
        not row.cuda_graph and 3 < row.documents_per_row < 5 and row.ratio == row.mask / row.cross > 0 and row.bar is None
    )
    recorded = json.loads((tmp_path / "bench.json").read_text())
    assert recorded["rows"][0]["mask"] == row.mask and recorded["text"] == "short.jsonl" and "commit" in recorded["code"]


def test_a_small_shape_is_also_measured_with_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU, if requested: both documents settings without graphs, then with. Default: the shapes with targets."""
    seen: list[tuple[int, int, str, bool]] = []

    def measured(configs: dict[str, RunConfig], steps: int) -> dict[str, training_speed.StepMeasurement]:
        found = {}
        for name, config in configs.items():
            shape = config.train.seq_len, config.train.batch_size
            seen.append((*shape, config.data.documents, config.runtime.cuda_graph))
            found[name] = training_speed.StepMeasurement(
                "nsa", *shape, 1.0, 1.0, 1.0, 1.0, 1, {}, config.runtime.cuda_graph
            )
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(document_masking, "measure_configs", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    console = Console(file=io.StringIO())
    assert [(row.seq_len, row.cuda_graph) for row in document_masking.run_documents_bench(console=console)] == [
        (2048, False),
        (65536, False),
    ]
    seen.clear()
    rows = document_masking.run_documents_bench(((2048, 32), (2048, 4)), tmp_path / "bench.json", console=console)
    shapes = [(2048, 32, False), (2048, 4, False), (2048, 4, True)]
    assert [(row.seq_len, row.micro_batch, row.cuda_graph) for row in rows] == shapes
    assert seen == [(T, micro, kind, graph) for T, micro, graph in shapes for kind in ("cross", "mask")]
    assert [row["cuda_graph"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == [False] * 2 + [True]


def test_options_of_the_other_benchmark_are_rejected(tmp_path: Path) -> None:
    for options, why in ((["--documents", "--picture", "a.png"], "it has no figure"), (["--text", "a"], "--documents")):
        result = CliRunner().invoke(app, ["bench", "train", *options])
        assert result.exit_code == 2 and why in " ".join(result.output.split())
