"""`nsa-lab bench train` and `bench curves`, tiny, on a CPU: the code of a GPU measurement."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from looping import looped
from matplotlib.figure import Figure
from torch.profiler import profiler
from typer.testing import CliRunner

from nsa_lab.bench import loss_curves, step_breakdown, timing, training_speed
from nsa_lab.bench.attention_rows import parse_training_shape
from nsa_lab.cli import app
from nsa_lab.config import ModelConfig, NSAConfig, RunConfig
from nsa_lab.data import Batch
from nsa_lab.data.document_starts import locate_documents
from nsa_lab.model import NSATransformer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these are measurements, not tests")

SMALL = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=16)
)


@pytest.mark.slow
def test_both_models_are_measured_at_each_shape(tmp_path: Path) -> None:
    file, picture = tmp_path / "train.json", tmp_path / "train.png"
    report = training_speed.run_train_bench(((64, 2), (96, 1)), file, steps=3, model=SMALL, picture=picture)
    assert json.loads(file.read_text()) == json.loads(json.dumps(report))
    assert [(row["seq_len"], row["micro_batch"]) for row in report["rows"]] == [(64, 2), (96, 1)]
    for row in report["rows"]:
        assert row["ratio"] == row["nsa"]["tokens_per_s"] / row["dense"]["tokens_per_s"] > 0
        for kind in ("nsa", "dense"):
            assert row[kind]["tokens_per_s"] * row[kind]["step_s"] == pytest.approx(row["seq_len"] * row["micro_batch"])
            assert row[kind]["flops_6n"] > 0 and row[kind]["flops_actual"] > 0
        assert row["dense"]["flops_6n"] == row["dense"]["flops_actual"]
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_the_model_of_a_preset_is_measured(tmp_path: Path) -> None:
    preset, file = tmp_path / "small.yaml", tmp_path / "train.json"
    model = SMALL.model_copy(update={"attention": "dense", "matching_heads": 1})
    preset.write_text(RunConfig(name="small", model=model).to_yaml())
    result = CliRunner().invoke(
        app, ["bench", "train", "--preset", str(preset), "--shape", "64x2", "--json", str(file), "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["model"] == json.loads(model.model_dump_json()) and report["rows"][0]["ratio"] > 0
    result = CliRunner().invoke(app, ["bench", "train", "--preset", str(preset), "--documents"])
    assert result.exit_code == 2 and "omit --preset" in result.output


@pytest.mark.slow
def test_every_form_of_sparse_attention_is_measured() -> None:
    indexer = {"selection_loss": 0.05, "indexer_block": 4, "indexer_keys": "shared", "indexer_every": 2}
    for form in (
        {"branches": ("sel",), "indexer_dtype": "fp8", **indexer},
        {"branches": ("sel", "win"), "shared_kv": True, "indexer_dtype": "mxfp4", **indexer},
    ):
        model = ModelConfig.model_validate({**SMALL.model_dump(), **form})
        (row,) = training_speed.run_train_bench(((64, 2),), steps=1, model=model)["rows"]
        assert row["ratio"] > 0 and row["nsa"]["flops_6n"] > 0, form


def test_plot_has_one_line_per_model_and_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    speeds = {"nsa": {"tokens_per_s": 2.0}, "dense": {"tokens_per_s": 1.0}}
    rows = [{"seq_len": T, "micro_batch": n, "ratio": 2.0, **speeds} for T, n in ((2048, 4), (8192, 1), (2048, 1))]
    training_speed.plot_speeds({"rows": rows, "device": "d", "when": "2026-01-01T00:00:00"}, tmp_path / "x.png")
    lines = drawn[0].axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[2048, 8192], [2048, 8192], [2048], [2048]]
    assert len({line.get_label() for line in lines}) == 4


def test_unusable_shapes_are_rejected() -> None:
    assert parse_training_shape("2048x32") == (2048, 32)
    for text in ("2048", "0x4", "2048x", "axb", "2147483648x1", "2048x262145", f"{'9' * 5000}x1"):
        with pytest.raises(ValueError, match="expected tokens x sequences"):
            parse_training_shape(text)


@looped
@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nsa_selected_gather", "selected"),
        ("nsa_selected_sum", "selected"),
        ("nsa_selected_index_count", "selected"),
        ("nsa_compressed_forward", "compressed"),
        ("nsa_window_dkv", "window"),
        ("nsa_block_topk", "block choice"),
        ("nsa_gate_backward", "gated sum"),
        ("nvjet_tst_128x256_64x4", "gemm"),
        ("sm90_xmma_gemm_bf16", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel", "dense attention"),
        ("multi_tensor_apply_kernel", "optimiser"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("triton_poi_fused_add_mul_3", "elementwise"),
    ],
)
def test_kernels_are_classified_by_name(kernel: str, part: str) -> None:
    assert step_breakdown.classify_kernel(kernel) == part


def test_concurrent_kernels_share_time_and_gaps_are_idle() -> None:
    kernels = [("gemm", 0.0, 4.0), ("selected", 2.0, 6.0), ("gemm", 5.0, 6.0), ("copy", 8.0, 9.0)]
    expected = {"gemm": 2 + 1 + 0.5, "selected": 1 + 1 + 0.5, "idle": 2.0, "copy": 1.0}
    assert step_breakdown._sum_time_by_part(reversed(kernels)) == pytest.approx(expected)


def test_communication_counts_only_where_nothing_hides_it() -> None:
    kernels = [("communication", 0.0, 5.0), ("gemm", 1.0, 3.0), ("copy", 2.0, 3.0), ("communication", 7.0, 8.0)]
    expected = {"communication": 1 + 2 + 1, "gemm": 1.5, "copy": 0.5, "idle": 2.0}
    assert step_breakdown._sum_time_by_part(kernels) == pytest.approx(expected)


def test_profiling_a_step_does_not_warn_of_dropped_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_WARNINGS_SHOWN", set(), raising=False)  # torch warns once per process
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recorded = timing.make_profiler()
        for _ in range(2):  # some versions of torch warn in the first cycle, others in the second
            with recorded:
                torch.ones(3).sum()
    assert not [warning for warning in said if "clears events" in str(warning.message)]
    assert any(event.name == "aten::sum" for event in recorded.events())


COMPILED = loss_curves.Execution("torch, compiled", "torch", compile=True)  # a C++ compiler, slow


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param((COMPILED,), marks=pytest.mark.nightly)], ids=["eager", "compiled"])
def test_executions_of_one_configuration_stay_within_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[loss_curves.Execution, ...]
) -> None:
    executions = (*loss_curves.CPU_EXECUTIONS, *more)
    monkeypatch.setattr(loss_curves, "CPU_EXECUTIONS", executions)
    report = loss_curves.run_curves(30, tmp_path / "curves.json", tmp_path / "curves.png", model=SMALL, seq_len=64, batch=2)
    assert list(report["curves"]) == [execution.name for execution in executions]
    assert report["ok"] and max(report["apart_nats"].values()) < 1e-3, "only float32 rounding"
    assert report["curves"]["torch, eager"][-1] < report["curves"]["torch, eager"][0]
    assert json.loads((tmp_path / "curves.json").read_text())["ok"] and (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.slow
def test_an_execution_with_another_loss_exceeds_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = loss_curves.compute_loss_curve

    def drifting(execution: loss_curves.Execution, steps: int, **other: object) -> list[float]:
        drift = 2 * loss_curves.MAX_DIFFERENCE if execution.backend == "torch" else 0.0
        return [loss + drift * step / steps for step, loss in enumerate(honest(execution, steps, **other))]

    monkeypatch.setattr(loss_curves, "compute_loss_curve", drifting)
    assert not loss_curves.run_curves(10, model=SMALL, seq_len=64, batch=1)["ok"]


@pytest.mark.slow
def test_compared_models_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int]] = []

    class Run:
        def __init__(self, config: str) -> None:
            self.name, self.seconds = config, iter([4.0, 1.0, 3.0, 2.0])

        def time_steps(self, steps: int) -> float:
            taken.append((self.name, steps))
            return next(self.seconds)

        def make_measurement(self, step_s: float) -> tuple[str, float]:
            return self.name, step_s

    monkeypatch.setattr(training_speed._TimedRun, "create_warmed_up", Run)
    found = training_speed.measure_configs({"NSA": "a", "dense": "b"}, 20)
    assert taken == [("a", 5), ("b", 5)] * 4 and found == {"NSA": ("a", 2.5), "dense": ("b", 2.5)}


def test_documents_per_row_and_matmul_flops(monkeypatch):
    tokens = torch.tensor([[255, 1, 2, 255, 3, 4, 255, 5], [255, 1, 1, 1, 1, 1, 1, 1]])
    found = training_speed._compute_documents_per_row([Batch(tokens, tokens, None, locate_documents(tokens.numpy(), 255))])
    assert found == 2.0
    monkeypatch.setattr(timing, "_time_once_ms", lambda run, device: 1e3)
    assert timing.measure_matmul_flops_per_s(torch.device("cpu"), torch.float32) == 2 * 1024**3 * 3


def test_the_matmul_rate_is_that_of_the_fastest_round(monkeypatch):
    """Regression (26 November): one slow round gave 94 TFLOP/s on a GPU of 790, and shares of 478%."""
    took = iter((8e3, 1e3, 2e3, 3e3))
    monkeypatch.setattr(timing, "_time_once_ms", lambda run, device: next(took))
    assert timing.measure_matmul_flops_per_s(torch.device("cpu"), torch.float32) == 2 * 1024**3 * 3


@pytest.mark.slow
def test_dense_and_actual_flops_differ_for_nsa():
    row = training_speed.run_train_bench(((128, 2),), steps=4)["rows"][0]
    assert row["dense"]["flops_6n"] == row["dense"]["flops_actual"]
    flops = NSATransformer(training_speed.CPU_MODEL).flops_per_token(128)
    assert row["nsa"]["flops_6n"] / row["nsa"]["tokens_per_s"] == pytest.approx(flops["dense"])
    assert row["nsa"]["flops_6n"] != row["nsa"]["flops_actual"]
