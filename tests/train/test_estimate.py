"""Resource estimates: counts equal those of the real model, one formula for durations, comparison with measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import looped

from nsa_lab.config import ConfigError, ModelConfig, RunConfig
from nsa_lab.model import NSATransformer
from nsa_lab.train.build import build_model
from nsa_lab.train.estimate import (
    build_meta_model,
    check_state_fits,
    compare_with_measured,
    compute_flops_per_token,
    compute_hours,
    count_retained_checkpoints,
    estimate_activation_bytes,
    estimate_resources,
    load_reference_throughput,
)
from nsa_lab.train.step import make_optimizer
from nsa_lab.train.telemetry import system_metrics

PARAMS = Path(__file__).parents[2] / "params"
PRODUCTION = RunConfig.from_dict(
    {
        "name": "production",
        "runtime": {"precision": "bf16"},
        "train": {
            "steps": 50_000,
            "seq_len": 2048,
            "batch_size": 32,
            "accumulate_grad_batches": 2,
            "save_every": 1000,
            "keep_every": 10_000,
            "warmup_steps": 2000,
        },
    }
)


@pytest.mark.parametrize(("attention", "unlike"), [("nsa", "dense"), ("dense", "NSA")])
def test_the_flops_of_the_other_attention_are_labelled(attention: Any, unlike: str) -> None:
    """The dense baseline has fewer FLOPs, because it has no branches and gates."""
    planned = estimate_resources(PRODUCTION.model_copy(update={"model": ModelConfig(attention=attention)}))
    rows = {name: value for name, value in planned.format_rows() if name.startswith("MFLOPs per token, ")}
    assert len(rows) == 2
    for kind, flops in (("NSA", planned.flops_per_token_nsa), ("dense", planned.flops_per_token_dense)):
        value = f"{flops / 1e6:,.1f}" + (", with the same weights" if kind == unlike else "")
        assert rows[f"MFLOPs per token, {kind}"] == value


@pytest.mark.slow
def test_counts_equal_those_of_the_model() -> None:
    small = RunConfig(model=ModelConfig(dim=64, n_layers=2, n_heads=4))
    model = NSATransformer(small.model)
    planned = estimate_resources(small)
    assert planned.params == model.parameter_count()
    assert planned.flops_per_token_nsa == model.flops_per_token(small.train.seq_len)["nsa"]


def test_the_production_model_is_78_million_parameters_and_6_55_billion_tokens() -> None:
    planned = estimate_resources(PRODUCTION)
    assert planned.params == pytest.approx(78.5e6, rel=0.01)
    assert planned.tokens == 50_000 * 32 * 2 * 2048 == 6_553_600_000
    assert planned.checkpoint_bytes == pytest.approx(0.94e9, rel=0.01)


def test_time_counts_tokens_of_all_micro_batches() -> None:
    # A known mistake: 50,000 steps of 2 x 2,048 tokens in two micro-batches at 39 tokens/s are 2,918 hours, not 73.
    assert compute_hours(50_000 * 2 * 2 * 2048, 39.0) == pytest.approx(1458.8 * 2, rel=1e-3)
    assert estimate_resources(PRODUCTION, 120_000).hours == pytest.approx(15.17, rel=1e-3)
    assert estimate_resources(PRODUCTION).hours is None


def test_min_tokens_per_s_is_the_default_speed() -> None:
    gated = RunConfig.from_dict({"train": {"min_tokens_per_s": 5000.0, "steps": 10}})
    assert estimate_resources(gated).tokens_per_s == 5000.0 and estimate_resources(gated, 8000.0).tokens_per_s == 8000.0


def test_a_frozen_trunk_needs_a_fraction_of_the_activation_memory() -> None:
    frozen = RunConfig.from_yaml(PARAMS / "convert_smollm2.yaml")
    sections = frozen.to_dict()
    sections["train"]["trainable"] = "all"
    planned, whole = estimate_resources(frozen), estimate_resources(RunConfig.from_dict(sections))
    logits = 32_768 * 49_152 * 10
    assert logits < planned.activation_bytes < logits + 0.2 * (whole.activation_bytes - logits)


def test_a_teacher_needs_its_weights_its_logits_and_the_tensors_of_a_chunk() -> None:
    config = RunConfig.from_yaml(PARAMS / "convert_smollm2_train.yaml")
    sections = config.to_dict()
    del sections["train"]["teacher_weight"]
    planned, without = estimate_resources(config), estimate_resources(RunConfig.from_dict(sections))
    # Without the indexers; their keys and queries have width 64.
    assert planned.state_bytes - without.state_bytes == 4 * (planned.params - 30 * 576 * 6 * 64)
    # Logits and the gradient of the divergence in bfloat16, six tensors of a chunk in float32.
    assert planned.activation_bytes - without.activation_bytes == 2 * 8192 * 49_152 * 2 * 2 + 6 * 4 * (1 << 26)
    assert planned.checkpoint_bytes == without.checkpoint_bytes
    forward = planned.flops_per_token_nsa - without.flops_per_token_nsa
    assert forward == pytest.approx(without.flops_per_token_dense / 3)
    # A chunk is at most the whole micro-batch.
    sections["train"] |= {"teacher_weight": 1.0, "seq_len": 64}
    short = estimate_resources(RunConfig.from_dict(sections))
    del sections["train"]["teacher_weight"]
    assert short.activation_bytes - estimate_resources(RunConfig.from_dict(sections)).activation_bytes == (
        2 * 64 * 49_152 * (2 * 2 + 6 * 4)
    )


def test_memory_falls_with_checkpointing_and_smaller_micro_batches() -> None:
    sections = PRODUCTION.to_dict()
    whole = estimate_resources(PRODUCTION)
    sections["train"]["micro_batch_size"] = 8
    split = estimate_resources(RunConfig.from_dict(sections))
    sections["runtime"]["gradient_checkpointing"] = True
    saving = estimate_resources(RunConfig.from_dict(sections))
    assert split.activation_bytes * 4 == whole.activation_bytes
    assert saving.activation_bytes < 0.4 * split.activation_bytes
    assert whole.state_bytes == 16 * whole.params and whole.memory_bytes > whole.state_bytes


def test_n_gram_lookups_save_the_estimated_bytes() -> None:
    """Compare the tensors saved between forward and backward with and without n-grams."""
    shape: dict[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16}
    tables = {"ngrams": 4, "ngram_rows": 50, "ngram_width": 21}
    planned, saved_bytes = [], []
    for model in (shape, shape | tables):
        config = RunConfig.from_dict({"model": model, "train": {"seq_len": 40, "batch_size": 3}})
        planned.append(estimate_resources(config).activation_bytes)
        saved: dict[int, int] = {}
        built = NSATransformer(config.model, seed=0)
        own = {p.data_ptr() for p in built.parameters()}

        def keep(x: torch.Tensor, saved: dict[int, int] = saved, own: set[int] = own) -> torch.Tensor:
            if x.data_ptr() not in own:
                saved[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits = built(torch.zeros(3, 40, dtype=torch.int64))
        saved_bytes.append(sum(saved.values()))
        del logits
    assert planned[1] - planned[0] == 3 * 40 * 3 * (21 * 4 + 8) == saved_bytes[1] - saved_bytes[0]


@pytest.mark.parametrize("trainable", ["all", "indexer"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_bytes_are_those_after_a_step(kind: str, trainable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counters, one number per tensor of AdamW, are not counted."""
    shape = {"dim": 24, "n_layers": 2, "n_heads": 2, "n_kv_groups": 1, "d_k": 10, "d_v": 6, "mlp": "gated"}
    train = {"optimizer": kind, "trainable": trainable}
    sections: dict[str, Any] = {"model": shape, "train": train}
    if trainable == "indexer":
        sections["model"] = shape | {"branches": ["sel"], "indexer_block": 1, "selection_loss": 0.05}
        sections["nsa"] = {"l": 8, "d": 8, "l_sel": 8, "n_sel": 4}
        train["initial_weights"] = "dense"
        monkeypatch.setattr("nsa_lab.convert.load_initial_weights", lambda model, source: None)
    config = RunConfig.from_dict(sections)
    model = build_model(config, torch.device("cpu"))
    optimizer = make_optimizer(model, config.train)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    numbers, n_trained = (sum(p.numel() for p in weights) for weights in (model.parameters(), trained))
    moments = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim)
    assert (n_trained == numbers) is (trainable == "all")
    assert (moments == 2 * numbers) is (kind == "adamw" and trainable == "all")
    planned = estimate_resources(config)
    assert planned.state_bytes == 4 * (numbers + n_trained + moments)
    assert planned.checkpoint_bytes == 4 * (numbers + moments)


def test_disk_space_covers_retained_checkpoints_and_the_one_being_written() -> None:
    assert count_retained_checkpoints(PRODUCTION) == 3 + 5 + 1
    planned = estimate_resources(PRODUCTION)
    assert planned.disk_bytes == 9 * planned.checkpoint_bytes + 6_553_600_000


CPU = torch.device("cpu")


def allow(monkeypatch: pytest.MonkeyPatch, folder: Path, limit: int | str) -> None:
    """Limit the memory of this process, as a control group does."""
    (folder / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(system_metrics, "CGROUP_LIMIT", folder / "memory.max")


def test_memory_capacity_respects_the_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system_metrics, "CGROUP_LIMIT", tmp_path / "is not there")
    installed = system_metrics.get_memory_capacity(CPU)
    assert installed > 2**28
    for limit, capacity in (("max", installed), (2**20, 2**20), (2**60, installed)):
        allow(monkeypatch, tmp_path, limit)
        assert system_metrics.get_memory_capacity(CPU) == capacity


def test_a_model_that_fits_only_with_muon_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    muon = RunConfig.from_dict({"train": {"optimizer": "muon"}})
    needed = estimate_resources(muon).state_bytes
    assert needed < estimate_resources(RunConfig()).state_bytes
    allow(monkeypatch, tmp_path, needed)
    check_state_fits(muon, CPU)
    with pytest.raises(ConfigError):
        check_state_fits(RunConfig(), CPU)
    allow(monkeypatch, tmp_path, needed - 1)
    with pytest.raises(ConfigError, match=f"take {needed:,} bytes"):
        check_state_fits(muon, CPU)


def test_the_error_for_a_model_of_large_tables_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allow(monkeypatch, tmp_path, 2**30)
    with pytest.raises(ConfigError, match=r"Lower model\.ngram_rows or model\.ngram_width"):
        check_state_fits(RunConfig.from_dict({"model": {"ngrams": 9, "ngram_rows": 2**20}}), CPU)
    for others in ({"ngrams": 3, "ngram_rows": 2**10}, {"vocab_size": 2**20, "ngrams": 4, "ngram_rows": 2**18}):
        with pytest.raises(ConfigError, match=r"Lower model\.dim or model\.n_layers"):
            check_state_fits(RunConfig.from_dict({"model": others}), CPU)


@looped
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 1), ("ddp", 4), ("fsdp", 1), ("fsdp", 2), ("fsdp", 8)])
def test_a_model_that_fits_exactly_is_accepted_and_one_byte_less_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: str, ranks: int
) -> None:
    """Sharding divides the state among ranks; each rank also holds the weights of the layer that is gathered."""
    shape: dict[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16}
    config = RunConfig.from_dict({"model": shape, "runtime": {"parallel": parallel}})
    model, n_shards = NSATransformer(config.model), ranks if parallel == "fsdp" else 1
    needed = model.parameter_count() * 16 // n_shards
    if n_shards > 1:
        needed += 4 * sum(p.numel() for p in model.blocks[0].parameters())
    allow(monkeypatch, tmp_path, needed)
    check_state_fits(config, CPU, ranks, n_shards)
    allow(monkeypatch, tmp_path, needed - 1)
    with pytest.raises(ConfigError) as caught:
        check_state_fits(config, CPU, ranks, n_shards)
    message = str(caught.value)
    assert f"take {needed:,} bytes" in message and f"this machine has {needed - 1:,} " in message
    assert (f" on each of {ranks} ranks" in message) is (ranks > 1)


def test_the_estimate_prints_as_a_table_and_converts_to_a_dict() -> None:
    text = str(estimate_resources(PRODUCTION, 120_000))
    assert "78,6" in text and "15 h 10 min" in text and "GB" in text and "dense" in text
    assert estimate_resources(PRODUCTION).to_dict()["steps"] == 50_000


def test_comparison_with_measurement() -> None:
    planned = estimate_resources(PRODUCTION, 100_000.0)
    measured = [{"mem_peak_bytes": planned.memory_bytes // 2, "tokens_per_s": 80_000.0 + n} for n in (0, 1, 2)]
    (memory, *_, ratio), (time, *_, slower) = compare_with_measured(planned, measured)
    assert (memory, time) == ("memory_bytes", "hours")
    assert ratio == pytest.approx(0.5) and slower == pytest.approx(1.25, rel=1e-3)
    assert compare_with_measured(planned, []) == []


def test_reference_throughput_equals_the_benchmark_that_it_names() -> None:
    """After a new `nsa-lab bench train`, copy the numbers of its record into the package, field by field as here."""
    root = Path(__file__).parents[2]
    shipped = load_reference_throughput()
    record = json.loads((root / shipped["record"].split(",")[0]).read_text(encoding="utf-8"))
    assert {key: shipped[key] for key in ("when", "device", "gemm_flops_per_s", "model")} == {
        key: record[key] for key in ("when", "device", "gemm_flops_per_s", "model")
    }
    for shipped_row, recorded_row in zip(shipped["rows"], record["rows"], strict=True):
        assert all(shipped_row[key] == recorded_row[key] for key in ("seq_len", "micro_batch"))
        for kind in ("nsa", "dense"):
            assert shipped_row[kind] == {key: recorded_row[kind][key] for key in shipped_row[kind]}


def train(**settings: object) -> RunConfig:
    return RunConfig.from_dict({"train": {"seq_len": 64, **settings}})


def test_the_last_step_is_saved_for_any_save_every() -> None:
    # Steps 4, 8 and 10, and the one being written.
    assert count_retained_checkpoints(train(steps=10, save_every=4, keep_last=5)) == 4
    assert count_retained_checkpoints(train(steps=10, save_every=0, keep_every=2)) == 2


def test_ranks_share_the_activation_memory() -> None:
    expected, shared = (estimate_activation_bytes(train(batch_size=8), ranks) for ranks in (1, 4))
    assert expected == 4 * shared
    assert estimate_activation_bytes(train(batch_size=2, accumulate_grad_batches=4), 4) == shared, (
        "never more than a micro-batch"
    )


def test_ranks_that_share_a_sequence_exchange_the_keys_of_every_layer() -> None:
    model = {"n_layers": 4, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 6, "indexer_block": 2, "indexer_every": 2}
    model["selection_loss"] = 0.1
    config = RunConfig.from_dict({"model": {"dim": 32, **model}, "train": {"seq_len": 640, "batch_size": 2}})
    estimates = {n: estimate_resources(config, n_ranks=n) for n in (1, 2, 8)}
    assert estimates[1].communication == () and "communication" not in str(estimates[1])
    (whole,), (shared,) = estimates[2].communication, estimates[8].communication
    assert (whole.context_size, whole.gathered_bytes, whole.text_bytes) == (1, 0, 0)
    assert whole.parameter_bytes == 4 * estimates[1].params
    # Two of four layers have an indexer, with a key of width 8 for each of two groups. Four ranks share each sequence.
    numbers = 3 * 2 * (8 + 6) + 2 * 8 / 2
    assert (shared.context_size, shared.text_bytes) == (4, 640 * numbers * 4)
    assert shared.gathered_bytes == shared.scattered_bytes == 640 * numbers * 4 * 3 / 4
    assert shared.parameter_bytes == 2 * 4 * estimates[1].params * 7 / 8
    assert "4 ranks share each sequence" in str(estimates[8])
    # Each rank has a quarter of the activations of a sequence, and all of its keys, twice.
    expected = estimate_activation_bytes(config, 2) // 4 + 2 * 4 * shared.text_bytes
    assert estimates[8].activation_bytes == expected
    recomputed = RunConfig.from_dict({**config.to_dict(), "runtime": {"gradient_checkpointing": True}})
    assert estimate_resources(recomputed, n_ranks=8).communication[0].gathered_bytes == 2 * shared.gathered_bytes


def test_a_gated_mlp_needs_twice_the_activation_memory() -> None:
    model = {"dim": 64, "n_layers": 3, "n_heads": 4, "mlp_hidden": 100}
    plain, gated = (
        estimate_activation_bytes(
            RunConfig.from_dict({"model": {**model, "mlp": mlp}, "train": {"seq_len": 64, "batch_size": 2}})
        )
        for mlp in ("plain", "gated")
    )
    assert gated - plain == 2 * 100 * 4 * 3 * (2 * 64)


def test_activation_memory_is_that_of_the_largest_stage() -> None:
    small, large = ({"steps": 1, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in (64, 256))
    expected = estimate_activation_bytes(train(seq_len=256, batch_size=1))
    for stages in ([small, large], [large, small]):
        assert estimate_activation_bytes(RunConfig.from_dict({"train": {"stages": stages}})) == expected


def test_flops_are_a_mean_over_tokens() -> None:
    stages = [{"steps": 1, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in (64, 192)]
    config = RunConfig.from_dict({"train": {"stages": stages}})
    model = build_meta_model(config.model)
    one, other = (model.flops_per_token(n)["dense"] for n in (64, 192))
    assert compute_flops_per_token(model, config.train)["dense"] == pytest.approx(one / 4 + other * 3 / 4)


def test_an_estimate_is_compared_with_the_highest_peak() -> None:
    planned = estimate_resources(train(steps=4), 10.0)
    rows = compare_with_measured(planned, [{"mem_peak_bytes": n, "tokens_per_s": 10.0} for n in (10, 30, 20)])
    assert [(name, result) for name, _, result, _ in rows] == [("memory_bytes", 30.0), ("hours", planned.hours)]


def test_shard_size_is_limited_by_max_tokens_and_by_tokens_read() -> None:
    tokens = train(steps=2, batch_size=1).train.tokens
    for most, bytes_ in ((None, tokens), (tokens - 1, tokens - 1), (tokens + 1, tokens)):
        config = RunConfig.from_dict({"train": {"seq_len": 64, "steps": 2, "batch_size": 1}, "data": {"max_tokens": most}})
        assert estimate_resources(config).shard_bytes == bytes_
