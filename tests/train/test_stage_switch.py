"""A switch to another stage compiles nothing, and what was rehearsed for that leaves no trace in the run."""

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

# Three lengths, of which the first comes back.
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

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own modules warn of each other


class Killed(BaseException):
    pass


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what is compiled, and runs it as it was traced."""
    counter, compile_in_place = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compile_in_place(self, **how, backend=counter))
    torch.compiler.reset()
    with dynamo.patch(cache_size_limit=8):
        yield counter
    torch.compiler.reset()


@pytest.fixture
def new_staged_run(tiny: Callable[..., RunConfig], texts: str, tmp_path: Path) -> Make:
    """`new_staged_run(kind, **runtime)`: a run of `STAGES`, of the kinds cross and recipe."""

    def make(kind: str, **runtime: Any) -> Path:
        masked = {"source": "local", "path": texts, "documents": "mask", "max_tokens": None}
        config = tiny(runtime=runtime, **({"model": RECIPE, "data": masked} if kind == "recipe" else {}))
        often = {"save_every": 1, "eval_every": 2, "stats_every": 3, "keep_last": 8}
        return lifecycle.create_run(make_staged_config(config, STAGES, **often), tmp_path / "outputs")

    return make


def told(run_dir: Path) -> list[dict[str, Any]]:
    """What the record says of steps and evaluations, without seconds and bytes."""
    record = [*events.get_step_events(found := events.read_events(run_dir)), *events.get_eval_events(found)]
    return [{key: value for key, value in event.items() if key not in CLOCKS} for event in record]


def assert_the_same(run_dir: Path, other: Path) -> None:
    """Record, and weights, moments and random states after every step, to the byte."""
    assert told(run_dir) == told(other)
    for step in range(1, 9):
        ours, theirs = (folder / f"checkpoints/step-{step:08d}" for folder in (run_dir, other))
        for file in ("model.safetensors", "optimizer.pt", "probe.safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (step, file)


def seed() -> None:
    """What a checkpoint holds of random states, and nothing of training draws from."""
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
    """Of `rehearse`, `step` and `evaluate`, as they are called: how much each compiled."""
    seen: dict[str, list[int]] = {"rehearse": [], "step": [], "evaluate": []}

    def counting(kind: str, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(self: Any, *given: Any, **named: Any) -> Any:
            before = compiler.frame_count
            try:
                return method(self, *given, **named)
            finally:
                seen[kind].append(compiler.frame_count - before)

        monkeypatch.setattr(owner, name, counted)

    counting("rehearse", Trainer, "_compile_ahead")
    counting("step", Trainer, "_train_step")
    counting("evaluate", Trainer, "_evaluate")
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("cross", marks=pytest.mark.soak), "recipe"])
def test_a_switch_compiles_nothing(
    new_staged_run: Make, train: Train, kind: str, compiled_in: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does an evaluation at the new length: all is compiled before the first step, and after a resume anew."""
    run_dir = new_staged_run(kind, compile=True)
    killed_after(train, run_dir, 3, monkeypatch)
    first = {kind: [*counts] for kind, counts in compiled_in.items()}
    assert first["rehearse"][0] > 0 and first["step"][2] == 0 and first["evaluate"][1:] == [0]
    torch.compiler.reset()  # as in another process
    for counts in compiled_in.values():
        counts.clear()
    assert train(run_dir) == 0
    begun, *rest = compiled_in["step"]
    assert compiled_in["rehearse"][0] > 0 and begun > 0, "the stage that goes on is compiled by its first step"
    assert [rest[step - 5] for step in (6, 8)] == [0, 0], "the first steps of the last two stages"
    assert not any(rest), "nor does another number of documents"
    if kind == "cross":
        assert not any(compiled_in["evaluate"][1:])
    ahead = [event for event in events.read_events(run_dir) if event["kind"] == "compile"]
    shapes = [[1, 48], [1, 77], [2, 32]]
    # With documents told apart the first stage needs room for more of them than its first batch has, and comes first.
    wanted = [(0, shapes if kind == "cross" else [shapes[2], *shapes[:2]]), (3, shapes[1:])]
    assert [(event["step"], event["shapes"]) for event in ahead] == wanted
    assert all(event["seconds"] > 0 for event in ahead)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_what_is_rehearsed_leaves_no_trace(
    new_staged_run: Make, train: Train, compiler: CompileCounter, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: after every step of a whole run, and of one that was killed in the second stage and went on."""
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
def test_a_stop_while_it_rehearses_changes_nothing(
    new_staged_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, and after a kill, amid a later stage: nothing of what was entered is saved."""
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


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_every_number_of_documents_is_rehearsed_where_blocks_are_compiled(
    tiny: Callable[..., RunConfig],
    texts: str,
    tmp_path: Path,
    train: Train,
    compiler: CompileCounter,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for that of the first step, which compiles for itself: a later step would for another, kernels and all."""
    masked = {"source": "local", "path": texts, "documents": "mask", "max_tokens": None}
    run_dir = lifecycle.create_run(tiny(runtime={"compile": compiled}, data=masked, eval_every=0), tmp_path / "outputs")
    rooms: dict[str, list[int]] = {"dry_run": [], "step": []}

    def counting(name: str, owner: type, batch_of: Callable[..., Batch]) -> None:
        method = getattr(owner, name)

        def counted(self: Stepper, *given: Any, **named: Any) -> Any:
            spans = make_spans(self.split_micro_batches(batch_of(*given, **named)))
            rooms[name].append(max(span.capacity for span in spans))
            return method(self, *given, **named)

        monkeypatch.setattr(owner, name, counted)

    counting("dry_run", Stepper, lambda batch: batch)
    counting("step", Stepper, lambda inputs, targets, *rest, documents, **_: Batch(inputs, targets, None, documents))
    assert train(run_dir) == 0
    first, *later = rooms["step"][-12:]
    assert rooms["dry_run"] == ([*dict.fromkeys(room for room in later if room != first)] if compiled else [])
    assert len({first, *later}) > 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_step_of_each_room(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By going through the batches themselves, in their stages, a share of each for every rank."""
    plan = [StageConfig(**{**stage, "lr": 1e-3, "warmup_steps": 0}) for stage in ROOMS]
    config = TrainConfig(stages=plan)
    dice = np.random.default_rng(3)
    text = dice.integers(0, 250, 60_000).astype(np.uint8)
    text[dice.choice(60_000, 2500, replace=False)] = 255
    data = DataConfig(documents="mask")
    batches = StagedBatches(TokenStore([text]), config, data, 255)
    seen, wanted = set(), []
    for step in range(4, config.steps + 1):
        (index, _), new = config.locate_step(step), False
        count = plan[index].sequences_per_step // ranks
        for rank in range(ranks):
            batch = batches.weighted_batch(step - 1, rank * count, count)
            room = max(span.capacity for span in make_spans(batch.split(plan[index].sequences_per_forward)))
            new |= (index, rank, room) not in seen
            seen.add((index, rank, room))
        wanted += [step] * new
    assert find_steps_with_new_capacity(batches, config, ranks, 4) == wanted
    assert len(wanted) > len(plan) and any(config.locate_step(step)[1] > 1 for step in wanted[1:])
    for most in ("MAX_SCANNED_TOKENS", "MAX_SCANNED_ROWS"):
        monkeypatch.setattr(f"nsa_lab.train.packing.{most}", 1)
        assert find_steps_with_new_capacity(batches, config, ranks, 4) == wanted[:1], "no more than a step"
        monkeypatch.undo()
    assert find_steps_with_new_capacity(StagedBatches(TokenStore([text]), config, DataConfig()), config, ranks, 1) == []


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_blocks_keep_what_every_stage_compiles(compiler: CompileCounter) -> None:
    """Of shapes beyond its limit torch compiles none, and does not say so."""

    def compiled(stages: int) -> int:
        torch.compiler.reset()
        before, layer = compiler.frame_count, Doubled()
        compile_blocks(layer, stages)
        for rows in range(1, 40):
            layer(torch.ones(rows))
        return compiler.frame_count - before

    assert [compiled(stages) for stages in (1, 2, 3)] == [16, 32, 39]


def test_the_last_step_may_be_the_first_of_its_room() -> None:
    text = np.random.default_rng(3).integers(0, 256, 60_000).astype(np.uint8)
    config = TrainConfig(steps=9, seq_len=32, batch_size=2, lr=1e-3)
    batches = StagedBatches(TokenStore([text]), config, DataConfig(documents="mask"), 255)
    assert find_steps_with_new_capacity(batches, config, 1, 9) == [9]
