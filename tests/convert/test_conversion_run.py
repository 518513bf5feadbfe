"""Conversion as a run: a pretrained model in, a trained indexer out, with checkpoints and events as in every run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_dense_models import make_dense
from transformers import AutoModelForCausalLM

from nsa_lab import NSAConfig, load_model
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.convert import (
    convert_with_trained_indexers,
    describe_model,
    describe_source,
    export_adapter,
    read_adapter_info,
)
from nsa_lab.data import DataError, Dataset, prepare
from nsa_lab.evaluate.conversion import CONVERSION, evaluate_conversion
from nsa_lab.health import list_verdicts
from nsa_lab.health.evaluation_checks import find_foreign_evaluation
from nsa_lab.runs import events, lifecycle
from nsa_lab.runs.history import History
from nsa_lab.train.attempt import run
from nsa_lab.train.build import Builders, build_model

ROOT = Path(__file__).parents[2]
NSA = NSAConfig(l=8, d=8, l_sel=8, n_sel=4, sink_blocks=1, local_blocks=2)
PLAIN: dict[str, Any] = {
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "vocab_size": 256,
    "initializer_range": 0.05,
    "num_hidden_layers": 2,
}


def make_sections(source: Path, dense: Any, **train: Any) -> dict[str, Any]:
    model = describe_model(dense.config, NSA).model_dump(exclude={"nsa"})
    model["branches"] = list(model["branches"])
    model["silent"], model["indexer_order"] = [], list(model["indexer_order"])
    return {
        "name": "conversion",
        "model": model,
        "nsa": NSA.model_dump(),
        "runtime": {"device": "cpu", "heartbeat_s": 60.0},
        "data": {"source": "local", "path": str(source.parent / "texts"), "val_fraction": 0.3},
        "train": {
            "steps": 6,
            "seq_len": 128,
            "batch_size": 2,
            "lr": 0.01,
            "weight_decay": 0.0,
            "eval_every": 3,
            "save_every": 3,
            "log_every": 1,
            "initial_weights": str(source),
            "trainable": "indexer",
            **train,
        },
    }


@pytest.fixture(scope="module")
def builders(tmp_path_factory: pytest.TempPathFactory) -> Builders:
    cache = tmp_path_factory.mktemp("shards")

    def data(*arguments: Any) -> Dataset:
        return prepare(*arguments, cache=cache)

    return Builders(data=data)


def make_pretrained(builders: Builders, config: RunConfig) -> Any:
    """Return a dense model that has seen some of the run's text: preflight refuses a loss above ln V."""
    dense = make_dense(**PLAIN)
    dataset = builders.data(config.data, 256, 128, lambda progress: None, None)
    tokens = torch.from_numpy(dataset.train.read(0, 16 * 64).astype("int64")).view(16, 64)
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        dense(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return dense


@pytest.mark.slow
def test_a_run_trains_only_the_indexer(builders: Builders, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for index in range(0, len(text), 400):
        (tmp_path / "texts" / f"{index}.txt").write_text(text[index : index + 800], encoding="utf-8")
    for name, part in (("long", text[:500]), ("short", text[:100])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(part, encoding="utf-8")
    config = RunConfig.from_dict(make_sections(tmp_path / "dense", make_dense(**PLAIN)))
    dense = make_pretrained(builders, config)
    dense.save_pretrained(tmp_path / "dense")
    run_dir = lifecycle.create_run(config, tmp_path)
    assert run(run_dir, builders=builders) == 0
    recorded = events.read_events(run_dir)
    losses = [event["selection_loss"] for event in recorded if event["kind"] == "step"]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert {event["ok"] for event in recorded if event["kind"] == "preflight"} == {True}
    assert recorded[0]["indexer"] == "new"
    compared = [event for event in recorded if event["kind"] == "conversion"]
    assert [event["step"] for event in compared] == [0, 3, 6]
    assert len({event["loss"]["dense"] for event in compared}) == 1, "the trunk is frozen"
    assert all(0 < share <= 1 + 1e-6 for event in compared for share in event["attention_mass"])
    by_name = {verdict.name: verdict for verdict in list_verdicts(run_dir)}
    assert by_name["record unchanged"].ok
    assert "converted loss" in by_name and "loss fell" not in by_name
    trained = load_model(run_dir)
    converted = convert_with_trained_indexers(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), trained)
    before = dense.state_dict()
    after = converted.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    tokens = torch.randint(256, (1, 60), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(converted(tokens).logits, trained(tokens), atol=1e-4, rtol=1e-4)
    info = export_adapter(run_dir, tmp_path / "adapter", dtype="float32")
    assert info.n_bytes == (tmp_path / "adapter/adapter.safetensors").stat().st_size
    assert "has not been evaluated" in (tmp_path / "adapter/README.md").read_text()
    torch.testing.assert_close(load_model(tmp_path / "adapter")(tokens).logits, trained(tokens), atol=1e-4, rtol=1e-4)
    record = evaluate_conversion(
        run_dir, blocks=[4, 16], windows=2, texts={"long": str(tmp_path / "long")}, prepare_data=builders.data
    )
    assert json.loads((run_dir / CONVERSION).read_text()) == record and record["step"] == 6
    rows = {(row["attention"], row["blocks"]): row["windows"] for row in record["texts"]["long"]["losses"]}
    np.testing.assert_allclose(rows["selected", 16], rows["dense", None], atol=1e-4)
    assert len(rows["selected", 4]) == 2 and record["texts"]["long"]["ranges"] == [[0, 128]]
    assert find_foreign_evaluation(History.read(run_dir)) is None
    export_adapter(run_dir, tmp_path / "evaluated", evaluation=record, about="## License\n")
    card = (tmp_path / "evaluated/README.md").read_text()
    assert "### long, 2 windows of 128 tokens" in card and "| selected | 4 | " in card
    assert card.endswith("\n\n## License\n")
    assert read_adapter_info(tmp_path / "evaluated").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="expected an empty or new folder"):
        export_adapter(run_dir, tmp_path / "adapter")
    with pytest.raises(DataError, match="expected a document of at least 128 tokens"):
        evaluate_conversion(run_dir, texts={"short": str(tmp_path / "short")}, prepare_data=builders.data)
    # Stage 2 starts with the trained indexer and trains everything; the dense control starts with the same trunk. Both
    # learn from the same teacher.
    settings = describe_source(str(run_dir), tmp_path)
    assert (settings["model.indexer_block"], settings["train.initial_weights"]) == (1, str(run_dir.resolve()))
    training = {"steps": 4, "save_every": 2, "eval_every": 0, "teacher_weight": 0.5}
    sections = make_sections(run_dir, dense, trainable="all", **training)
    sections["data"]["path"] = str(tmp_path / "texts")
    control = sections["model"] | {"attention": "dense"}
    sources = {"stage_2": run_dir, "control": tmp_path / "dense"}
    divergences: dict[str, list[float]] = {}
    fingerprints: set[str] = set()
    runs: list[Path] = []
    for name, model, n_indexers in (("stage_2", sections["model"], 2), ("control", control, 0)):
        train = sections["train"] | {"initial_weights": str(sources[name])}
        config = RunConfig.from_dict({**sections, "name": name, "model": model, "train": train})
        started = build_model(config, torch.device("cpu")).state_dict()
        expected = {key: value for key, value in trained.state_dict().items() if key in started}
        assert all(torch.equal(started[key], value) for key, value in expected.items())
        assert sum(".indexer.qk" in key for key in started) == n_indexers
        second = lifecycle.create_run(config, tmp_path)
        runs.append(second)
        with pytest.raises(ConfigError, match=r"expected a run with train\.trainable: indexer, got all"):
            export_adapter(second, tmp_path / "new")
        assert run(second, builders=builders) == 0
        moved = [key for key, value in load_model(second).state_dict().items() if not torch.equal(value, started[key])]
        assert len(moved) == len(started), "all weights are trained"
        final = (second / "checkpoints/step-00000004/model.safetensors").read_bytes()
        shutil.rmtree(second / "checkpoints/step-00000004")
        assert run(second, builders=builders) == 0
        assert (second / "checkpoints/step-00000004/model.safetensors").read_bytes() == final, "resuming is exact"
        recorded = events.read_events(second)
        starts = [event for event in recorded if event["kind"] in ("start", "resume")]
        fingerprints |= {event["teacher"] for event in starts}
        assert [event.get("indexer") for event in starts] == ["loaded" if n_indexers else None] * 2
        steps = [event for event in recorded if event["kind"] == "step"]
        assert [event["step"] for event in steps] == [1, 2, 3, 4, 3, 4]
        divergences[name] = [event["teacher_kl"] for event in steps]
        assert divergences[name][2:4] == divergences[name][4:]
        assert {verdict.name: verdict for verdict in list_verdicts(second)}["teacher"].ok is None, "too few readings"
    assert len(fingerprints) == 1
    assert divergences["control"][0] == 0 < divergences["control"][1] and divergences["stage_2"][0] > 1e-4
    record = evaluate_conversion(
        tmp_path / runs[0].name, blocks=[4], windows=2, control=runs[1], prepare_data=builders.data
    )
    rows = {row["attention"]: row["windows"] for row in record["texts"]["validation"]["losses"]}
    assert record["control"] == {"run": runs[1].name, "step": 4} and len(rows["control"]) == 2
    with torch.no_grad():
        dense.lm_head.weight[0, 0] += 1.0
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"head.weight of the run differs from .*dense: the pretrained weights"):
        export_adapter(run_dir, tmp_path / "new")
    shutil.rmtree(second / "checkpoints/step-00000004")
    assert run(second, builders=builders) == 2
    assert "weights of the teacher (train.initial_weights)" in json.loads((second / "status.json").read_text())["reason"]
    wider = RunConfig.from_dict({**sections, "model": sections["model"] | {"indexer_heads": 3}})
    with pytest.raises(ConfigError, match=r"indexer.qk.weight differs between the run and the model"):
        build_model(wider, torch.device("cpu"))


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    sections = make_sections(tmp_path, make_dense(**PLAIN))
    without = {key: value for key, value in sections["model"].items() if not key.startswith("indexer_")}
    without |= {"selection_loss": 0.0}
    nsa = {**sections["nsa"], "scores": "mean_key"}
    with pytest.raises(ConfigError, match=r"train\.trainable = indexer"):
        RunConfig.from_dict({**sections, "model": without, "nsa": nsa})
    with pytest.raises(ConfigError, match=r"got none in train\.initial_weights; use nsa-lab convert"):
        RunConfig.from_dict({**sections, "train": sections["train"] | {"initial_weights": None}})
    with pytest.raises(ConfigError, match=r"runtime\.parallel"):
        RunConfig.from_dict({**sections, "runtime": {"parallel": "fsdp"}})
    # The preset alone, without the settings that `nsa-lab convert` takes from the source.
    sections["model"]["vocab_size"] = 300
    with pytest.raises(ConfigError, match=r"data\.tokenizer = byte and model\.vocab_size = 300: expected the tokenizer"):
        build_model(RunConfig.from_dict(sections), torch.device("cpu"))
