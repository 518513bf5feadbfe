"""The decode benchmark: a parity check before speed, NSA and dense attention, bytes by the formula."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from nsa_lab.attention.key_storage import decode_keys
from nsa_lab.bench import decode_attention, decode_parity, decode_speed
from nsa_lab.bench.harness import PARITY_FAILED
from nsa_lab.cli import app
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RunConfig
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache import attention_cache
from nsa_lab.model import NSATransformer

CONFIG = ModelConfig(dim=24, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13))


def bench(tmp_path, **options):
    console = Console(file=(tmp_path / "table.txt").open("w"), width=200)
    small = {"layers": 1, "device": "cpu", "config": CONFIG, "heads": decode_speed.HeadSizes(4, 2, 8)}
    return decode_speed.run_decode_bench(
        [300, 97], tmp_path / "bench.json", batches=[1, 2], console=console, **small, **options
    )


@pytest.mark.slow
def test_both_levels_are_checked_timed_compared_and_recorded(tmp_path):
    rows = bench(tmp_path, picture=tmp_path / "bench.png")
    assert len(rows) == 2 * 2 * 2 * 2 and all(row.ms > 0 for row in rows)
    recorded = json.loads((tmp_path / "bench.json").read_text())
    assert recorded["parity"]["passed"] and len(recorded["rows"]) == len(rows) and "commit" in recorded["code"]
    by_place = {(row.level, row.batch, row.tokens, row.by): row for row in rows}
    for (level, batch, tokens, by), row in by_place.items():
        assert row.of_dense == row.ms / by_place[level, batch, tokens, "dense"].ms
        assert row.of_shortest == row.ms / by_place[level, batch, 97, by].ms
        one = CONFIG.model_copy(update={"n_layers": 1, "attention": by})
        assert row.read_bytes == batch * kv_cache_size.compute_read_bytes(one, tokens, 4)
        assert row.read_of_dense == row.read_bytes / by_place[level, batch, tokens, "dense"].read_bytes
    assert (tmp_path / "bench.png").stat().st_size > 0


def test_what_fails_parity_gets_no_speed(tmp_path, monkeypatch):
    honest = decode_attention.cached_attention

    def one_key_fewer(q, gates, cache, lengths, nsa, **options):
        return honest(q, gates, cache, lengths, nsa.model_copy(update={"w": nsa.w - 1}), **options)

    monkeypatch.setattr(decode_attention, "cached_attention", one_key_fewer)
    rows = bench(tmp_path)
    operator = {row.by: row for row in rows if row.level.startswith("operator") and row.batch == 1}
    assert operator["nsa"].ms is None and operator["dense"].ms > 0
    assert "FAILED PARITY" in (tmp_path / "table.txt").read_text()


@pytest.mark.slow
def test_an_error_only_in_the_last_sequence_gets_no_speed(tmp_path, monkeypatch):
    """Each timed size is checked on its last sequence."""
    honest = decode_attention.cached_attention

    def wrong_at_the_end(q, *given, **options):
        out = honest(q, *given, **options)
        out[-1] += 1e-3 * (len(q) == 2)
        return out

    monkeypatch.setattr(decode_attention, "cached_attention", wrong_at_the_end)
    rows = [row for row in bench(tmp_path) if row.level.startswith("operator")]
    failed = {(row.by, row.batch) for row in rows if row.ms is None}
    assert failed == {("nsa", 2)} and len(rows) == 8


def test_the_fastest_correct_dense_attention_is_reported(tmp_path, monkeypatch):
    plain = decode_attention._compute_plain_dense

    def refused(q, k, v):
        warnings.warn("unlike numbers of heads", stacklevel=1)
        raise RuntimeError("No available kernel.")

    def five_ways(step):
        yield "slower", plain
        yield "right", plain
        yield "wrong", lambda q, k, v: q
        yield "none", lambda q, k, v: q.view(1)
        yield "refused", refused

    monkeypatch.setattr(decode_attention, "list_dense_attentions", five_ways)
    monkeypatch.setattr(decode_attention, "time_interleaved_ms", lambda runs, device: {by: len(by) for by in runs})
    dense = [row for row in bench(tmp_path) if row.level.startswith("operator") and row.by == "dense"]
    for row in dense:
        assert (row.kernel, row.ms) == ("right", 5) and row.error <= row.limit and row.others["slower"] == 6
        assert row.others["wrong"].startswith("FAILED PARITY") and row.others["none"].startswith("does not run")
        assert row.others["refused"] == "does not run: unlike numbers of heads"


@pytest.mark.parametrize("way", ["grouped", "its own", pytest.param("kernels", marks=pytest.mark.slow)])
def test_every_dense_implementation_equals_plain_attention(way):
    """The implementations for a GPU, on this machine's device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = decode_attention.QueryStep(decode_speed.HeadSizes(6, 2, 16), CONFIG.nsa, 133, 3, torch.float32, device)
    if way == "kernels":
        attend = decode_attention._make_dense_kernel(step)
    else:
        attend = decode_attention._make_sdpa(SDPBackend.MATH, grouped=way == "grouped")
    q, k, v = step.make_dense_inputs()
    for laid_out in ((k, v), (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))):
        torch.testing.assert_close(attend(q, *laid_out), decode_attention._compute_plain_dense(q, k, v), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float32, "torch"),
        (torch.bfloat16, "torch"),
        pytest.param(torch.float16, "triton", marks=pytest.mark.slow),
    ],
)
def test_the_backends_pass_parity(dtype, backend):
    device = torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    found = decode_speed.check_decode_parity(decode_speed.HeadSizes(12, 2, 64), NSAConfig(), dtype, device, backend)
    assert found["passed"], found


def a_step(batch=2):
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)
    return decode_attention.QueryStep(decode_speed.HeadSizes(4, 2, 8), nsa, 97, batch, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_nan_gets_no_speed(kind, monkeypatch):
    honest = decode_attention.cached_attention
    if kind == "nsa":
        monkeypatch.setattr(decode_attention, "cached_attention", lambda *a, **k: honest(*a, **k) * float("nan"))
    else:
        ways = [("nan", lambda q, k, v: q * float("nan"))]
        monkeypatch.setattr(decode_attention, "list_dense_attentions", lambda step: iter(ways))
    (found, *_) = [one for one in decode_attention.time_contenders(a_step(), "torch") if one.kind == kind]
    assert found.note == PARITY_FAILED and found.ms is None


def test_without_parity_nsa_has_no_speed():
    nsa, *dense = decode_attention.time_contenders(a_step(), "torch", has_passed=False)
    assert nsa.note == PARITY_FAILED and nsa.ms is None and dense[0].ms > 0


def test_warnings_of_a_kernel_that_runs_are_shown(monkeypatch):
    def loud(q, k, v):
        warnings.warn("slow here", UserWarning, stacklevel=1)
        return decode_attention._compute_plain_dense(q, k, v)

    monkeypatch.setattr(decode_attention, "list_dense_attentions", lambda step: iter([("loud", loud)]))
    monkeypatch.setattr(decode_attention, "time_interleaved_ms", lambda runs, device: dict.fromkeys(runs, 1.0))
    with pytest.warns(UserWarning, match="slow here"):
        decode_attention.time_contenders(a_step(), "torch")


def test_the_error_is_that_of_the_worst_sequence():
    step = a_step(3)
    inputs = step.make_sparse_inputs()
    out = decode_attention.cached_attention(*inputs, step.nsa, backend="torch")
    out[0] += 1.0
    error, limit = decode_attention.compute_errors(out, inputs, step.nsa, range(3))
    assert error > 0.9 > limit


INDEXER = {"selection_loss": 0.05, "indexer_block": 4, "indexer_keys": "shared"}
FORMS = {
    "all branches": {},
    "selected only, fp8 index keys": {"branches": ("sel",), "indexer_dtype": "fp8", "indexer_every": 2, **INDEXER},
    "shared keys, MXFP4 index keys": {"branches": ("sel", "win"), "shared_kv": True, "indexer_dtype": "mxfp4", **INDEXER},
    "n-grams, shifted keys": {"branches": ("sel",), "matching_heads": 1, "ngrams": 3, "ngram_rows": 64, **INDEXER},
}


def make_form(name):
    return ModelConfig.model_validate({**CONFIG.model_dump(), "n_layers": 3, **FORMS[name]})


def run_preset(tmp_path, model, *words):
    """Run `bench decode --preset` on a CPU; return its result and its record, if there is one."""
    preset, file = tmp_path / "form.yaml", tmp_path / "decode.json"
    preset.write_text(RunConfig(name="form", model=model).to_yaml())
    command = [
        "bench",
        "decode",
        "--device",
        "cpu",
        "--preset",
        str(preset),
        "--length",
        "600",
        "--json",
        str(file),
        *words,
    ]
    result = CliRunner().invoke(app, command)
    return result, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_preset_is_timed_with_its_planned_bytes(form, tmp_path):
    model = make_form(form)
    result, record = run_preset(tmp_path, model, "--batch", "2")
    assert result.exit_code == 0, result.output
    nsa, dense = record["rows"]
    configs = {"nsa": model, "dense": model.model_copy(update={"attention": "dense"})}
    for row in (nsa, dense):
        config = configs[row["by"]]
        assert row["ms"] > 0 and row["level"] == "model, 3 layers" and record["parity"][row["by"]]["passed"]
        assert row["read_bytes"] == 2 * kv_cache_size.compute_read_bytes(config, 600, 4)
        assert row["cached_bytes"] == kv_cache_size.compute_sequence_bytes(config, 600, 4)
        assert row["read_of_dense"] == row["read_bytes"] / dense["read_bytes"]
        assert row["cached_of_dense"] == row["cached_bytes"] / dense["cached_bytes"]
    assert nsa["of_dense"] == nsa["ms"] / dense["ms"]
    assert record["model"] == json.loads(model.model_dump_json()) and record["baseline"]["attention"] == "dense"
    assert "cached/dense" in result.output and f"{nsa['cached_of_dense']:.3f}" in result.output


@pytest.mark.slow
def test_the_second_preset_is_the_baseline(tmp_path):
    baseline = tmp_path / "baseline.yaml"
    wide = make_form("all branches").model_copy(update={"attention": "dense", "mlp_hidden": 40, "n_layers": 1})
    baseline.write_text(RunConfig(name="baseline", model=wide).to_yaml())
    result, record = run_preset(tmp_path, make_form("all branches"), "--preset", str(baseline))
    assert result.exit_code == 0 and record["baseline"]["mlp_hidden"] == 40, result.output
    assert {row["level"] for row in record["rows"]} == {"model, 3 and 1 layers"}


def test_a_pair_is_sparse_and_dense():
    sparse = make_form("all branches")
    dense = sparse.model_copy(update={"attention": "dense"})
    pair = decode_speed.make_pair(sparse, layers=2)
    assert [(kind, config.attention, config.n_layers) for kind, config in pair.items()] == [
        ("nsa", "nsa", 2),
        ("dense", "dense", 2),
    ]
    with pytest.raises(ConfigError, match=r"got model\.attention = dense"):
        decode_speed.make_pair(dense)
    with pytest.raises(ConfigError, match=r"expected a baseline with model\.attention = dense, got nsa"):
        decode_speed.make_pair(sparse, sparse)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_decode_steps_of_a_model_pass_parity(form):
    for dtype in (torch.float32, torch.bfloat16):
        model = decode_speed.build_models({"nsa": make_form(form)}, dtype, "cpu")["nsa"]
        found = decode_parity.check_model_parity(model, "torch")
        assert found["passed"] and found["error"] > 0, (dtype, found)
        assert dtype == torch.bfloat16 or found["limit"] < 1e-5


@pytest.mark.slow
def test_a_model_that_fails_parity_gets_no_speed(tmp_path, monkeypatch):
    honest = attention_cache.attend_and_select

    def with_fault(add_fault):
        def attend(*given, **options):
            attended, blocks = honest(*given, **options)
            add_fault(attended)
            return attended, blocks

        monkeypatch.setattr(attention_cache, "attend_and_select", attend)
        return run_preset(tmp_path, make_form("selected only, fp8 index keys"))

    for fault in (lambda x: x[0].add_(1e-3), lambda x: x[1].add_(1e-3), lambda x: x[2].mul_(float("nan"))):
        result, record = with_fault(fault)
        nsa, dense = record["rows"]
        assert nsa["ms"] is None and not record["parity"]["nsa"]["passed"], record["parity"]
        assert dense["ms"] > 0 and PARITY_FAILED[:13] in result.output


def test_random_caches_hold_finite_index_keys():
    for dtype in ("fp8", "mxfp4"):
        model = make_form("all branches")
        config = ModelConfig.model_validate({**model.model_dump(), **INDEXER, "branches": ("sel",), "indexer_dtype": dtype})
        decoder = decode_speed._make_full_decoder(NSATransformer(config, seed=0), 97, 2, "torch")
        stored = [x for x in decoder.cache.tensors() if x.dtype.itemsize == 1]
        assert len(stored) == config.n_layers
        for keys in stored:
            decoded = decode_keys(keys, config.index_width, torch.float32)
            assert decoded.isfinite().all() and decoded.std() > 0.5
