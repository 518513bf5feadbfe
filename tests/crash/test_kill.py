"""A run that is killed at any moment, any number of times, ends with the weights of an uninterrupted run, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_run import assert_unchanged
from forker import Forker

from nsa_lab.config import RunConfig
from nsa_lab.runs import directory, events, lifecycle

STEPS, KILLS = 100, 20

# The same steps as one stage, and as three stages with other lengths, batches and learning rates, with Muon. Also steps
# that one process and two ranks compute bit for bit alike: two sequences in separate micro-batches, so that there is one
# sum in one order.
PLANS: dict[str, dict[str, Any]] = {
    "one": {"steps": STEPS, "seq_len": 32, "batch_size": 2, "accumulate_grad_batches": 2, "lr": 1e-2},
    "stages": {
        "optimizer": "muon",
        "stages": [
            {"steps": 33, "seq_len": 32, "batch_size": 2, "accumulate_grad_batches": 2, "lr": 1e-2},
            {"steps": 27, "seq_len": 48, "batch_size": 2, "lr": 5e-3, "warmup_steps": 10},
            {"steps": 40, "seq_len": 77, "batch_size": 1, "lr": 3e-3, "min_lr": 1e-3, "rope_theta": 5e5},
        ],
    },
    "ranks": {"steps": STEPS, "seq_len": 32, "batch_size": 2, "micro_batch_size": 1, "lr": 1e-2},
}
TABLES = {"ngrams": 3, "ngram_rows": 50, "ngram_width": 4}
# Indices of the kills that hit the supervisor of two ranks.
SUPERVISOR_KILLS = (7, 15)

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("forked")]


def start(run_dir: Path) -> subprocess.Popen:
    """Start an attempt at a run in a new process."""
    return subprocess.Popen([sys.executable, "-m", "nsa_lab.train", run_dir], start_new_session=True)


@pytest.fixture(
    scope="module", params=[pytest.param(plan, marks=pytest.mark.nightly) if plan == "ranks" else plan for plan in PLANS]
)
def config(request: pytest.FixtureRequest) -> RunConfig:
    return RunConfig.from_dict(
        {
            "name": "killed",
            "model": {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 4, "d_v": 4} | TABLES,
            "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16},
            "runtime": {"device": "cpu", "heartbeat_s": 0.05},
            "data": {"source": "synthetic", "max_tokens": 50_000, "val_fraction": 0.2},
            "train": {
                **PLANS[request.param],
                "log_every": 1,
                "stats_every": 10,
                "eval_every": 20,
                "eval_batches": 1,
                "save_every": 3,
                "spike_sigma": 50.0,
            },
        }
    )


@pytest.fixture(scope="module")
def uninterrupted(forker: Forker, config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = lifecycle.create_run(config, tmp_path_factory.mktemp("whole"))
    with forker.forking():
        assert start(run_dir).wait() == 0
    return run_dir


def final_files(run_dir: Path) -> dict[str, str]:
    """Return sha256 of the weights and of the probe of the last checkpoint."""
    manifest = json.loads((run_dir / f"checkpoints/step-{STEPS:08d}/MANIFEST.json").read_text())
    return {name: manifest["files"][name]["sha256"] for name in ("model.safetensors", "probe.safetensors")}


def kill_supervisor(run_dir: Path, attempts: int, rng: random.Random) -> None:
    """Train a few steps with two ranks, launched as a user would, and kill only their supervisor."""
    supervisor = lifecycle.start(run_dir, ranks=2)
    wait_for_steps(run_dir, attempts, rng.randint(2, 8))
    ranks = [rank["pid"] for rank in json.loads((run_dir / directory.LOCK).read_text())["ranks"]]
    started = next(e for e in reversed(events.read_events(run_dir)) if e["kind"] in ("start", "resume"))
    os.kill(supervisor, signal.SIGKILL)
    assert len(ranks) == started["ranks"] == 2 and started["attempt"] == attempts + 1
    # The ranks hold the lock too, so it is free only when both are gone.
    assert lifecycle.wait(run_dir, 10)


def wait_for_steps(run_dir: Path, before: int, count: int) -> None:
    """Wait until an attempt after attempt `before` has logged `count` steps."""
    tail, seen, deadline = events.Tail(run_dir), -1, time.monotonic() + 60
    while seen < count and time.monotonic() < deadline:
        for event in tail.read():
            if event["attempt"] > before:
                seen += event["kind"] in ("start", "resume", "step")
        time.sleep(0.002)


@pytest.mark.slow
def test_a_run_killed_many_times_ends_with_the_weights_of_the_uninterrupted_run(
    config: RunConfig, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir, rng = lifecycle.create_run(config, tmp_path), random.Random(20)
    for kill in range(KILLS):
        attempts = max((e["attempt"] for e in events.read_events(run_dir)), default=0)
        if kill in SUPERVISOR_KILLS and config.train.micro_batch_size:
            kill_supervisor(run_dir, attempts, rng)
            continue
        trainer = start(run_dir)
        # One in four is killed before or during the restore; the others a few steps later, in a step, an evaluation or a
        # save.
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0, 0.1))
        else:
            wait_for_steps(run_dir, attempts, rng.randint(0, 11))
            time.sleep(rng.uniform(0, 0.02))
        trainer.kill()
        if trainer.wait() != -signal.SIGKILL:
            pytest.fail(f"the run ended before kill {kill + 1} of {KILLS}; give it more steps")
        assert not lifecycle.is_alive(run_dir) and lifecycle.get_state(run_dir) != directory.RUNNING
        assert_unchanged(run_dir)
    assert start(run_dir).wait() == 0
    assert final_files(run_dir) == final_files(uninterrupted)
    assert_one_story(run_dir, uninterrupted)
    assert_unchanged(run_dir)
    assert directory.read_status(run_dir)["events_digest"]


def assert_one_story(run_dir: Path, uninterrupted: Path) -> None:
    """Assert that every step is recorded exactly once, with the numbers of the uninterrupted run."""
    steps_recorded, whole = (events.get_step_events(events.read_events(d)) for d in (run_dir, uninterrupted))
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    assert [[e[k] for k in keys] for e in steps_recorded] == [[e[k] for k in keys] for e in whole]
    steps_recorded, whole = (events.get_eval_events(events.read_events(d)) for d in (run_dir, uninterrupted))
    assert [(e["step"], e["loss"]) for e in steps_recorded] == [(e["step"], e["loss"]) for e in whole]


@pytest.mark.slow
def test_each_stop_request_saves_and_the_run_resumes_bit_for_bit(
    config: RunConfig, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir, names = lifecycle.create_run(config, tmp_path), ["SIGTERM", "SIGINT", "SIGUSR1"]
    for attempt, name in enumerate(names, 1):
        trainer = start(run_dir)
        while not any(e["kind"] == "step" and e["attempt"] == attempt for e in events.read_events(run_dir)):
            time.sleep(0.01)
        trainer.send_signal(getattr(signal, name))
        assert trainer.wait() == directory.EXIT_STOPPED
        assert lifecycle.get_state(run_dir) == directory.PREEMPTED
        assert_unchanged(run_dir)
    assert [e["signal"] for e in events.read_events(run_dir) if e["kind"] == "signal"] == names
    assert start(run_dir).wait() == 0
    assert final_files(run_dir) == final_files(uninterrupted)
    assert_one_story(run_dir, uninterrupted)
