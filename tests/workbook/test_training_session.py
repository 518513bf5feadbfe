"""What the training notebooks show of a run beside another."""

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
    made = training_session.TrainingSession(config or make_config(), str(run), "", False, "x", 4, reference)
    made._run = run
    return made


def test_both_validations_are_drawn_over_tokens_and_seconds(tmp_path: Path, shown: list) -> None:
    ours, theirs = write_run(tmp_path / "a", name="ours"), write_run(tmp_path / "b", name="theirs")
    of(ours, str(theirs)).show_reference()
    (figure,) = shown
    tokens, seconds = figure.axes
    for run, over_tokens, over_seconds in zip((ours, theirs), tokens.lines, seconds.lines, strict=True):
        history = History.read(run)
        curve = compute_curve(history.run, [history])
        steps, values = history.validation()
        later = values[steps > 0]
        assert run.name in over_tokens.get_label() and len(later)
        np.testing.assert_allclose(over_tokens.get_ydata(), later)
        np.testing.assert_allclose(over_seconds.get_xdata(), curve.seconds)
        assert list(over_tokens.get_xdata()) == [history.config.train.tokens_until(int(step)) for step in steps if step]


def test_what_cannot_be_drawn_beside_is_said(tmp_path: Path, shown: list, capsys: pytest.CaptureFixture[str]) -> None:
    ours = write_run(tmp_path / "a", name="ours")

    def elsewhere(events: list[dict]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another"

    of(ours, "").show_reference()
    of(ours, str(write_run(tmp_path / "b", spoil=elsewhere, name="apart"))).show_reference()
    without = write_run(tmp_path / "c", spoil=lambda events: [e for e in events if e["kind"] != "eval"], name="unread")
    of(ours, str(without)).show_reference()
    none, apart, unread = capsys.readouterr().out.splitlines()
    assert 'reference = "RUN"' in none and "not compared" in apart and "apart-" in apart
    assert "not plotted" in unread and "unread-" in unread
    with pytest.raises(Stop, match="no such run"):
        of(ours, "no-such-run").show_reference()
    assert not shown
