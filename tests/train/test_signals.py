"""Stop requests: a trainer stops in every phase, and one that is stuck ends at the second request."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_run import assert_unchanged

from nsa_lab.data import prefetch
from nsa_lab.health import list_verdicts
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.train.telemetry import awake_clock, event_log, heartbeat, phases

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


@pytest.mark.nightly
def test_a_stall_halts_even_a_trainer_that_never_returns_to_python(scripted: Callable) -> None:
    run_dir, trainer = scripted("deaf judged", save_every=1, **JUDGED)
    assert trainer.says("deaf")
    assert trainer.wait() == directory.EXIT_HALTED
    message, record = directory.read_status(run_dir), events.read_events(run_dir)
    assert message["status"] == "HALTED" and message["exit_code"] == 3
    assert "did not respond to the request to save" in message["reason"]
    assert [event["reason"] for event in record.of_kind("end", "halt")] == [message["reason"]]
    assert_unchanged(run_dir)
    assert "stall in step" in (run_dir / "stacks.txt").read_text()


@pytest.mark.slow
def test_a_stall_with_stall_action_warn_does_not_end_the_run(scripted: Callable) -> None:
    run_dir, trainer = scripted("slow_eval judged", runtime={"heartbeat_s": 0.1})
    assert trainer.says("waiting")
    wait_until(lambda: any(e["kind"] == "stall" for e in events.read_events(run_dir)))
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait() == directory.EXIT_STOPPED
    assert not [e for e in events.read_events(run_dir) if e["kind"] == "guard"]


@pytest.mark.nightly
def test_a_suspended_trainer_is_not_stalled(scripted: Callable) -> None:
    """SIGSTOP for longer than the stall limit of three seconds: no stall, no slow step, and the heartbeats are complete."""
    run_dir, trainer = scripted("slow_step judged", **JUDGED, steps=12, save_every=0, eval_every=0)
    wait_until(lambda: steps_done(run_dir) >= 4)
    before = time.monotonic()
    trainer.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    time.sleep(6)
    least_s = time.monotonic() - start
    trainer.send_signal(signal.SIGCONT)
    assert trainer.wait() == 0
    most_s = time.monotonic() - before  # other programs may keep the trainer waiting before and after its suspension
    record = events.read_events(run_dir)
    assert not [event for event in record if event["kind"] in ("stall", "halt")]
    suspended_s = sum(event.get("suspended_s", 0) for event in record if event["kind"] == "heartbeat")
    # The clock ticks every half second.
    assert least_s - 2 < suspended_s < most_s
    assert max(event["dt_s"] for event in record if event["kind"] == "step" and event["step"] > 1) < least_s
    verdict = next(verdict for verdict in list_verdicts(run_dir) if verdict.name == "heartbeats")
    assert verdict.ok is True and "suspended for" in verdict.text


@pytest.mark.slow
def test_a_trainer_that_hangs_is_stalled_also_after_sigcont(scripted: Callable) -> None:
    run_dir, trainer = scripted("slow_data judged", **JUDGED)
    assert trainer.says("waiting")
    trainer.send_signal(signal.SIGCONT)
    assert trainer.wait() == directory.EXIT_HALTED
    assert [event["phase"] for event in events.read_events(run_dir) if event["kind"] == "stall"] == ["data"]


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 100.0
        monkeypatch.setattr(awake_clock.time, "monotonic", lambda: self.time)
        monkeypatch.setattr(awake_clock.threading.Thread, "start", lambda thread: None)
        self.clock = awake_clock.AwakeClock()
        self.clock.start_ticking(threading.Event())

    def advance(self, seconds: float, *, tick_s: float = 0.5) -> None:
        end = self.time + seconds
        while self.time < end:
            self.time = min(self.time + tick_s, end)
            self.clock.tick()


def test_the_clock_stands_still_only_during_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Clock(monkeypatch)
    own.advance(10)
    assert own.clock.now() == 110
    own.clock.note_continued()
    assert own.clock.now() == 110, "SIGCONT without a suspension"
    own.advance(60, tick_s=60)
    assert own.clock.now() == 170 and own.clock.take_suspended_s() == 0, "busy for 60 s, without SIGCONT"
    own.advance(10)
    own.clock.note_continued()
    assert own.clock.now() == 180, "SIGCONT long after a busy call"
    # Suspended for 60 s: either the thread ticks first, or the signal is handled first; it may be handled twice.
    own.advance(60, tick_s=60)
    own.clock.note_continued()
    own.clock.note_continued()
    assert own.clock.now() == pytest.approx(180.5)
    own.time += 60
    own.clock.note_continued()
    own.advance(10)
    assert own.clock.now() == pytest.approx(191.0)
    assert own.clock.take_suspended_s() == pytest.approx(119.0) and own.clock.take_suspended_s() == 0


def test_a_clock_without_ticks_ignores_sigcont(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake_clock.time, "monotonic", lambda: 100.0)
    clock = awake_clock.AwakeClock()
    monkeypatch.setattr(awake_clock.time, "monotonic", lambda: 500.0)
    clock.note_continued()
    assert clock.now() == 500 and clock.get_watched_s() == 500


def test_a_suspension_is_no_stall_in_whichever_order_threads_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After SIGCONT the clock ticks, the signal is handled, and the heartbeat judges: in any order.

    The process may also be suspended within a heartbeat. Time in which the clock ticks is a stall, in the same phase too.
    """
    own, suspend_within, stalled = Clock(monkeypatch), [0.0], list[str]()
    monkeypatch.setattr(phases, "AwakeClock", lambda: own.clock)
    own_phases = phases.Phases()
    own.clock.start_ticking(threading.Event())

    def get_gpu_util() -> None:
        own.time += suspend_within.pop() if suspend_within else 0.0

    beat = heartbeat.Heartbeat(
        event_log.EventLog(tmp_path, tmp_path.name, 1),
        own_phases,
        every_s=1.0,
        rule=heartbeat.StallRule(floor_s=3.0),
        stacks=tmp_path / "stacks.txt",
        get_gpu_util=get_gpu_util,
        on_stall=lambda phase, seconds, limit_s: bool(stalled.append(phase)),
    ).beat
    actions = (own.clock.tick, own.clock.note_continued, beat)
    for order in itertools.product(actions, repeat=4):
        for seconds in ([], [60.0]):
            with own_phases("data", record_duration=False):
                own.advance(1)
                own.time += 60
                suspend_within[:] = seconds
                for action in order:
                    action()
                    assert not stalled, [action.__name__ for action in order]
    with own_phases("data"):
        own.time += 60
        for _ in range(8):
            own.advance(0.5)
            beat()
    assert stalled == ["data"]


def test_waiting_for_data_does_not_time_out_in_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by 100 s during one poll; the batch arrives after the next one."""
    released, jump = threading.Event(), [0.0]
    real = time.monotonic
    monkeypatch.setattr(prefetch.time, "monotonic", lambda: real() + jump[0])
    prefetcher = prefetch.Prefetcher(lambda step: released.wait(30) and step, 0, 1, timeout_s=20.0)

    def should_stop() -> bool:
        jump[0] = 100.0
        released.set()
        return False

    assert prefetcher.get(0, should_stop) == 0
    prefetcher.close()
