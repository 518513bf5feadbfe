"""Stop requests: a trainer stops in every phase, and one that is stuck ends at the second request."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsa_lab.runs import directory, events, lifecycle

Make = Callable[..., Path]

SCRIPT = Path(__file__).with_name("faulty_trainer.py")

pytestmark = pytest.mark.timeout(60)


class Trainer(subprocess.Popen):
    """A running trainer with a planted fault."""

    def __init__(self, run_dir: Path, fault: str) -> None:
        super().__init__([sys.executable, SCRIPT, run_dir, *fault.split()], stdout=subprocess.PIPE, text=True)

    def says(self, word: str) -> bool:
        return self.stdout.readline() == word + "\n"


@pytest.fixture
def scripted(new_run: Make, forked: None) -> Iterator[Callable[..., tuple[Path, Trainer]]]:
    """`scripted(fault, **changes)`: a run and its running trainer with that fault."""
    with contextlib.ExitStack() as trainers:

        def start(fault: str, **changes: object) -> tuple[Path, Trainer]:
            run_dir = new_run(**changes)
            trainer = trainers.enter_context(Trainer(run_dir, fault))
            # Clean up after a failed test.
            trainers.callback(trainer.kill)
            return run_dir, trainer

        yield start


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_done(run_dir: Path) -> int:
    return max((e["step"] for e in events.read_events(run_dir) if e["kind"] == "step"), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "done"), [("slow_data", 3), ("slow_eval", 6), ("slow_compile", 0)])
def test_a_stop_request_is_handled_while_waiting(scripted: Callable, fault: str, done: int) -> None:
    run_dir, trainer = scripted(fault)
    assert trainer.says("waiting")
    wait_until(lambda: steps_done(run_dir) == done)
    calls = time.monotonic()
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait() == directory.EXIT_STOPPED
    assert time.monotonic() - calls < 5
    saved = [e["step"] for e in events.read_events(run_dir) if e["kind"] == "checkpoint"]
    assert max(saved, default=0) == done
    status = directory.read_status(run_dir)
    assert status["status"] == "PREEMPTED" and status["exit_code"] == 75 and "SIGTERM" in status["reason"]


@pytest.mark.slow
def test_a_stop_takes_effect_between_micro_batches(scripted: Callable) -> None:
    run_dir, trainer = scripted("slow_step", batch_size=1, accumulate_grad_batches=8)
    wait_until(lambda: steps_done(run_dir) >= 1)
    calls = time.monotonic()
    trainer.send_signal(signal.SIGUSR1)
    assert trainer.wait() == directory.EXIT_STOPPED
    assert time.monotonic() - calls < 2.0, "a step takes 2.4 seconds"


@pytest.mark.slow
def test_the_second_request_ends_even_a_trainer_that_never_returns_to_python(scripted: Callable) -> None:
    run_dir, trainer = scripted("deaf")
    assert trainer.says("deaf")
    trainer.send_signal(signal.SIGTERM)
    wait_until(lambda: any(e["kind"] == "signal" for e in events.read_events(run_dir)))
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait() == directory.EXIT_STOPPED
    assert directory.read_status(run_dir)["status"] == "PREEMPTED"


@pytest.mark.slow
def test_sigusr2_writes_the_stacks_and_the_run_continues(scripted: Callable) -> None:
    run_dir, trainer = scripted("none", steps=60, save_every=0)
    wait_until(lambda: steps_done(run_dir) >= 1)
    trainer.send_signal(signal.SIGUSR2)
    assert trainer.wait() == 0
    assert "trainer.py" in (run_dir / "stacks.txt").read_text()


def test_signal_handlers_are_restored(new_run: Make, train: Callable[..., int]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert train(new_run(steps=3)) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


@pytest.mark.slow
def test_a_stop_before_the_first_step_saves_nothing_and_the_run_can_start_later(
    new_run: Make, train: Callable[..., int]
) -> None:
    run_dir = new_run()
    from nsa_lab.train.build import Builders

    def data(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    assert train(run_dir, builders=Builders(data=data)) == directory.EXIT_STOPPED
    assert lifecycle.get_state(run_dir) == "PREEMPTED" and train(run_dir) == 0


JUDGED = {"stall_action": "halt", "runtime": {"heartbeat_s": 0.1}}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "phase", "done"), [("slow_data", "data", 3), ("slow_eval", "eval", 6)])
def test_a_stall_with_stall_action_halt_saves_and_halts(scripted: Callable, fault: str, phase: str, done: int) -> None:
    run_dir, trainer = scripted(f"{fault} judged", **JUDGED)
    assert trainer.says("waiting")
    assert trainer.wait() == directory.EXIT_HALTED
    message, record = directory.read_status(run_dir), events.read_events(run_dir)
    assert (
        message["status"] == "HALTED"
        and message["exit_code"] == 3
        and f"the phase {phase} has made no progress" in message["reason"]
    )
    assert [e["phase"] for e in record if e["kind"] == "stall"] == [phase]
    (guard,) = [e for e in record if e["kind"] == "guard"]
    assert (guard["rule"], guard["action"], guard["step"]) == ("stall", "halt", done)
    assert [e["step"] for e in record if e["kind"] == "checkpoint"][-1] == done, "what was done is saved"
    assert "faulty_trainer.py" in (run_dir / "stacks.txt").read_text() and "Thread" in (run_dir / "stacks.txt").read_text()


@pytest.mark.slow
def test_a_stall_halts_even_a_trainer_that_never_returns_to_python(scripted: Callable) -> None:
    run_dir, trainer = scripted("deaf judged", save_every=1, **JUDGED)
    assert trainer.says("deaf")
    assert trainer.wait() == directory.EXIT_HALTED
    message, record = directory.read_status(run_dir), events.read_events(run_dir)
    assert message["status"] == "HALTED" and message["exit_code"] == 3
    assert "did not respond to the request to save" in message["reason"]
    assert record[-1]["kind"] == "halt" and record[-1]["reason"] == message["reason"]
    assert "stall in step" in (run_dir / "stacks.txt").read_text()


@pytest.mark.slow
def test_a_stall_with_stall_action_warn_does_not_end_the_run(scripted: Callable) -> None:
    run_dir, trainer = scripted("slow_eval judged", runtime={"heartbeat_s": 0.1})
    assert trainer.says("waiting")
    wait_until(lambda: any(e["kind"] == "stall" for e in events.read_events(run_dir)))
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait() == directory.EXIT_STOPPED
    assert not [e for e in events.read_events(run_dir) if e["kind"] == "guard"]
