"""A sweep with real trainers, killed and stopped in the middle, resumes, and its runs are unaffected."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_run import assert_unchanged

from nsa_lab import cli
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.history import History
from nsa_lab.runs.sweep_runner import Sweep

FILE = """
preset: ci
common: {train.steps: 40, train.save_every: 10, train.eval_every: 20}
variants: {as_it_is: , slow: train.lr=1e-3}
seeds: [1, 1337]
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def when_it_trains(sweep: Sweep, index: int, number: int, *, trainer: bool) -> threading.Thread:
    """Signal the trainer of a run of the sweep, or this process, after the run's first checkpoint."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            run_dir = sweep.get_run_states()[index].run_dir
            if run_dir and any(event["kind"] == "checkpoint" for event in events.read_events(run_dir)):
                os.kill(lifecycle.attach(run_dir) if trainer else os.getpid(), number)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.nightly
def test_a_sweep_that_was_killed_and_stopped_resumes(
    forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rates.yaml").write_text(FILE)
    arguments = ["sweep", str(tmp_path / "rates.yaml"), "--outputs", str(tmp_path / "outputs")]
    sweep = Sweep.load(arguments[1], tmp_path / "outputs")

    def command(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["nsa-lab", *arguments, *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0

    earlier = {stop: signal.getsignal(stop) for stop in directory.STOP_SIGNALS}
    try:
        # The trainer of one run is killed, and the sweep is stopped during a later run.
        threads = [
            when_it_trains(sweep, 0, signal.SIGKILL, trainer=True),
            when_it_trains(sweep, 2, signal.SIGTERM, trainer=False),
        ]
        assert command() == directory.EXIT_STOPPED
        for thread in threads:
            thread.join()
        assert [run.state for run in sweep.get_run_states()] == ["DEAD", directory.DONE, directory.PREEMPTED, None]
        assert f"continue with nsa-lab sweep {arguments[1]}" in capsys.readouterr().err
        before = [run.run_dir for run in sweep.get_run_states()]
        assert command("--json") == directory.EXIT_DONE
    finally:
        for stop, handler in earlier.items():
            signal.signal(stop, handler)
    recorded = json.loads(capsys.readouterr().out)
    assert recorded == json.loads((sweep.folder / "sweep.json").read_text())
    assert (sweep.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    after = sweep.get_run_states()
    assert [run.state for run in after] == [directory.DONE] * 4
    assert [run.run_dir for run in after[:3]] == before[:3], "they were resumed, and not started anew"
    assert [len(History.read(run.run_dir).attempts()) for run in after] == [2, 1, 2, 1]
    for state in after:
        assert state.run_dir
        assert_unchanged(state.run_dir)
    baseline, slow = recorded["variants"]
    assert (baseline["bpb"]["seeds"], slow["less_baseline"]["seeds"]) == (2, 2) and baseline["parameters"]
    assert slow["less_baseline"]["mean"] == pytest.approx(slow["bpb"]["mean"] - baseline["bpb"]["mean"])
    assert command("--table") == 0
    assert "2 of 2" in capsys.readouterr().out
