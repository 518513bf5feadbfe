"""Minimum time of each part of attention, and the command that reports it for a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from looping import looped
from typer.testing import CliRunner

from nsa_lab.attention import resolve_backend
from nsa_lab.bench import roofline as limits
from nsa_lab.bench.attention_parts import make_parts
from nsa_lab.bench.attention_rows import AttentionRow, Shape, parse_shape_label
from nsa_lab.bench.attention_speed import run_attention_bench
from nsa_lab.bench.roofline import Rates, Work, count_work
from nsa_lab.cli import app
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
SHAPE = Shape(70, 2, 4, 2, 48, 16)
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
BRANCHES = ("compressed", "selected", "window")
MODEL = ModelConfig(nsa=NSA)
# The form of long_64k, small.
LEAN = ModelConfig(
    branches=("sel", "win"),
    selection_loss=0.05,
    selection_queries=20,
    indexer_block=1,
    indexer_heads=2,
    indexer_keys="shared",
    indexer_dtype="fp8",
    nsa=NSA,
)


LEAN_PARTS = ["choice", "selection loss", "selected, real", "window", "gate", "whole"]
FORMS = {
    "compressed scores": (MODEL, ["compressed", "choice", "selected, real", "window", "gate", "whole"]),
    "indexer": (LEAN, LEAN_PARTS),
    "shared keys and values": (LEAN.model_copy(update={"shared_kv": True}), LEAN_PARTS),
    "mean keys": (
        ModelConfig(branches=("sel",), nsa=NSA.model_copy(update={"scores": "mean_key"})),
        ["choice", "selected, real", "whole"],
    ),
}


@looped
@pytest.mark.parametrize(("form", "name"), [(form, name) for form, (_, names) in FORMS.items() for name in names])
def test_work_counts_every_input_and_result_once(form, name):
    """Compare with the tensors of the benchmark, and its useful FLOPs with the pairs of the definition."""
    model = FORMS[form][0]
    sizes = (
        SHAPE.H,
        SHAPE.G,
        SHAPE.D,
        model.nsa,
        resolve_backend("cpu", torch.float32, model.nsa, model, backend="torch"),
        "cpu",
        torch.float32,
    )
    parts = {p.name: p for p in make_parts(SHAPE.T, SHAPE.B, *sizes, Dv=SHAPE.value_width, model=model)}
    part = parts[name]
    out = part.run(*part.inputs)
    # Branches that share keys and values read them once.
    stored = {x.data_ptr(): x.numel() * x.element_size() for x in part.inputs}
    moved = sum(stored.values()) + out.numel() * out.element_size()
    lse = out.numel() // SHAPE.value_width * 4 if name.split(",")[0] in BRANCHES else 0
    forward, backward = count_work(name, SHAPE, model, 4)
    if name == "selection loss":  # all queries are sampled if there are few
        every, _ = count_work(name, SHAPE, model.model_copy(update={"selection_queries": SHAPE.T}), 4)
        assert every.bytes == moved - out.element_size() and forward.bytes < every.bytes
        attention_scores = 2 * SHAPE.D * SHAPE.H * SHAPE.B * sum(range(1, SHAPE.T + 1))
        assert every.flops == pytest.approx(parts["choice"].useful_flops + attention_scores)
        assert forward.flops == pytest.approx(every.flops * model.selection_queries / SHAPE.T)
        return
    flops = part.useful_flops
    if name == "whole" and model.scores == "compressed":  # the scores, also used for selection, count once
        flops -= count_work("choice", SHAPE, model, 4)[0].flops
    assert tuple(forward) == pytest.approx((flops, moved + lse))
    if name == "choice":
        assert backward is None
        return
    # Integer inputs have no gradient.
    grads = sum(x.numel() * 4 for x in part.inputs if x.is_floating_point())
    assert backward is not None
    if name in ("compressed", "window"):
        assert backward == pytest.approx(Work(2.5 * part.useful_flops, forward.bytes + grads + out.numel() * 4))
    if name == "gate":
        assert backward.bytes == grads + moved


def test_dense_attention_reads_all_keys():
    forward, _ = count_work("dense", SHAPE, MODEL, 2)
    assert forward.flops == 2 * (48 + 16) * 2 * 4 * sum(range(1, 71))
    wide, _ = count_work("dense, values of 48", SHAPE, MODEL, 2)
    assert wide.flops == forward.flops * 96 / 64
    with pytest.raises(ValueError, match="part 'norm': expected dense, compressed"):
        count_work("norm", SHAPE, MODEL, 2)


def test_the_slower_of_arithmetic_and_memory_is_the_limit():
    rates = Rates(flops=1e12, bytes=1e11)
    assert rates.compute_min_ms(Work(2e9, 1e8)) == (2.0, "arithmetic")
    assert rates.compute_min_ms(Work(2e9, 3e8)) == (3.0, "memory")
    assert Rates(1e12, None).compute_min_ms(Work(2e9, 3e8)) == (2.0, "arithmetic")


def test_a_share_is_minimum_over_measured_time():
    rows = [
        AttentionRow("70x2 H4 G2 d48/16", "dense", "SDPA", 1.0, 4.0),
        AttentionRow("70x2 H4 G2 d48/16", "gate", "torch", note="refused"),
    ]
    rates = Rates(count_work("dense", SHAPE, MODEL, 2)[0].flops * 2e3, None)  # half a millisecond
    (row,) = limits.add_limits(rows, {rows[0].shape: SHAPE}, MODEL, 2, rates)
    assert row.limits["forward"]["share"] == pytest.approx(0.5)
    assert row.limits["backward"]["share"] == pytest.approx(0.5 * 2.5 / 4)


@pytest.mark.parametrize("factor, told", [(0.99, False), (1.01, True)])
def test_a_share_above_one_is_reported(factor, told):
    row = AttentionRow("70x2 H4 G2 d48/16", "dense", "SDPA", 1.0, None)
    rates = Rates(count_work("dense", SHAPE, MODEL, 2)[0].flops * 1e3 / factor, None)
    rows = limits.add_limits([row], {row.shape: SHAPE}, MODEL, 2, rates)
    assert ("above 100%" in str(limits.make_limit_table(rows, rates).caption)) == told


@pytest.mark.parametrize("shape", [SHAPE, Shape(2048, 8), Shape(32768, 1, 64, 4, 128)], ids=str)
def test_a_shape_label_round_trips(shape):
    assert parse_shape_label(str(shape)) in (shape, Shape(shape.T, shape.B, shape.H, shape.G, shape.D, shape.value_width))
    with pytest.raises(ValueError, match="expected 2048x8, or"):
        parse_shape_label("2048 by 8")


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": rows} for rows in ({"x": 1}, [1], [[]], [{}], None)),
        {"rows": [{"shape": "2048 by 8", "part": "dense", "by": "SDPA"}]},
        {"rows": [{"shape": "0x8", "part": "dense", "by": "SDPA"}]},
        {"rows": [{"shape": "2048x8", "part": "norm", "by": "SDPA", "forward_ms": 1.0}]},
        {"rows": [{"shape": "2048x8", "part": "dense", "by": "SDPA", "forward_ms": "slow"}]},
        {"rows": [{"shape": "2048x8", "part": "dense", "by": "SDPA", "tokens": 3}]},
        {"rates": [1]},
        {"rates": {"flops": "many"}},
        {"rates": {"flops": 0}},
        {"dtype": "torch.nn"},
        {"dtype": None},
        {"device": 1},
        {"nsa": 3},
        {"nsa": {"l": 0}},
        {"model": []},
    ],
    ids=str,
)
def test_a_damaged_record_is_reported_in_one_line(change):
    record = json.loads((DOCS / "attention-h200.json").read_text())
    limits.read_rows(record)
    with pytest.raises(ConfigError) as refused:
        limits.read_rows(record | change)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_parts_prints_the_device_limits(tmp_path, capsys):
    file = tmp_path / "bench.json"
    run_attention_bench((SHAPE,), file, device="cpu", backend="torch", nsa=NSA, parts=True)
    assert "Fraction of the device limit" in capsys.readouterr().out
    rows, rates = limits.read_rows(json.loads(file.read_text()))
    assert rates.flops > 1e8 and rates.bytes is None
    assert all(0 < row.limits["forward"]["share"] < 1 for row in rows if row.part != "gate")
    with pytest.raises(ConfigError, match="is unknown for this device"):
        limits.plot_roofline(rows, rates, "here", tmp_path / "roof.png")


@pytest.mark.slow
def test_the_command_reads_a_record(tmp_path):
    say, record, picture = CliRunner(), str(DOCS / "attention-h200.json"), tmp_path / "roof.png"
    told = say.invoke(
        app, ["bench", "limits", record, "--flops", "8e14", "--bandwidth", "4.8e12", "--picture", str(picture)]
    )
    assert told.exit_code == 0 and "800 TFLOP/s, 4.8 TB/s" in told.output and picture.stat().st_size > 0
    own = say.invoke(app, ["bench", "limits", record])
    assert own.exit_code == 0 and "782.8 TFLOP/s, 4.8 TB/s" in own.output
    found = json.loads(Path(record).read_text())
    without = tmp_path / "without.json"
    without.write_text(json.dumps({key: value for key, value in found.items() if key != "rates"}))
    silent = say.invoke(app, ["bench", "limits", str(without)])
    memory_alone = say.invoke(app, ["bench", "limits", str(without), "--bandwidth", "3e12"])
    assert memory_alone.exit_code != 0
    found["rates"] = {"flops": 5e14, "bytes": 3e12}
    assert limits.read_rows(found)[1] == Rates(5e14, 3e12)
    assert limits.read_rows(found, flops=8e14)[1] == Rates(8e14, 3e12)
    assert limits.read_rows(found, bandwidth=4e12)[1] == Rates(5e14, 4e12)
    assert silent.exit_code != 0 and "give --flops and --bandwidth" in str(silent.exception or silent.output)
    other = say.invoke(app, ["bench", "limits", str(DOCS / "decode-h200.json"), "--flops", "1e12"])
    assert other.exit_code != 0 and "a record of `nsa-lab bench attention`" in str(other.exception or other.output)
