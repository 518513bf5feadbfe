"""The attention benchmark: a parity check before speed, and no time for a part that fails it."""

from __future__ import annotations

import json

import pytest
import torch
from looping import looped
from rich.console import Console

from nsa_lab.attention import resolve_backend, torch_backend
from nsa_lab.bench import attention_parity
from nsa_lab.bench.attention_parts import SELECTION_KINDS, make_parts, make_selection
from nsa_lab.bench.attention_rows import CPU_SHAPES, Shape, parse_shape
from nsa_lab.bench.attention_speed import run_attention_bench
from nsa_lab.bench.roofline import read_rows
from nsa_lab.bench.timing import describe_refusal
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
LARGEST = NSA.model_copy(update={"head_reduction": "max", "block_reduction": "max"})
INDEXER = {"selection_loss": 0.05, "selection_queries": 20}
FORMS = {
    "compressed scores": ModelConfig(selection_loss=0.05, nsa=NSA),
    "indexer": ModelConfig(
        branches=("sel", "win"),
        **INDEXER,
        indexer_block=1,
        indexer_heads=2,
        indexer_keys="shared",
        indexer_dtype="fp8",
        nsa=NSA,
    ),
    "one branch": ModelConfig(
        branches=("sel",), **INDEXER, indexer_block=4, indexer_width=32, indexer_dtype="mxfp4", nsa=LARGEST
    ),
    "shared keys and values": ModelConfig(shared_kv=True, **INDEXER, indexer_block=2, nsa=NSA),
    "mean keys": ModelConfig(
        branches=("sel", "win"), selection_loss=0.05, nsa=NSA.model_copy(update={"scores": "mean_key"})
    ),
    "window": ModelConfig(branches=("win",), nsa=NSA),
}


def bench(tmp_path, shapes=CPU_SHAPES, **options):
    with (tmp_path / "table.txt").open("w") as table:
        return run_attention_bench(
            shapes,
            tmp_path / "bench.json",
            device="cpu",
            backend="torch",
            **{"nsa": NSA, **options},
            console=Console(file=table, width=200),
        )


@pytest.mark.slow
def test_every_part_is_checked_timed_and_recorded(tmp_path):
    rows = bench(tmp_path, picture=tmp_path / "bench.png")
    parts = {row.part for row in rows}
    assert parts >= {"dense", "compressed", "choice", "window", "gate", "whole"}
    assert parts >= {f"selected, {kind}" for kind in SELECTION_KINDS}
    for row in rows:
        assert row.forward_ms > 0 and not row.note
        assert row.part == "dense" or row.parity
    recorded = json.loads((tmp_path / "bench.json").read_text())
    assert len(recorded["rows"]) == len(rows) and recorded["machine"]["torch"] == torch.__version__
    assert (tmp_path / "bench.png").stat().st_size > 0


@pytest.mark.slow
@looped
@pytest.mark.parametrize("form", FORMS)
def test_the_parts_of_a_model_pass_parity(form):
    """In float32 and bfloat16, for a sequence with and without free blocks."""
    model = FORMS[form]
    for dtype in (torch.float32, torch.bfloat16):
        backends = resolve_backend("cpu", dtype, model.nsa, model, "torch")
        for tokens in (7, 150):
            parts = make_parts(tokens, 1, 4, 2, 16, model.nsa, backends, "cpu", dtype, model=model)
            names = [part.name for part in parts]
            assert names[-1] == "whole" and ("gate" in names) == (len(model.branches) > 1)
            assert ("selection loss" in names) == model.has_selection_loss and ("choice" in names) == bool(model.scores)
            for part in parts:
                errors, is_correct = attention_parity.check_parity(part, part, model.nsa)
                assert is_correct, (dtype, tokens, part.name, errors)


def test_a_wrong_selection_or_loss_of_an_indexer_fails_parity(monkeypatch):
    """Without the rounding of the keys, other blocks are selected, and the loss is another."""
    model = FORMS["indexer"]
    backends = resolve_backend("cpu", torch.float32, NSA, model, "torch")
    parts = make_parts(300, 1, 4, 2, 16, NSA, backends, "cpu", torch.float32, model=model)
    monkeypatch.setattr("nsa_lab.bench.attention_parity.prepare_index_keys", lambda k, model, G: k.expand(-1, -1, G, -1))
    failed = {part.name for part in parts if not attention_parity.check_parity(part, part, NSA)[1]}
    assert failed == {"choice", "selection loss"}


@pytest.mark.slow
def test_a_preset_is_timed_and_its_record_is_read(tmp_path):
    rows = bench(tmp_path, (Shape(70, 1, 4, 2, 16),), model=FORMS["indexer"], parts=True)
    parts = [row.part for row in rows]
    selected = [f"selected, {kind}" for kind in SELECTION_KINDS]
    assert parts == ["dense", "choice", "selection loss", *selected, "window", "gate", "whole"]
    assert all(row.forward_ms and not row.note and row.limits for row in rows)
    assert rows[-1].share_fastest == pytest.approx(rows[-1].total_ms / rows[0].total_ms)
    recorded = json.loads((tmp_path / "bench.json").read_text())
    assert [row.limits for row in read_rows(recorded)[0]] == [row["limits"] for row in recorded["rows"]]
    with pytest.raises(ConfigError, match="expected nsa"):
        bench(tmp_path, model=ModelConfig(attention="dense"))


@pytest.mark.slow
def test_values_may_be_narrower_than_keys(tmp_path):
    narrower, alike = Shape(70, 1, 4, 2, 48, 16), Shape(70, 1, 4, 2, 48)
    wide, same = ({row.part: row for row in bench(tmp_path, (shape,))} for shape in (narrower, alike))
    assert wide.keys() == same.keys() and all(row.forward_ms and not row.note for row in wide.values())
    assert wide["whole"].shape == "70x1 H4 G2 d48/16"
    flops = {part: wide[part].tflops_forward * wide[part].forward_ms for part in ("dense", "choice", "window")}
    of_same = {part: same[part].tflops_forward * same[part].forward_ms for part in flops}
    # A score costs the key width, a weighted value the value width.
    assert flops["choice"] == pytest.approx(of_same["choice"])
    assert flops["dense"] == pytest.approx(of_same["dense"] * 64 / 96) and flops["window"] == pytest.approx(
        of_same["window"] * 64 / 96
    )


@pytest.mark.parametrize(("scores", "rows"), [(2**27, 50), (4 * 50 * 20, 20), (1, 16)])
def test_the_number_of_checked_last_rows_is_limited_by_memory(scores, rows, monkeypatch):
    """Few rows would be unfair to plain attention, whose matrix products of few rows have a smaller error."""
    computed, masked = [], attention_parity._attend_masked

    def counted(q, k, v, seen):
        computed.append((q.dtype, q.shape[1], seen.shape[1]))
        return masked(q, k, v, seen)

    monkeypatch.setattr(attention_parity, "_MAX_SCORES", scores)
    monkeypatch.setattr(attention_parity, "_attend_masked", counted)
    asked = [part for part in parts_of(50) if part.name.startswith(("selected", "window"))]  # over 50 keys
    for part in asked:
        error, allowed = attention_parity._compare_last_rows(part, NSA)
        assert error <= allowed < 1e-5  # wrong rows would have a far larger error
    assert computed == [(torch.float32, rows, rows), (torch.float64, rows, rows)] * len(asked) and asked


def test_a_sequence_without_a_full_block_passes():
    """Compressed attention then has no keys, and its output is zero."""
    short = parts_of(NSA.l - 1)
    assert short[0].name == "compressed" and short[0].inputs[1].shape[1] == 0
    for part in short:
        told, passed = attention_parity.check_parity(part, part, NSA)
        assert passed, told


def parts_of(tokens):
    choices = resolve_backend("cpu", torch.float32, NSA, backend="torch")
    return make_parts(tokens, 1, 4, 2, 16, NSA, choices, "cpu", torch.float32)


def test_a_baseline_that_does_not_run_is_noted_and_the_rest_is_timed(tmp_path, monkeypatch):
    def refusing(shape, device, dtype):
        def run(q, k, v):
            raise RuntimeError("no kernel for these heads\nat line 7")

        yield "SDPA math", run, [torch.zeros(1, 1, 3, 32, requires_grad=True)] * 3

    monkeypatch.setattr("nsa_lab.bench.baselines.list_dense", refusing)
    rows = {row.part: row for row in bench(tmp_path)}
    assert rows["dense"].note == "does not run: no kernel for these heads" and rows["dense"].forward_ms is None
    assert rows["whole"].forward_ms > 0 and rows["whole"].share is None


def test_a_device_fault_is_raised():
    assert describe_refusal(RuntimeError()) == "does not run: RuntimeError"
    warned = ["Flash kernel not used because: (Triggered at a)", "heads differ: 64 and 4. (Triggered at b)"]
    assert describe_refusal(RuntimeError("No kernel."), warned) == "does not run: heads differ: 64 and 4. (Triggered at b)"
    assert describe_refusal(
        RuntimeError("No kernel."), [warned[0], "cuDNN has been runtime disabled. (Triggered at c)"]
    ).endswith("No kernel.")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        describe_refusal(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.slow
def test_an_interrupted_benchmark_keeps_its_results(tmp_path, monkeypatch):
    honest = torch_backend.window_attention

    def breaks(q, *inputs, **options):
        if q.shape[1] == 71:
            raise KeyboardInterrupt
        return honest(q, *inputs, **options)

    monkeypatch.setattr(torch_backend, "window_attention", breaks)
    shapes = (Shape(70, 1, 4, 2, 16), Shape(71, 1, 4, 2, 16), Shape(72, 1, 4, 2, 16))
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, shapes, with_baselines=False)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert {row["shape"] for row in kept["rows"]} == {"70x1 H4 G2 d16"}
    assert kept["not_measured"] == ["71x1 H4 G2 d16", "72x1 H4 G2 d16"]
    monkeypatch.undo()
    bench(tmp_path, shapes[:2], with_baselines=False)
    whole = json.loads((tmp_path / "bench.json").read_text())
    assert "not_measured" not in whole and len({row["shape"] for row in whole["rows"]}) == 2
    assert (tmp_path / "table.txt").read_text().count("NSA attention: ms") == 2


def test_what_fails_parity_gets_no_speed(tmp_path, monkeypatch):
    honest = torch_backend.window_attention

    def one_key_more(q, k, v, nsa):
        return honest(q, k, v, nsa.model_copy(update={"w": nsa.w + 1}))

    monkeypatch.setattr(torch_backend, "window_attention", one_key_more)
    rows = {row.part: row for row in bench(tmp_path, with_baselines=False)}
    for part in ("window", "whole"):
        assert "FAILED PARITY" in rows[part].note and rows[part].forward_ms is None
    assert rows["compressed"].forward_ms is not None


@pytest.mark.parametrize("kind", ["random", "smooth", "sink"])
def test_artificial_selections_are_valid(kind):
    blocks = make_selection(kind, 2, 100, 2, NSA, torch.device("cpu"))
    own = torch.arange(100) // NSA.l_sel
    assert blocks.shape == (2, 100, 2, NSA.n_sel) and blocks.dtype == torch.int32
    assert (blocks == own[None, :, None, None]).any(-1).all() and (blocks <= own[None, :, None, None]).all()
    assert ((blocks[..., 1:] > blocks[..., :-1]) | (blocks[..., 1:] < 0)).all()


def test_shapes_are_parsed_or_rejected():
    assert parse_shape("2048x8") == Shape(2048, 8)
    assert parse_shape("32768x1xH64xG4xD128") == Shape(32768, 1, 64, 4, 128)
    assert parse_shape("32768x1xH64xG4xD192xV128") == Shape(32768, 1, 64, 4, 192, 128)
    model = ModelConfig(n_heads=6, n_kv_groups=3, d_k=32, d_v=16)
    assert parse_shape("2048x8", model) == Shape(2048, 8, 6, 3, 32, 16)
    assert parse_shape("2048x8xH4xG2xD16", model) == Shape(2048, 8, 4, 2, 16)
    assert str(Shape(32768, 1, 64, 4, 192, 128)) == "32768x1 H64 G4 d192/128" and Shape(9, 1).value_width == 64
    assert parse_shape("2147483647x262144") == Shape(2**31 - 1, 2**18)
    for text in ("2048", "0x8", "2147483648x1", "2048x262145", "2048x1xH262145xG1xD64", f"{'9' * 5000}x1"):
        with pytest.raises(ValueError, match="TOKENSxSEQUENCES") as caught:
            parse_shape(text)
        assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match=r"a multiple of G \(groups\), got 5 and 3; change"):
        parse_shape("64x1xH5xG3xD64xV64")
