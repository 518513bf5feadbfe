"""The training notebooks compare a run with a reference run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_run import make_config, write_run

from nsa_lab.config import RunConfig
from nsa_lab.health.sweep_results import compute_curve
from nsa_lab.runs.history import History
from nsa_lab.workbook import training_session
from nsa_lab.workbook.notebook import Stop


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list:
    figures: list = []
    monkeypatch.setattr(training_session, "show_figure", figures.append)
    return figures


def of(run: Path, reference: str, config: RunConfig | None = None) -> training_session.TrainingSession:
    session = training_session.TrainingSession(config or make_config(), str(run), "", False, "x", 4, reference)
    session._run = run
    return session


def test_reference_plot_has_tokens_and_step_time(tmp_path: Path, shown: list) -> None:
    run_dir, reference_dir = write_run(tmp_path / "a", name="ours"), write_run(tmp_path / "b", name="theirs")
    of(run_dir, str(reference_dir)).show_reference()
    (figure,) = shown
    tokens, seconds = figure.axes
    for run, over_tokens, over_seconds in zip((run_dir, reference_dir), tokens.lines, seconds.lines, strict=True):
        history = History.read(run)
        curve = compute_curve(history.run, [history])
        steps, values = history.validation()
        later = values[steps > 0]
        assert run.name in over_tokens.get_label() and len(later)
        np.testing.assert_allclose(over_tokens.get_ydata(), later)
        np.testing.assert_allclose(over_seconds.get_xdata(), curve.seconds)
        assert list(over_tokens.get_xdata()) == [history.config.train.tokens_until(int(step)) for step in steps if step]


def test_runs_that_cannot_be_compared(tmp_path: Path, shown: list, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "a", name="ours")

    def elsewhere(events: list[dict]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another"

    of(run_dir, "").show_reference()
    of(run_dir, str(write_run(tmp_path / "b", spoil=elsewhere, name="apart"))).show_reference()
    without = write_run(tmp_path / "c", spoil=lambda events: [e for e in events if e["kind"] != "eval"], name="unread")
    of(run_dir, str(without)).show_reference()
    no_reference, other_text, unevaluated = capsys.readouterr().out.splitlines()
    assert 'reference = "RUN"' in no_reference and "not compared" in other_text and "apart-" in other_text
    assert "not plotted" in unevaluated and "unread-" in unevaluated
    with pytest.raises(Stop, match="no such run"):
        of(run_dir, "no-such-run").show_reference()
    assert not shown
