"""Plots of the loss difference of two runs, and of the benefit of selection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_run import Event, make_config, write_run
from matplotlib.figure import Figure

from nsa_lab.figures import plot_loss_difference, plot_selection_benefit


def said(figure: Figure) -> str:
    return " ".join(text.get_text() for axes in figure.axes for text in [*axes.texts, axes.title, axes._left_title])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return an NSA run whose loss is 0.5 above its dense baseline up to step 50, and 0.01 below it after."""

    def spoil(events: list[Event]) -> None:
        for event in events:
            if event["kind"] in ("step", "eval") and event["step"]:
                event["bpb"] += 0.5 if event["step"] <= 50 else -0.01

    often = {"train__log_every": 2, "train__steps": 600}
    dense = write_run(tmp_path / "dense", make_config(model__attention="dense", **often))
    return write_run(tmp_path / "nsa", make_config(**often), spoil), dense


def test_loss_difference_plot(pair: tuple[Path, Path]) -> None:
    figure = plot_loss_difference(*pair)
    (axes,) = figure.axes
    curves = {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}
    assert np.allclose(curves["validation, each evaluation"], -0.01)
    (stretches,) = axes.containers
    assert np.allclose(np.asarray(stretches[0].get_ydata()), -0.01), "the first tenth is left out"
    assert "+0.50 at step 50" in said(figure)


def test_too_few_batches(tmp_path: Path) -> None:
    run = write_run(tmp_path, make_config())
    assert "too few batches" in said(plot_loss_difference(run, run))


def test_selection_benefit_plot(tmp_path: Path) -> None:
    figure = plot_selection_benefit(write_run(tmp_path, make_config()))
    labels = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert set(labels) == {"selected blocks", "random blocks", "nearest blocks", "no selected branch"}
    assert labels["selected blocks"] == pytest.approx([0.2] * 4, rel=1e-5) and labels["no selected branch"] == [4.0] * 4


def test_selection_benefit_of_an_older_run(tmp_path: Path) -> None:
    def older(events: list[Event]) -> list[Event]:
        return [event for event in events if event["kind"] != "reach"]

    assert "not recorded" in said(plot_selection_benefit(write_run(tmp_path, make_config(), older)))
