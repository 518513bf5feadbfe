"""Ranks that share a batch compute what one rank computes, and halt together."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nsa_lab.config import RunConfig
from nsa_lab.health.record import OF_ANY_MODEL, OF_BRANCHES
from nsa_lab.runs import directory, events, launch
from nsa_lab.train import ranks

Make = Callable[..., Path]

pytestmark = pytest.mark.timeout(120)

CHANGES = {
    "steps": 20,
    "batch_size": 4,
    "accumulate_grad_batches": 2,
    "micro_batch_size": 1,
    "save_every": 10,
    "eval_every": 10,
}


def run_with(run_dir: Path, count: int, fault: str = "none") -> int:
    script = Path(__file__).with_name("scripted.py")
    return ranks.supervise([sys.executable, str(script), str(run_dir), fault, "--supervised"], count)


def losses(run_dir: Path) -> list[float]:
    record = events.read_events(run_dir)
    return [e["loss"] for e in (*events.steps(record), *events.evaluations(record))]


def statistics_of(run_dir: Path) -> dict[int, dict[str, list[float]]]:
    """By step and name, what was recorded layer by layer."""
    record = events.steps(events.read_events(run_dir))
    return {
        event["step"]: {name: value for name, value in event.items() if isinstance(value, list)}
        for event in record
        if "gate_entropy" in event
    }


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_same_global_batch_gives_the_same_losses(new_run: Make, train: Callable[..., int], count: int) -> None:
    alone, shared = new_run(**CHANGES), new_run(**CHANGES)
    assert train(alone) == 0
    assert run_with(shared, count) == 0
    assert len(losses(alone)) == 23
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-6)
    start = next(e for e in events.read_events(shared) if e["kind"] == "start")
    assert start["ranks"] == count


@pytest.mark.slow
def test_sharded_ranks_compute_the_same_and_their_checkpoint_is_anybodys(new_run: Make, train: Callable[..., int]) -> None:
    alone, shared = new_run(**CHANGES), new_run(**CHANGES, runtime={"parallel": "fsdp"})
    assert train(alone) == 0
    assert run_with(shared, 2) == 0
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-5)
    # What the layers and branches do is recorded of them, too, and it is what one rank sees on the same sequences.
    one, two = (statistics_of(run_dir) for run_dir in (alone, shared))
    assert list(one) == list(two) == [4, 8, 12, 16, 20] and two[4].keys() == one[4].keys() >= set(
        OF_ANY_MODEL + OF_BRANCHES
    )
    for step, told in one.items():
        for name, values in told.items():
            assert two[step][name] == pytest.approx(values, rel=1e-3, abs=1e-4), (step, name)
    start, halves = (next(e for e in events.steps(events.read_events(run)) if e["step"] == 1) for run in (alone, shared))
    assert 0 < halves["weight_bytes"]["float32"] < 0.7 * start["weight_bytes"]["float32"], "a rank holds its shard"
    shutil.rmtree(shared / "checkpoints/step-00000020")
    assert run_with(shared, 2) == 0, "sharded ranks resume"
    shutil.rmtree(shared / "checkpoints/step-00000020")
    assert train(shared) == 0, "and so does one rank, from what they saved"
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.slow
def test_weights_and_stages_are_shared_like_any_batch(new_run: Make, train: Callable[..., int], tmp_path: Path) -> None:
    """What all tokens weigh is known to no rank alone."""
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, and one to go. " * 20)
    recall = {"source": "recall", "path": str(tmp_path / "texts"), "val_fraction": 0.3, "max_tokens": None}
    short = {"statement": "{name}={value}. ", "question": "{name}?", "value_length": 3, "bytes_per_fact": 90}
    stages = [
        {"steps": 5, "seq_len": 160, "batch_size": 4, "micro_batch_size": 1, "lr": 1e-3},
        {"steps": 5, "seq_len": 270, "batch_size": 2, "lr": 1e-3},
    ]
    sections = {"data": recall | short, "train": {"stages": stages, "log_every": 1, "eval_every": 5, "save_every": 0}}
    alone, shared = (launch.create_run(staged(new_run(), sections), tmp_path / name) for name in ("alone", "shared"))
    assert train(alone) == 0
    assert run_with(shared, 2) == 0
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-6)
    apart = [
        [(e["bpb"], e["marked_loss"]) for e in events.steps(events.read_events(run_dir))] for run_dir in (alone, shared)
    ]
    assert len(apart[0]) == 10 and np.array(apart[1]) == pytest.approx(np.array(apart[0]), abs=1e-5)


def staged(run_dir: Path, sections: dict) -> RunConfig:
    """The tiny run's model, with data and training of another kind."""
    return RunConfig.from_dict({**RunConfig.from_yaml(run_dir / directory.CONFIG).to_dict(), **sections})


@pytest.mark.slow
def test_a_nan_on_one_rank_halts_all_within_a_step(new_run: Make) -> None:
    run_dir = new_run(**CHANGES)
    assert run_with(run_dir, 2, "nan_on_rank_1") == directory.EXIT_HALTED
    assert directory.read_status(run_dir)["status"] == "HALTED"
    guard = next(e for e in events.read_events(run_dir) if e["kind"] == "guard")
    assert guard["rule"] == "non_finite"
    bundles = sorted(run_dir.glob("halt-*/*.json"))
    assert [b.name for b in bundles] == ["diagnosis-rank1.json", "diagnosis.json"]
    assert json.loads(bundles[0].read_text())["micro_batch_losses"][0] == "nan"
    saved = [e["step"] for e in events.read_events(run_dir) if e["kind"] == "checkpoint"]
    assert saved == [guard["step"] - 1]


@pytest.mark.slow
def test_a_batch_that_ranks_cannot_share_is_refused(new_run: Make) -> None:
    run_dir = new_run(batch_size=1, accumulate_grad_batches=1)
    assert run_with(run_dir, 2) == directory.EXIT_USAGE
    assert "ranks" in directory.read_status(run_dir)["reason"] and launch.state(run_dir) == "HALTED"
