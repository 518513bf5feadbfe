"""Runs with several stages: batches, rates and records of each step; a resumed run is the same run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import looped
from safetensors.torch import load_file
from stage_config import make_staged_config as of_stages

from nsa_lab.config import ConfigError, RunConfig, StageConfig, TrainConfig
from nsa_lab.data import Batches, StagedBatches, make_validation_batches
from nsa_lab.health import examine
from nsa_lab.inference import load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.history import collect_facts
from nsa_lab.train.build import _make_graph_predicate, select_device
from nsa_lab.train.checkpoint_state import make_probe_input
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import build_meta_model, compute_flops_per_token, estimate_resources
from nsa_lab.train.lr_schedule import compute_learning_rate

Make, Train = Callable[..., Path], Callable[..., int]

STAGES: list[dict[str, Any]] = [
    {"steps": 4, "seq_len": 32, "batch_size": 2, "accumulate_grad_batches": 2, "lr": 1e-2, "warmup_steps": 2},
    {"steps": 3, "seq_len": 48, "batch_size": 1, "lr": 5e-3, "lr_schedule": "constant", "rope_theta": 321.0},
    {"steps": 5, "seq_len": 77, "batch_size": 2, "micro_batch_size": 1, "lr": 3e-3, "min_lr": 1e-3},
]
TOKENS = [4 * 32] * 4 + [48] * 3 + [2 * 77] * 5


@pytest.fixture(scope="module")
def staged(make_tiny_config: Callable[..., RunConfig]) -> Callable[..., dict[str, Any]]:
    """Changes that make the tiny run one of three stages."""

    def sections(**changes: Any) -> dict[str, Any]:
        retained = {k: v for k, v in make_tiny_config().to_dict()["train"].items() if k not in StageConfig.model_fields}
        return {"train": {**retained, "stages": STAGES, "spike_sigma": 50.0, **changes}}

    return sections


@pytest.fixture
def new_staged_run(
    make_tiny_config: Callable[..., RunConfig], staged: Callable[..., dict[str, Any]], tmp_path: Path
) -> Make:
    def make(**changes: Any) -> Path:
        return lifecycle.create_run(
            RunConfig.from_dict({**make_tiny_config().to_dict(), **staged(**changes)}), tmp_path / "outputs"
        )

    return make


@pytest.fixture(scope="module")
def uninterrupted(
    make_tiny_config: Callable[..., RunConfig], staged: Callable[..., dict[str, Any]], train: Train, tmp_path_factory
) -> Path:
    """The staged run, trained to its end with every step saved. Tests must not write to it."""
    config = RunConfig.from_dict({**make_tiny_config().to_dict(), **staged(save_every=1, keep_last=12)})
    run_dir = lifecycle.create_run(config, tmp_path_factory.mktemp("whole"))
    assert train(run_dir) == 0
    return run_dir


def recorded(run_dir: Path) -> list[tuple[Any, ...]]:
    record = events.read_events(run_dir)
    return [(e["step"], e["tokens"], e["loss"], e["lr"], e["grad_norm"]) for e in events.get_step_events(record)]


def weights(run_dir: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(run_dir / f"checkpoints/step-{step:08d}/model.safetensors")


def test_steps_tokens_and_rates_cover_the_whole_run() -> None:
    train = TrainConfig(stages=[StageConfig(**stage) for stage in STAGES])
    assert (train.steps, train.tokens, train.first_steps) == (12, sum(TOKENS), [1, 5, 8])
    assert [train.tokens_until(step) for step in range(13)] == [sum(TOKENS[:step]) for step in range(13)]
    assert [train.locate_step(step) for step in (0, 1, 4, 5, 7, 8, 12)] == [
        (0, 0),
        (0, 1),
        (0, 4),
        (1, 1),
        (1, 3),
        (2, 1),
        (2, 5),
    ]
    assert train.longest_stage.seq_len == 77
    with pytest.raises(ValueError, match=r"outside 0\.\.12"):
        train.locate_step(13)
    single_stage = [
        compute_learning_rate(n, TrainConfig(stages=[stage])) for stage in STAGES for n in range(1, stage["steps"] + 1)
    ]
    assert [compute_learning_rate(step, train) for step in range(1, 13)] == single_stage
    assert (
        single_stage[1] == 1e-2
        and single_stage[4:7] == [5e-3] * 3
        and single_stage[7] == 3e-3
        and single_stage[11] == pytest.approx(1e-3)
    )


def test_without_stages_the_section_is_the_only_stage() -> None:
    train = TrainConfig(steps=9, seq_len=64)
    assert train.plan == (train,) and train.first_steps == [1] and train.tokens == 9 * train.tokens_per_step
    assert "stages" not in RunConfig(train=train).to_dict()["train"]


def test_a_staged_configuration_survives_its_file(tmp_path: Path, staged: Callable[..., dict[str, Any]]) -> None:
    config = RunConfig.from_dict(staged())
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    again = RunConfig.from_yaml(tmp_path / "again.yaml")
    assert again.train == config.train and again.hash() == config.hash()
    assert again.hash() != RunConfig.from_dict(staged(stages=STAGES[:2])).hash()


def test_each_stage_has_its_own_batches(make_tiny_config: Callable[..., RunConfig], builders: Any) -> None:
    data = make_tiny_config().data
    tokens = builders.data(data, 256, 77, None).train
    train = TrainConfig(stages=[StageConfig(**stage) for stage in STAGES])
    batches = StagedBatches(tokens, train, data)
    first = Batches(tokens, 32, 4, train.seed)
    for step in range(4):
        assert torch.equal(batches.batch(step)[0], first.batch(step)[0])
        assert batches.compute_hash(step) == first.compute_hash(step) and batches.get_text_positions(
            step
        ) == first.get_text_positions(step)
    assert [batches.batch(step)[0].numel() for step in range(14)] == [*TOKENS, TOKENS[-1], TOKENS[-1]]
    assert batches.weighted_batch(5)[2] is None
    alike = StagedBatches(tokens, TrainConfig(stages=[StageConfig(**STAGES[0])] * 2), data)
    assert not torch.equal(alike.batch(0)[0], alike.batch(4)[0]), "a stage does not begin with the texts of the one before"
    for step in (-1, -5):
        with pytest.raises(ValueError, match="expected step >= 0"):
            batches.batch(step)


def test_every_stage_is_evaluated_at_its_own_length(make_tiny_config: Callable[..., RunConfig], builders: Any) -> None:
    tokens = builders.data(make_tiny_config().data, 256, 77, None).validation
    train = TrainConfig(stages=[StageConfig(**stage) for stage in STAGES])
    assert [batches[0][0].shape[1] for batches in make_validation_batches(tokens, train)] == [
        stage["seq_len"] for stage in STAGES
    ]
    assert all(batches.find_documents(batches[0][0]) is not None for batches in make_validation_batches(tokens, train, 255))


@pytest.mark.slow
def test_events_cover_the_whole_run(uninterrupted: Path) -> None:
    run_dir = uninterrupted
    assert directory.read_status(run_dir)["tokens"] == sum(TOKENS)
    config = RunConfig.from_yaml(run_dir / "config.yaml")
    record = events.read_events(run_dir)
    assert [(e["step"], e["tokens"]) for e in events.get_step_events(record)] == [
        (n, sum(TOKENS[:n])) for n in range(1, 13)
    ]
    assert [e["lr"] for e in events.get_step_events(record)] == [
        compute_learning_rate(n, config.train) for n in range(1, 13)
    ]
    assert [(e["step"], e["seq_len"]) for e in events.get_eval_events(record)] == [(0, 32), (6, 48), (12, 77)]
    assert collect_facts(run_dir).tokens == sum(TOKENS) and collect_facts(run_dir).steps == 12
    named = {verdict.name: verdict for verdict in examine(run_dir).verdicts}
    for name in ("finished", "record unchanged", "every step once", "learning rate", "checkpoints", "preflight"):
        assert named[name].ok, named[name].text


@pytest.mark.slow
def test_the_first_step_of_a_stage_is_logged(new_staged_run: Make, train: Train) -> None:
    run_dir = new_staged_run(log_every=100, stats_every=100)
    assert train(run_dir) == 0
    assert [row[0] for row in recorded(run_dir)] == [1, 5, 8, 12]


@pytest.mark.slow
def test_a_run_resumed_within_or_between_stages_is_the_same_run(
    uninterrupted: Path, new_staged_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the last step of a stage, after it, after the first step of the next, and within the last stage."""
    from nsa_lab.train.trainer import Trainer

    class Killed(BaseException):
        pass

    after = Trainer._finish_step

    parted = new_staged_run(save_every=1)
    for cut in (3, 4, 5, 9):

        def die(self: Trainer, step: int, inputs: torch.Tensor, phase: str, cut: int = cut) -> None:
            after(self, step, inputs, phase)
            if step == cut:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Trainer, "_finish_step", die)
            train(parted)
    assert train(parted) == 0
    assert recorded(parted) == recorded(uninterrupted)
    ours, theirs = weights(parted), weights(uninterrupted)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_stages_are_part_of_the_trajectory_and_their_grouping_is_not(
    uninterrupted: Path, train: Train, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(uninterrupted, tmp_path / uninterrupted.name)
    path = run_dir / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("micro_batch_size: 1", "micro_batch_size: 2"))
    assert train(run_dir) == 0
    path.write_text(text.replace("seq_len: 77", "seq_len: 78"))
    assert train(run_dir) == 2
    assert "train.stages" in directory.read_status(run_dir)["reason"]


@pytest.mark.slow
def test_a_checkpoint_from_before_stages_existed_can_be_resumed(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    state = json.loads((run_dir / "checkpoints/step-00000012/state.json").read_text())
    assert "train.stages" not in state["trajectory"] and not [key for key in state["trajectory"] if "recall" in key]
    assert train(run_dir) == 0


def test_the_estimate_of_a_staged_run(staged: Callable[..., dict[str, Any]]) -> None:
    config = RunConfig.from_dict(staged())
    planned = estimate_resources(config)
    assert planned.tokens == sum(TOKENS) and planned.stages == ((4, 128), (3, 48), (5, 154))
    assert "4 of 128 tokens, then 3 of 48 tokens, then 5 of 154 tokens" in str(planned)
    model = build_meta_model(config.model)
    mean = sum(model.flops_per_token(s["seq_len"])["nsa"] * n for s, n in zip(STAGES, (512, 144, 770), strict=True)) / 1426
    assert compute_flops_per_token(model, config.train)["nsa"] == pytest.approx(mean)


@looped
@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"stages": STAGES, "seq_len": 64}, ["train.stages and train.seq_len", "move the keys"]),
        ({"stages": STAGES, "steps": 12, "lr": 1.0}, ["train.lr, train.steps"]),
        ({"stages": [{"steps": 3, "lr": 1e-3}]}, ["train.stages.0 has no seq_len, batch_size"]),
        ({"stages": [STAGES[0], {**STAGES[1], "warmup_steps": 7}]}, ["train.stages.1.warmup_steps = 7", "at most 2"]),
        ({"stages": [{**STAGES[0], "seq_length": 3}]}, ["train.stages.0.seq_length = 3", "seq_len"]),
        ({"stages": 5}, ["train.stages = 5"]),
        ({"rope_theta": 5e5}, ["train.rope_theta = 500000", "model.rope_theta: 500000"]),
        ({"cuda_graph": False}, ["train.cuda_graph = false", "runtime.cuda_graph: false"]),
        ({"token_budget": 9999, "steps": 2}, ["train.token_budget = 9999 and train.steps = 2", "keep one"]),
        ({"token_budget": 2047}, ["less than one step of 2048 tokens"]),
        ({"stages": [{**STAGES[0], "token_budget": 9999}]}, ["train.stages.0", "token_budget = 9999 and", "keep one"]),
        ({"stages": STAGES, "token_budget": 9999}, ["train.stages and train.steps, train.token_budget"]),
    ],
)
def test_invalid_stages_give_helpful_errors(train: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"train": train})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_token_budget_is_rounded_down_to_whole_steps() -> None:
    stages = [
        {**{k: v for k, v in stage.items() if k != "steps"}, "token_budget": paid}
        for stage, paid in zip(STAGES, (639, 144, 770), strict=True)
    ]
    config = RunConfig.from_dict({"train": {"stages": stages}})
    assert config.train.plan == RunConfig.from_dict({"train": {"stages": STAGES}}).train.plan
    assert config.to_yaml() == RunConfig.from_dict({"train": {"stages": STAGES}}).to_yaml()
    assert config.hash() == RunConfig.from_dict({"train": {"stages": STAGES}}).hash()
    single_stage = TrainConfig(token_budget=20_000, seq_len=77, batch_size=3, accumulate_grad_batches=2)
    assert (single_stage.steps, single_stage.tokens) == (43, 43 * 462) and single_stage == single_stage.model_copy()


def test_a_checkpoint_uses_the_rotary_base_of_its_stage(uninterrupted: Path) -> None:
    config = RunConfig.from_yaml(uninterrupted / "config.yaml")
    tokens = torch.arange(64).view(1, 64)
    for step, theta in ((4, 10000.0), (5, 321.0), (7, 321.0), (8, 10000.0)):
        folder = uninterrupted / f"checkpoints/step-{step:08d}"
        plain = NSATransformer(config.model.model_copy(update={"rope_theta": theta})).eval()
        plain.load_state_dict(load_file(folder / "model.safetensors"))
        with torch.no_grad():
            assert torch.equal(load_model(folder)(tokens), plain(tokens)), step
            assert torch.equal(load_file(folder / "probe.safetensors")["logits"], plain(make_probe_input(256, 77))), step


def test_stages_may_be_replayed_as_graphs() -> None:
    config = RunConfig.from_dict({"train": {"stages": STAGES}, "runtime": {"cuda_graph": True}})
    assert [config.uses_cuda_graph(stage) for stage in config.train.plan] == [True] * 3


def test_a_stage_overrides_cuda_graph() -> None:
    stages = [{**STAGES[0], "cuda_graph": True}, STAGES[1], {**STAGES[2], "cuda_graph": False}]
    config = RunConfig.from_dict({"train": {"stages": stages}})
    assert [config.uses_cuda_graph(stage) for stage in config.train.plan] == [True, False, False]
    assert RunConfig.from_dict(config.to_dict()) == config
    config = RunConfig.from_dict({"train": {"stages": stages}, "runtime": {"cuda_graph": True}})
    assert [config.uses_cuda_graph(stage) for stage in config.train.plan] == [True, True, False]


@pytest.mark.parametrize("runtime", [{"device": "cpu"}, {"gradient_checkpointing": True}])
def test_a_stage_that_does_not_support_graphs_is_named(runtime: dict[str, Any]) -> None:
    stages = [STAGES[0], {**STAGES[1], "cuda_graph": True}]
    with pytest.raises(ConfigError, match=r"train\.stages\.1\.cuda_graph.*set .*to false"):
        RunConfig.from_dict({"train": {"stages": stages}, "runtime": runtime})


def test_graphs_need_a_cuda_device_and_are_not_used_with_several_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nsa_lab.train")
    for ranks, graphs, used in ((1, True, True), (1, False, False), (2, True, False), (2, False, False)):
        caplog.clear()
        stages = [STAGES[0], {**STAGES[1], "cuda_graph": graphs}]
        config, world = RunConfig.from_dict({"train": {"stages": stages}}), World(size=ranks)
        use_graph = _make_graph_predicate(config, world)
        assert [use_graph(stage) for stage in config.train.plan[:2]] == [False, used]
        assert ("cuda_graph = True with 2 ranks means auto" in caplog.text) == (graphs and ranks == 2)
        if not torch.cuda.is_available() and used:
            with pytest.raises(
                ConfigError, match=r"cuda_graph = True, .* expected a CUDA device, got cpu; set it to false"
            ):
                select_device(config, world)
        elif not torch.cuda.is_available():
            assert select_device(config, world).type == "cpu"


@pytest.mark.slow
def test_a_log_interval_over_two_stages_counts_the_tokens_of_each(
    make_tiny_config: Callable[..., RunConfig], tmp_path: Path, train: Callable[..., int]
) -> None:
    stages = [
        {"steps": 4, "seq_len": 16, "batch_size": 2, "lr": 1e-3},
        {"steps": 2, "seq_len": 64, "batch_size": 2, "lr": 1e-3},
    ]
    run_dir = lifecycle.create_run(of_stages(make_tiny_config(), stages, log_every=100, stats_every=100), tmp_path)
    assert train(run_dir) == 0
    one, five, *_ = events.get_step_events(events.read_events(run_dir))
    assert (one["step"], five["step"]) == (1, 5)
    assert five["tokens_per_s"] * five["dt_s"] * 4 == pytest.approx(3 * 32 + 128)


def test_layer_norms_are_recorded_before_clipping(new_run: Callable[..., Path], train: Callable[..., int]) -> None:
    run_dir = new_run(grad_clip=1e-3, stats_every=1, log_every=1, steps=2, warmup_steps=0)
    assert train(run_dir) == 0
    for step in events.get_step_events(events.read_events(run_dir)):
        layers = math.hypot(*step["grad_norm_layers"])
        assert 0.05 * step["grad_norm"] < layers <= 1.001 * step["grad_norm"], "clipped they would be 1e-3"
