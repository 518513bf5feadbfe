"""The live view without a browser: its buttons, the end of following, and headless following without a widget."""

import asyncio
import threading
import time

import pytest
from fake_run import make_config, write_run

from nsa_lab.runs import directory, lifecycle
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.events import Tail
from nsa_lab.runs.live_view import RunView
from nsa_lab.workbook import follow_run
from nsa_lab.workbook.run_panel import RunPanel


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


@pytest.fixture
def shown(monkeypatch):
    """Return the displayed objects, in order. An update replaces the content of its handle."""
    displayed = []

    class Handle:
        def __init__(self, place):
            self.place = place

        def update(self, what):
            displayed[self.place] = what

    def display(what, display_id=False):
        displayed.append(what)
        return Handle(len(displayed) - 1) if display_id else None

    monkeypatch.setattr(follow_run, "display", display)
    monkeypatch.setattr(follow_run, "POLL_INTERVAL_S", 0.01)
    return displayed


@pytest.fixture
def trainer(monkeypatch):
    """State of a trainer, to be set by a test."""
    state = {"state": directory.RUNNING}
    monkeypatch.setattr(lifecycle, "get_state", lambda run: state["state"])
    monkeypatch.setattr(lifecycle, "is_alive", lambda run: state["state"] == directory.RUNNING)
    return state


def panel_of(run, state):
    view = RunView(run)
    view.update(Tail(run).read())
    panel = RunPanel(run, view.config.train.steps)
    panel.update(view, state)
    return panel, view


def until(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_panel_shows_the_run(run, trainer):
    panel, _ = panel_of(run, trainer["state"])
    assert panel._bar.value == 200 and "200" in panel._state.value
    for label in ("learning rate", "tokens per second", "time left", "phase", "compressed 40%, selected 35%, window 25%"):
        assert label in panel._numbers.value
    assert "saved checkpoints/step-00000200" in panel._notes.value
    assert not panel._stop.disabled and panel._resume.disabled and panel._leave.disabled


def test_stop_does_not_block_the_kernel_and_resume_continues(run, trainer, monkeypatch):
    saving = threading.Event()
    monkeypatch.setattr(lifecycle, "stop", lambda run, timeout: saving.wait(10))
    resumed = []
    monkeypatch.setattr(lifecycle, "resume", resumed.append)
    panel, view = panel_of(run, trainer["state"])
    panel._stop.click()
    panel._stop.click()
    assert panel.is_busy and panel._stop.disabled and panel._resume.disabled
    panel.update(view, trainer["state"])
    assert "stop requested" in panel._state.value
    saving.set()
    until(lambda: not panel.is_busy)
    trainer["state"] = directory.PREEMPTED
    panel.update(view, directory.PREEMPTED)
    assert "PREEMPTED" in panel._state.value and panel._stop.disabled and not panel._resume.disabled
    panel._resume.click()
    until(lambda: resumed == [run])


def test_failed_button_shows_the_reason(run, trainer, monkeypatch):
    def refuse(run, timeout):
        raise RunDirectoryError("no trainer is <alive> here")

    monkeypatch.setattr(lifecycle, "stop", refuse)
    panel, view = panel_of(run, trainer["state"])
    panel._stop.click()
    until(lambda: not panel.is_busy)
    panel.update(view, trainer["state"])
    assert "no trainer is &lt;alive&gt; here" in panel._state.value


@pytest.mark.slow
def test_stopped_run_is_followed_until_it_is_left(run, trainer, shown):
    trainer["state"] = directory.PREEMPTED
    ended = []
    follower = threading.Thread(target=lambda: ended.append(asyncio.run(follow_run.follow_run(run, use_widgets=True))))
    follower.start()
    until(lambda: shown)
    time.sleep(0.1)
    assert follower.is_alive()
    leave = shown[0].children[1].children[2]
    until(lambda: not leave.disabled)
    leave.click()
    follower.join(60)
    assert ended == [directory.PREEMPTED]
    assert shown[0].alt.startswith(run.name) and "PREEMPTED: step 200/200" in shown[1]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"model__attention": "dense"}])
def test_finished_run_leaves_an_image_and_no_widget(changes, trainer, shown, tmp_path):
    run = write_run(tmp_path / "other", make_config(**changes))
    trainer["state"] = directory.DONE
    assert asyncio.run(follow_run.follow_run(run, use_widgets=True)) == directory.DONE
    assert [type(what).__name__ for what in shown] == ["Image", "_PlainText"]


def test_headless_following_updates_one_line(run, trainer, shown, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    trainer["state"] = directory.DONE
    assert asyncio.run(follow_run.follow_run(run)) == directory.DONE
    assert len(shown) == 1 and str(shown[0]).startswith("DONE: step 200/200  bpb")


def test_log_tail_of_a_dead_trainer_is_shown(run, trainer, shown, capsys):
    trainer["state"] = "DEAD"
    (run / directory.LOG).write_text("\n".join(f"line {number}" for number in range(1, 31)))
    assert asyncio.run(follow_run.follow_run(run, use_widgets=False)) == "DEAD"
    lines = capsys.readouterr().out.splitlines()
    assert "without a message" in lines[0] and lines[1:] == [f"line {number}" for number in range(19, 31)]
