"""Several ranks that share a batch compute the same as one rank, and halt together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_run import assert_unchanged
from forker import start_anew
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.health.completeness_checks import list_layer_statistics
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.lock import lock_owner, process_start, sign_lock, take_lock
from nsa_lab.train import launcher
from nsa_lab.train.distributed import World
from nsa_lab.train.validation import _assign_batches

Make = Callable[..., Path]

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked")]

CHANGES = {
    "steps": 20,
    "batch_size": 4,
    "accumulate_grad_batches": 2,
    "micro_batch_size": 1,
    "save_every": 10,
    "eval_every": 10,
}
# Blocks of four tokens, so that selection has a choice among 32 tokens.
RECALL = {"model": {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1}, "nsa": {"l_sel": 4}}


@pytest.fixture(autouse=True)
def _nobody_stays(tmp_path: Path) -> Iterator[None]:
    """Kill the trainers that a failed test left running."""
    yield
    for lock in tmp_path.glob(f"outputs/*/{directory.LOCK}"):
        if owner := lock_owner(lock.parent):
            os.kill(owner["pid"], signal.SIGKILL)


def run_with(run_dir: Path, count: int, fault: str = "none") -> int:
    script = Path(__file__).with_name("faulty_trainer.py")
    return subprocess.run([sys.executable, script, run_dir, fault, str(count)], check=False).returncode


def losses(run_dir: Path) -> list[float]:
    record = events.read_events(run_dir)
    added = [e["selection_loss"] for e in events.get_step_events(record) if "selection_loss" in e]
    return [e["loss"] for e in (*events.get_step_events(record), *events.get_eval_events(record))] + added


def statistics_of(run_dir: Path) -> dict[int, dict[str, list[float]]]:
    """Return the per-layer statistics in the events, by step and name."""
    record = events.get_step_events(events.read_events(run_dir))
    return {
        event["step"]: {name: value for name, value in event.items() if isinstance(value, list)}
        for event in record
        if "gate_entropy" in event
    }


# In CI, a test below compares two ranks with one in two stages of weighted tokens, and another the weights bit for bit.
@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
def test_the_same_global_batch_gives_the_same_losses(new_run: Make, train: Callable[..., int], count: int) -> None:
    single_rank, shared = new_run(**CHANGES), new_run(**CHANGES)
    assert train(single_rank) == 0
    assert run_with(shared, count) == 0
    assert len(losses(single_rank)) == 23
    assert losses(shared) == pytest.approx(losses(single_rank), abs=1e-6)
    start = next(e for e in events.read_events(shared) if e["kind"] == "start")
    assert start["ranks"] == count


@pytest.mark.slow
def test_two_ranks_with_muon_end_with_the_weights_of_one_bit_for_bit(new_run: Make, train: Callable[..., int]) -> None:
    """With two sequences in separate micro-batches there is only one sum, in any order."""
    two = {"steps": 10, "batch_size": 2, "accumulate_grad_batches": 1, "micro_batch_size": 1, "save_every": 0}
    single_rank, shared = (new_run(**two, optimizer="muon") for _ in range(2))
    assert train(single_rank) == 0
    assert run_with(shared, 2) == 0
    weights = [(run / "checkpoints/step-00000010/model.safetensors").read_bytes() for run in (single_rank, shared)]
    assert weights[0] == weights[1] and losses(single_rank) == losses(shared)
    assert next(e for e in events.read_events(shared) if e["kind"] == "start")["ranks"] == 2


@pytest.mark.nightly
def test_sharded_ranks_compute_the_same_and_their_checkpoint_is_portable(new_run: Make, train: Callable[..., int]) -> None:
    single_rank, shared = new_run(**CHANGES, **RECALL), new_run(**CHANGES, **RECALL, runtime={"parallel": "fsdp"})
    assert train(single_rank) == 0
    assert run_with(shared, 2) == 0
    assert len(losses(single_rank)) == 43 and losses(single_rank)[-1] > 0
    assert losses(shared) == pytest.approx(losses(single_rank), abs=1e-5)
    # Statistics of layers and branches are recorded too, and equal those of one rank on the same sequences.
    one, two = (statistics_of(run_dir) for run_dir in (single_rank, shared))
    names = list_layer_statistics(RunConfig.from_yaml(shared / "config.yaml").model)
    assert list(one) == list(two) == [4, 8, 12, 16, 20] and two[4].keys() == one[4].keys() >= set(names)
    for step, recorded in one.items():
        for name, values in recorded.items():
            assert two[step][name] == pytest.approx(values, rel=1e-3, abs=1e-4), (step, name)
    start, halves = (
        next(e for e in events.get_step_events(events.read_events(run)) if e["step"] == 1) for run in (single_rank, shared)
    )
    assert 0 < halves["weight_bytes"]["float32"] < 0.7 * start["weight_bytes"]["float32"], "a rank holds its shard"
    shutil.rmtree(shared / "checkpoints/step-00000020")
    assert run_with(shared, 2) == 0, "sharded ranks resume"
    shutil.rmtree(shared / "checkpoints/step-00000020")
    assert train(shared) == 0, "and so does one rank, from what they saved"
    assert losses(shared) == pytest.approx(losses(single_rank), abs=1e-5)


@pytest.mark.slow
def test_weights_and_stages_are_shared_like_any_batch(new_run: Make, train: Callable[..., int], tmp_path: Path) -> None:
    """No rank knows the total weight of all tokens without a reduction."""
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
    single_rank, shared = (
        lifecycle.create_run(staged(new_run(), sections), tmp_path / name) for name in ("alone", "shared")
    )
    assert train(single_rank) == 0
    assert run_with(shared, 2) == 0
    assert losses(shared) == pytest.approx(losses(single_rank), abs=1e-6)
    by_ranks = [
        [(e["bpb"], e["marked_loss"]) for e in events.get_step_events(events.read_events(run_dir))]
        for run_dir in (single_rank, shared)
    ]
    assert len(by_ranks[0]) == 10 and np.array(by_ranks[1]) == pytest.approx(np.array(by_ranks[0]), abs=1e-5)


def staged(run_dir: Path, sections: dict) -> RunConfig:
    """Write the configuration of the run with other sections."""
    return RunConfig.from_dict({**RunConfig.from_yaml(run_dir / directory.CONFIG).to_dict(), **sections})


@looped
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_every_held_out_batch_has_one_rank_and_all_ranks_read_the_same_number(count: int, size: int) -> None:
    shares = [_assign_batches(count, SimpleNamespace(world=World(rank, size))) for rank in range(size)]
    assert {len(share) for share in shares} == {-(-count // size)}
    assert sorted(index for share in shares for index, weight in share if weight) == list(range(count))
    assert {weight for share in shares for _, weight in share} <= {0.0, 1.0}


def test_broadcast_from_first_ignores_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: None)
    assert [World(rank, 3).broadcast_from_first(5.0, torch.device("cpu")) for rank in range(3)] == [5.0, 0.0, 0.0]


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
    assert_unchanged(run_dir)


@pytest.mark.slow
def test_ranks_share_the_sequence_of_a_batch_of_one(new_run: Make) -> None:
    run_dir = new_run(batch_size=1, accumulate_grad_batches=1)
    assert run_with(run_dir, 2) == directory.EXIT_DONE and lifecycle.get_state(run_dir) == "DONE"


LONG = {"steps": 3000, "eval_every": 0, "save_every": 20, "batch_size": 2, "accumulate_grad_batches": 1}


def signed_ranks(run_dir: Path) -> list[int]:
    return [rank["pid"] for rank in json.loads((run_dir / directory.LOCK).read_text())["ranks"]]


def wait_for(what: Callable[[], object], run_dir: Path) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, (run_dir / directory.LOG).read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_die_with_their_supervisor_and_exclude_other_trainers(new_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = new_run(**LONG)
    supervisor = lifecycle.start(run_dir, ranks=2)
    wait_for(lambda: events.get_step_events(events.read_events(run_dir)), run_dir)
    first, second = signed_ranks(run_dir)
    assert lock_owner(run_dir)["pid"] == supervisor == lifecycle.attach(run_dir)
    os.kill(supervisor, signal.SIGKILL)
    assert lifecycle.wait(run_dir, 10), "the ranks are gone, or the lock would be held"
    assert lifecycle.get_state(run_dir) == "DEAD"
    wait_for(lambda: gone(first) and gone(second), run_dir)
    seen = len(events.read_events(run_dir))
    time.sleep(0.3)
    assert len(events.read_events(run_dir)) == seen, "nobody trains on"
    lifecycle.resume(run_dir, ranks=2)
    wait_for(lambda: any(e["attempt"] == 2 and e["kind"] == "step" for e in events.read_events(run_dir)), run_dir)
    assert lifecycle.stop(run_dir) == "PREEMPTED"


def gone(pid: int) -> bool:
    return process_start(pid) is None


@pytest.fixture
def family(new_run: Make) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A run whose lock is held by a rank that outlived its supervisor and is bound to no other."""
    run_dir = new_run()
    lock = take_lock(run_dir)
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[lock])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    sign_lock(lock, gone.pid, [gone.pid, rank.pid])
    gone.wait()
    os.close(lock)
    yield run_dir, rank
    rank.kill()
    rank.wait()


def test_resume_refuses_while_a_rank_lives_and_names_it(family: tuple[Path, subprocess.Popen]) -> None:
    run_dir, rank = family
    assert lifecycle.is_alive(run_dir)
    for call in (lifecycle.resume, lifecycle.start, lifecycle.attach, lifecycle.stop):
        with pytest.raises(directory.RunDirectoryError, match=rf"rank 1 \(process {rank.pid}\) is alive"):
            call(run_dir)
    rank.kill()
    rank.wait()
    assert not lifecycle.is_alive(run_dir)


@pytest.mark.parametrize("way", ["the kernel", "the pipe"])
def test_a_rank_ends_with_its_supervisor_through_either_mechanism(tmp_path: Path, way: str) -> None:
    """A process supervises one rank that only waits. One of the two mechanisms is disabled."""
    without = {
        "the kernel": "launcher._kill_when_supervisor_ends = lambda pipe: None",
        "the pipe": "launcher.sys.platform = 'another system'",
    }[way]
    rank = (
        "import sys, time; from nsa_lab.train import launcher\n"
        f"{without}\n"
        "launcher.bind_to_supervisor(sys.argv[2]); print('bound', flush=True); time.sleep(60)"
    )
    supervisor = (
        "import os, sys; from pathlib import Path; from nsa_lab.train import launcher\n"
        f"lock = os.open({str(tmp_path / 'lock')!r}, os.O_CREAT | os.O_RDWR)\n"
        f"launcher.supervise([sys.executable, '-c', {rank!r}], Path({str(tmp_path)!r}), 1, lock)"
    )
    parent = subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout.readline() == "bound\n"
    (pid,) = (r["pid"] for r in json.loads((tmp_path / "lock").read_text())["ranks"])
    parent.kill()
    parent.wait()
    # Our pipe ends when the last process that holds it, the rank, ends.
    assert parent.stdout.read() == ""
    parent.stdout.close()
    wait_for(lambda: gone(pid), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_killed_is_named_by_its_signal(new_run: Make, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = new_run(**LONG)
    with monkeypatch.context() as patch:
        if rank == 1:
            # One case starts them as users do, each in a new interpreter.
            patch.setattr(subprocess, "_fork_exec", start_anew)
        lifecycle.start(run_dir, ranks=2)
    wait_for(lambda: events.get_step_events(events.read_events(run_dir)), run_dir)
    os.kill(signed_ranks(run_dir)[rank], signal.SIGKILL)
    assert lifecycle.wait(run_dir, 40)
    message = directory.read_status(run_dir)
    assert message["status"] == directory.HALTED and message["exit_code"] == directory.EXIT_BUG
    assert message["reason"].startswith(f"rank {rank} was killed (signal 9)")
    last = events.read_events(run_dir).of_kind("end", "halt")[-1]
    assert_unchanged(run_dir)
    assert last["kind"] == "halt" and last["reason"] == message["reason"] and last["step"] == message["step"] > 0
    (cause,) = [e for e in events.read_events(run_dir) if e["kind"] == "error" and e.get("cause")]
    assert (cause["where"], cause["type"], cause["message"]) == (f"rank {rank}", "SIGKILL", message["reason"])


def test_the_rank_ended_by_a_signal_is_reported_before_later_failures() -> None:
    ends = ["sys.exit(1)", "os.kill(os.getpid(), 6)", "os.kill(os.getpid(), 9)", "sys.exit(0)"]
    processes = [subprocess.Popen([sys.executable, "-c", f"import os, sys; {end}"]) for end in ends]
    for process in processes:
        process.wait()
    assert launcher.wait_for_ranks(processes) == (2, -signal.SIGKILL)
    assert launcher.wait_for_ranks(processes[:2]) == (1, -signal.SIGABRT)
    assert launcher.wait_for_ranks(processes[:1]) == (0, 1) and launcher.wait_for_ranks(processes[3:]) is None
