"""A stage switch compiles nothing, and the dry runs that ensure it have no effect on the run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stage_config import make_staged_config
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.testing import CompileCounter

from nsa_lab.config import DataConfig, RunConfig, StageConfig, TrainConfig
from nsa_lab.data import Batch, StagedBatches, TokenStore
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.train.build import compile_blocks
from nsa_lab.train.packing import find_steps_with_new_capacity, make_spans
from nsa_lab.train.step import Stepper
from nsa_lab.train.trainer import Trainer

Make, Train = Callable[..., Path], Callable[..., int]

# Three lengths; the first occurs again.
STAGES: list[dict[str, Any]] = [
    {"steps": 2, "seq_len": 32, "batch_size": 2, "lr": 1e-2},
    {"steps": 3, "seq_len": 48, "batch_size": 1, "lr": 5e-3, "rope_theta": 321.0},
    {"steps": 2, "seq_len": 77, "batch_size": 2, "micro_batch_size": 1, "lr": 3e-3},
    {"steps": 1, "seq_len": 32, "batch_size": 2, "lr": 1e-3},
]
ROOMS: list[dict[str, Any]] = [
    {"steps": 9, "seq_len": 64, "batch_size": 4, "micro_batch_size": 2},
    {"steps": 14, "seq_len": 100, "batch_size": 2, "micro_batch_size": 1},
]
RECIPE = {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 4}
CLOCKS = {"t", "dt_s", "data_s", "data_s_p50", "data_s_p95", "tokens_per_s", "mem_peak_bytes", "run", "attempt", "seconds"}

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own compiler modules trigger this warning


class Killed(BaseException):
    pass


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts compiled frames, and runs them as traced."""
    counter, compile_in_place = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: compile_in_place(self, **kwargs, backend=counter))
    torch.compiler.reset()
    with dynamo.patch(cache_size_limit=8):
        yield counter
    torch.compiler.reset()


@pytest.fixture
def new_staged_run(make_tiny_config: Callable[..., RunConfig], text_file: str, tmp_path: Path) -> Make:
    """`new_staged_run(kind, **runtime)`: a run of `STAGES`; kind is cross or recipe."""

    def make(kind: str, **runtime: Any) -> Path:
        masked_changes = {"source": "local", "path": text_file, "documents": "mask", "max_tokens": None}
        config = make_tiny_config(
            runtime=runtime, **({"model": RECIPE, "data": masked_changes} if kind == "recipe" else {})
        )
        often = {"save_every": 1, "eval_every": 2, "stats_every": 3, "keep_last": 8}
        return lifecycle.create_run(make_staged_config(config, STAGES, **often), tmp_path / "outputs")

    return make


def read_comparable_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step and evaluation events without durations and bytes."""
    record = [*events.get_step_events(result := events.read_events(run_dir)), *events.get_eval_events(result)]
    return [{key: value for key, value in event.items() if key not in CLOCKS} for event in record]


def assert_the_same(run_dir: Path, other: Path) -> None:
    """Assert equal events, and equal weights, moments and random states after every step, bit for bit."""
    assert read_comparable_events(run_dir) == read_comparable_events(other)
    for step in range(1, 9):
        ours, theirs = (folder / f"checkpoints/step-{step:08d}" for folder in (run_dir, other))
        for file in ("model.safetensors", "optimizer.pt", "probe.safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (step, file)


def seed() -> None:
    """Seed the random states that a checkpoint contains; training does not use them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def killed_after(train: Train, run_dir: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    after = Trainer._finish_step

    def die(self: Trainer, done: int, *rest: Any) -> None:
        after(self, done, *rest)
        if done == step:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "_finish_step", die)
        train(run_dir)


@pytest.fixture
def compiled_in(compiler: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Number of frames that each call of `dry_run`, `step` and `evaluate` compiled."""
    seen: dict[str, list[int]] = {"rehearse": [], "step": [], "evaluate": []}

    def counting(kind: str, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(self: Any, *args: Any, **named: Any) -> Any:
            before = compiler.frame_count
            try:
                return method(self, *args, **named)
            finally:
                seen[kind].append(compiler.frame_count - before)

        monkeypatch.setattr(owner, name, counted)

    counting("rehearse", Trainer, "_compile_ahead")
    counting("step", Trainer, "_train_step")
    counting("evaluate", Trainer, "_evaluate")
    return seen


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [pytest.param("cross", marks=pytest.mark.nightly), "recipe"])
def test_a_stage_switch_compiles_nothing(
    new_staged_run: Make, train: Train, kind: str, compiled_in: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation at the new length compiles nothing either: everything is compiled before the first step or after a
    resume.
    """
    run_dir = new_staged_run(kind, compile=True)
    killed_after(train, run_dir, 3, monkeypatch)
    first = {kind: [*counts] for kind, counts in compiled_in.items()}
    assert first["rehearse"][0] > 0 and first["step"][2] == 0 and first["evaluate"][1:] == [0]
    torch.compiler.reset()  # as in a new process
    for counts in compiled_in.values():
        counts.clear()
    assert train(run_dir) == 0
    initial, *rest = compiled_in["step"]
    assert compiled_in["rehearse"][0] > 0 and initial > 0, "the stage that goes on is compiled by its first step"
    assert [rest[step - 5] for step in (6, 8)] == [0, 0], "the first steps of the last two stages"
    assert not any(rest), "nor does another number of documents"
    if kind == "cross":
        assert not any(compiled_in["evaluate"][1:])
    ahead = [event for event in events.read_events(run_dir) if event["kind"] == "compile"]
    shapes = [[1, 48], [1, 77], [2, 32]]
    # With masking, the first stage needs a larger capacity later than in its first batch, so it is compiled ahead too.
    expected = [(0, shapes if kind == "cross" else [shapes[2], *shapes[:2]]), (3, shapes[1:])]
    assert [(event["step"], event["shapes"]) for event in ahead] == expected
    assert all(event["seconds"] > 0 for event in ahead)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["plain", "compiled"])
def test_dry_runs_have_no_effect(
    new_staged_run: Make, train: Train, compiler: CompileCounter, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, after every step of an uninterrupted run, and of one that was killed in the second stage and resumed."""
    rehearsed, parted, plain = (new_staged_run("recipe", compile=compiled) for _ in range(3))
    monkeypatch.setattr(torch, "seed", lambda: 0)  # of a model that is built for its counts alone: another at every call
    seed()
    assert train(rehearsed) == 0
    seed()
    killed_after(train, parted, 3, monkeypatch)
    random.random()
    torch.rand(1)
    assert train(parted) == 0
    monkeypatch.setattr(Trainer, "_compile_ahead", lambda self: None)
    seed()
    assert train(plain) == 0
    assert_the_same(rehearsed, plain)
    assert_the_same(parted, plain)


@pytest.mark.slow
def test_a_stop_during_dry_runs_changes_nothing(
    new_staged_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, and after a kill within a later stage: the stage of a dry run is not saved."""
    monkeypatch.setattr(torch, "seed", lambda: 0)  # of a model that is built for its counts alone: another at every call
    stopped, plain = (new_staged_run("recipe") for _ in range(2))

    def stop_in_the_last(self: Stepper, batch: Batch) -> None:
        if self.stage.seq_len == 77:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    def stop_once() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "dry_run", stop_in_the_last)
            assert train(stopped) == directory.EXIT_STOPPED

    seed()
    stop_once()
    assert not [*stopped.glob("checkpoints/step-*")] and events.get_step_events(events.read_events(stopped)) == []
    seed()
    killed_after(train, stopped, 3, monkeypatch)
    stop_once()
    assert sorted(path.name for path in stopped.glob("checkpoints/step-*")) == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert train(stopped) == 0
    seed()
    assert train(plain) == 0
    assert_the_same(stopped, plain)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_every_document_capacity_is_compiled_ahead(
    make_tiny_config: Callable[..., RunConfig],
    text_file: str,
    tmp_path: Path,
    train: Train,
    compiler: CompileCounter,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Except the capacity of the first step, which compiles when it runs."""
    masked_changes = {"source": "local", "path": text_file, "documents": "mask", "max_tokens": None}
    run_dir = lifecycle.create_run(
        make_tiny_config(runtime={"compile": compiled}, data=masked_changes, eval_every=0), tmp_path / "outputs"
    )
    capacities: dict[str, list[int]] = {"dry_run": [], "step": []}

    def counting(name: str, owner: type, batch_of: Callable[..., Batch]) -> None:
        method = getattr(owner, name)

        def counted(self: Stepper, *args: Any, **named: Any) -> Any:
            spans = make_spans(self.split_micro_batches(batch_of(*args, **named)))
            capacities[name].append(max(span.capacity for span in spans))
            return method(self, *args, **named)

        monkeypatch.setattr(owner, name, counted)

    counting("dry_run", Stepper, lambda batch: batch)
    counting("step", Stepper, lambda inputs, targets, *rest, documents, **_: Batch(inputs, targets, None, documents))
    assert train(run_dir) == 0
    first, *later = capacities["step"][-12:]
    assert capacities["dry_run"] == ([*dict.fromkeys(room for room in later if room != first)] if compiled else [])
    assert len({first, *later}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_with_new_capacity_match_a_full_scan(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a scan of all batches, stage by stage, with the share of every rank."""
    plan = [StageConfig(**{**stage, "lr": 1e-3, "warmup_steps": 0}) for stage in ROOMS]
    config = TrainConfig(stages=plan)
    rng = np.random.default_rng(3)
    text = rng.integers(0, 250, 60_000).astype(np.uint8)
    text[rng.choice(60_000, 2500, replace=False)] = 255
    data = DataConfig(documents="mask")
    batches = StagedBatches(TokenStore([text]), config, data, 255)
    seen, expected = set(), []
    for step in range(4, config.steps + 1):
        (index, _), new = config.locate_step(step), False
        count = plan[index].sequences_per_step // ranks
        for rank in range(ranks):
            batch = batches.weighted_batch(step - 1, rank * count, count)
            room = max(span.capacity for span in make_spans(batch.split(plan[index].sequences_per_forward)))
            new |= (index, rank, room) not in seen
            seen.add((index, rank, room))
        expected += [step] * new
    assert find_steps_with_new_capacity(batches, config, ranks, 4) == expected
    assert len(expected) > len(plan) and any(config.locate_step(step)[1] > 1 for step in expected[1:])
    for most in ("MAX_SCANNED_TOKENS", "MAX_SCANNED_ROWS"):
        monkeypatch.setattr(f"nsa_lab.train.packing.{most}", 1)
        assert find_steps_with_new_capacity(batches, config, ranks, 4) == expected[:1], "no more than a step"
        monkeypatch.undo()
    assert find_steps_with_new_capacity(StagedBatches(TokenStore([text]), config, DataConfig()), config, ranks, 1) == []


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.slow
def test_compiled_blocks_serve_every_stage(compiler: CompileCounter) -> None:
    """Above its limit torch silently stops compiling new shapes."""

    def compiled(stages: int) -> int:
        torch.compiler.reset()
        before, layer = compiler.frame_count, Doubled()
        compile_blocks(layer, stages)
        for rows in range(1, 40):
            layer(torch.ones(rows))
        return compiler.frame_count - before

    assert [compiled(stages) for stages in (1, 2, 3)] == [16, 32, 39]


def test_the_last_step_may_have_a_new_capacity() -> None:
    text = np.random.default_rng(3).integers(0, 256, 60_000).astype(np.uint8)
    config = TrainConfig(steps=9, seq_len=32, batch_size=2, lr=1e-3)
    batches = StagedBatches(TokenStore([text]), config, DataConfig(documents="mask"), 255)
    assert find_steps_with_new_capacity(batches, config, 1, 9) == [9]
