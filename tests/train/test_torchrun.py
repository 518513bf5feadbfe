"""Ranks under torchrun: 20 steps equal the steps of one rank, and a killed rank is restarted and resumes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_run import assert_unchanged
from torch import distributed
from torch.distributed import distributed_c10d

from nsa_lab.config import ConfigError
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.lock import process_start
from nsa_lab.train.distributed import World

Make = Callable[..., Path]

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
# The command of docs/howto/multiple_gpus.md. A c10d rendezvous can meet again after a rank was killed.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint"]
STEPS = {"steps": 20, "batch_size": 4, "accumulate_grad_batches": 2, "micro_batch_size": 1, "save_every": 10}
RECIPE = {"model": {"matching_heads": 1, "selection_loss": 0.1}, "nsa": {"l_sel": 4}}


def start_torchrun(run_dir: Path, *options: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(run_dir / directory.LOG, "ab") as log:
        command = [*TORCHRUN, *options, "-m", "nsa_lab.train", str(run_dir)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)


def read_losses(run_dir: Path) -> list[float]:
    record = events.read_events(run_dir)
    return [event["loss"] for event in (*events.get_step_events(record), *events.get_eval_events(record))]


# `make ranks` runs them too. In CI, tests/train/test_fsdp.py compares ranks that share a model with one rank.
@pytest.mark.nightly
@pytest.mark.parametrize(("n_ranks", "parallel"), [(2, "fsdp"), (2, "ddp"), (4, "fsdp"), (4, "ddp")])
def test_twenty_steps_under_torchrun_equal_those_of_one_rank(
    new_run: Make, train: Callable[..., int], n_ranks: int, parallel: str
) -> None:
    shared, single = new_run(**STEPS, **RECIPE, runtime={"parallel": parallel}), new_run(**STEPS, **RECIPE)
    torchrun = start_torchrun(shared, *C10D, "127.0.0.1:0", "--nproc-per-node", str(n_ranks))
    assert train(single) == 0
    assert torchrun.wait() == 0, (shared / directory.LOG).read_text()
    assert len(read_losses(single)) == 25
    assert read_losses(shared) == pytest.approx(read_losses(single), abs=1e-5)
    assert directory.read_status(shared)["status"] == directory.DONE
    assert_unchanged(shared)


KILLED = {
    "batch_size": 2,
    "accumulate_grad_batches": 1,
    "steps": 400,
    "save_every": 20,
    "eval_every": 0,
    "stats_every": 400,
}


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "rendezvous"), [(0, "c10d"), (1, "c10d"), (1, "static"), (1, "two hosts")])
def test_torchrun_restarts_after_a_rank_was_killed(
    new_run: Make, monkeypatch: pytest.MonkeyPatch, rank: int, rendezvous: str
) -> None:
    run_dir, deadline, port = new_run(**KILLED), time.monotonic() + 120, find_free_port()
    per_host, hosts = ("1", 2) if rendezvous == "two hosts" else ("2", 1)
    where = ["--master-port", str(port)] if rendezvous == "static" else [*C10D, f"127.0.0.1:{port}"]
    if hosts > 1:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = [*where, "--nnodes", str(hosts), "--nproc-per-node", per_host, "--max-restarts", "2"]
    agents = [start_torchrun(run_dir, *options) for _ in range(hosts)]
    while not list(run_dir.glob("checkpoints/step-*")):
        alive = all(agent.poll() is None for agent in agents)
        assert alive and time.monotonic() < deadline, (run_dir / directory.LOG).read_text()
        time.sleep(0.02)
    ranks = {number: pid for agent in agents for number, pid in find_ranks(agent.pid).items()}
    os.kill(ranks[rank], signal.SIGKILL)
    assert [agent.wait() for agent in agents] == [0] * hosts, (run_dir / directory.LOG).read_text()
    record = events.read_events(run_dir)
    (resume,) = [event for event in record if event["kind"] == "resume"]
    assert resume["attempt"] == 2 and resume["from_step"] >= 20
    assert directory.read_status(run_dir)["status"] == directory.DONE
    assert events.get_step_events(record)[-1]["step"] == KILLED["steps"]
    assert all(process_start(pid) is None for pid in ranks.values())
    assert_unchanged(run_dir)


@pytest.mark.nightly
def test_torchrun_does_not_restart_a_run_that_was_stopped(new_run: Make) -> None:
    run_dir, deadline = new_run(**{**KILLED, "save_every": 0}), time.monotonic() + 120
    agent = start_torchrun(run_dir, *C10D, "127.0.0.1:0", "--nproc-per-node", "2", "--max-restarts", "2")
    while not events.get_step_events(events.read_events(run_dir)):
        assert agent.poll() is None and time.monotonic() < deadline, (run_dir / directory.LOG).read_text()
        time.sleep(0.02)
    lifecycle.request_stop(run_dir)
    assert agent.wait() == 0, (run_dir / directory.LOG).read_text()
    status = directory.read_status(run_dir)
    assert (status["status"], status["exit_code"], status["attempt"]) == (directory.PREEMPTED, directory.EXIT_STOPPED, 1)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def find_ranks(torchrun: int) -> dict[int, int]:
    """Return the process of each rank that torchrun started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    found = {}
    for pid, variables in environments.items():
        found.update({int(value[5:]): pid for value in variables if value.startswith(b"RANK=")})
    return found


def test_an_incomplete_environment_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    cases: list[tuple[dict[str, str], str]] = [
        (
            {"WORLD_SIZE": "1"},
            r"WORLD_SIZE=1 is set, but RANK is not; start the ranks with torchrun .* or unset RANK and W",
        ),
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': expected a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1': expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected RANK below WORLD_SIZE, got RANK=2, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "expected RANK below WORLD_SIZE, got RANK=0, WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 needs MASTER_ADDR and MASTER_PORT too"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2 needs MASTER_PORT too"),
    ]
    for variables, message in cases:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=rf"^environment: .*{message}"):
            World.from_environment().init_process_group(torch.device("cpu"))
    assert World.from_environment() == World(0, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert World.from_environment(tmp_path) == World(0, 2, 1, 2, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR")
    World.from_environment().init_process_group(torch.device("cpu"))  # one rank meets nobody


def test_a_rank_that_fails_with_nccl_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    for backend, is_alone in (("nccl", True), ("nccl", False), ("gloo", True)):
        monkeypatch.setattr(distributed, "get_backend", lambda backend=backend: backend)
        World(0, 2).destroy_process_group(is_alone=is_alone)
    World().destroy_process_group(is_alone=True)
    assert calls == ["abort", "destroy", "destroy"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_cluster_image_with_half_an_environment_gets_one_line(new_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    run_dir = new_run()
    with open(run_dir / directory.LOG, "ab") as log:
        command = [sys.executable, "-m", "nsa_lab.train", str(run_dir)]
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    output = (run_dir / directory.LOG).read_text()
    assert code == directory.EXIT_USAGE and "Traceback" not in output, output
    status = directory.read_status(run_dir)
    assert status["status"] == directory.HALTED and status["exit_code"] == directory.EXIT_USAGE
    assert "WORLD_SIZE=1 is set, but RANK is not" in status["reason"] and status["reason"] in output


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(sys.platform != "linux", reason="reads open sockets from /proc")
def test_ranks_of_one_host_listen_on_no_other_interface(new_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = new_run(steps=3000, batch_size=2, accumulate_grad_batches=1, eval_every=0, save_every=0)
    supervisor, deadline = lifecycle.start(run_dir, ranks=2), time.monotonic() + 60
    try:
        while not events.get_step_events(events.read_events(run_dir)):
            assert time.monotonic() < deadline, (run_dir / directory.LOG).read_text()
            time.sleep(0.02)
        owner = json.loads((run_dir / directory.LOCK).read_text())
        ranks = [rank["pid"] for rank in owner["ranks"]]
        addresses = [address for pid in (supervisor, *ranks) for address in list_listening_addresses(pid)]
        assert len(ranks) == 2 and addresses, "gloo listens"
        assert all(address.startswith("127.") or address == "::1" for address in addresses), addresses
    finally:
        os.kill(supervisor, signal.SIGKILL)
        lifecycle.wait(run_dir, 10)


def list_listening_addresses(pid: int) -> list[str]:
    """Return the local addresses at which a process accepts TCP connections."""
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    sockets, found = {os.readlink(descriptor) for descriptor in descriptors}, []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                # Words of four bytes, each in the order of this machine.
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, packed))
    return found
