"""Evaluated runs as notebook 08 shows them: every view of them, with one seed and with several, and without any run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_evaluation import make_run_factory
from IPython.display import Image, Markdown

from nsa_lab.config import ConfigError
from nsa_lab.figures import plot_difference_by_position, plot_loss_by_position, plot_retrieval, plot_retrieval_grid
from nsa_lab.runs.evaluation import get_depth_counts
from nsa_lab.workbook import evaluated_runs as module
from nsa_lab.workbook.evaluated_runs import EvaluatedModels, load_evaluated_models


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a notebook would display, in order."""
    found: list[Any] = []
    monkeypatch.setattr(module, "display", found.append)
    monkeypatch.setattr("nsa_lab.workbook.display.display", found.append)
    return found


def runs_of(outputs: Path, seeds: int) -> EvaluatedModels:
    make = make_run_factory(outputs)
    for seed in range(seeds):
        make("long", seed)
        make("twin", seed, model__attention="dense")
    return load_evaluated_models(["long-*", "twin-*"], outputs=str(outputs))


def kinds(shown: list[Any]) -> list[type]:
    return [type(one) for one in shown]


@pytest.mark.parametrize("seeds", [1, 3])
def test_every_view_is_shown(tmp_path: Path, shown: list[Any], seeds: int) -> None:
    found = runs_of(tmp_path, seeds)
    for view, expected in {
        found.show_costs: [Markdown],
        found.show_needles: [Markdown, Image],
        lambda: found.show_text("long", target=0.005): [Markdown, Image],
        found.show_training_time: [Image],
        found.show_ablations: [Markdown],
        found.show_excluded: [Markdown],
    }.items():
        shown.clear()
        view()
        assert kinds(shown) == expected
    for text in found.comparison.texts:  # as texts are that were read as whole documents alone
        text.places[:] = text.places[:1]
    shown.clear()
    found.show_text("long")
    assert kinds(shown) == [Markdown]
    shown.clear()
    found.show_text("no such text")
    (note,) = shown
    assert "'no such text'" in note.data


def test_a_level_that_is_asked_for_is_drawn(tmp_path: Path, shown: list[Any]) -> None:
    found, pictures = runs_of(tmp_path, 1), []
    for bar in (None, None, 0.005):
        shown.clear()
        found.show_text("long", bar)
        pictures.append(shown[1].data)
    assert pictures[0] == pictures[1] != pictures[2]


def test_without_runs_every_view_says_so_and_shows_nothing(tmp_path: Path, shown: list[Any], capsys) -> None:
    found = load_evaluated_models(["long-*"], outputs=str(tmp_path))
    for view in (
        found.show_costs,
        found.show_needles,
        lambda: found.show_text("long"),
        found.show_training_time,
        found.show_ablations,
        found.show_excluded,
    ):
        view()
        assert "'long-*' matches no run in" in capsys.readouterr().out
    assert not shown


def test_a_pattern_without_runs_is_told_beside_the_others(tmp_path: Path, shown: list[Any]) -> None:
    make_run_factory(tmp_path)("twin", 0, model__attention="dense")
    load_evaluated_models(["long-*", "twin-*"], outputs=str(tmp_path)).show_excluded()
    assert "'long-*' matches no run in" in shown[0].data


def test_without_a_dense_run_the_baseline_has_to_be_named(tmp_path: Path) -> None:
    make_run_factory(tmp_path)("long", 0)
    with pytest.raises(ConfigError, match="--against"):
        load_evaluated_models(["long-*"], outputs=str(tmp_path))
    assert load_evaluated_models(["long-*"], "long", outputs=str(tmp_path)).comparison.baseline == "long"


def test_maps_hold_the_shares_of_all_seeds_together(tmp_path: Path) -> None:
    models = runs_of(tmp_path, 3).models
    cells = {model.name: [cell for one in model.evaluated.values() for cell in one["retrieval"]] for model in models}
    figure = plot_retrieval_grid(cells, ["needle"])
    (left, right), colours = figure.axes[:2], figure.axes[2]
    assert (left.get_title(), right.get_title(), colours.get_ylabel()) == ("long:\nneedle", "twin:\nneedle", "found")
    drawn = left.images[0].get_array()
    own = [c for c in cells["long"] if c["task"] == "needle" and (c["length"], c["depth"]) == (260, 0.9)]
    assert len(own) == 3
    right_ones, asked = (sum(counts) for counts in zip(*map(get_depth_counts, own), strict=True))
    assert drawn[2, 0] == right_ones / asked
    with pytest.raises(ValueError, match="expected at least one model and one task"):
        plot_retrieval_grid(cells, [])


def test_differences_are_drawn_octave_by_octave_with_both_intervals(tmp_path: Path) -> None:
    (text,) = [text for text in runs_of(tmp_path, 3).comparison.texts if text.text == "long"]
    (axes,) = plot_difference_by_position(text, target=0.005).axes
    octaves = [place for place in text.places if place.place[0].isdigit()]
    assert len(octaves) == 5 and len(text.places) > 5
    assert axes.get_xticklabels()[0].get_text() == "0–255"
    means = next(line for line in axes.lines if line.get_label() == "mean").get_ydata()
    assert list(means) == [place.difference for place in octaves]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["+0.005", "mean", "95% over windows", "95% over seeds"]
    low, high = axes.containers[0][2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(octaves[0].over_windows)
    bounds = [bound for place in octaves for bound in place.over_windows]
    bottom, top = axes.get_ylim()
    assert bottom < min(bounds) and max(bounds) < top < max(bounds) + (top - bottom) / 2  # whatever seeds say


def test_an_interval_over_seeds_does_not_press_the_others_flat(tmp_path: Path) -> None:
    (text,) = [text for text in runs_of(tmp_path, 3).comparison.texts if text.text == "long"]
    wide = [replace(place, over_seeds=(-50.0, 50.0)) for place in text.places]
    (axes,) = plot_difference_by_position(replace(text, places=wide)).axes
    assert max(map(abs, axes.get_ylim())) < 10


def test_loss_by_position_is_drawn_in_bits_with_its_errors() -> None:
    octaves = [{"first": 0, "last": 256, "loss": 2 * math.log(2), "error": 0.5 * math.log(2)}]
    (axes,) = plot_loss_by_position({"run": "r", "positions": {"windows": 4, "length": 256, "octaves": octaves}}).axes
    low, high = axes.containers[0][2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((1.5, 2.5))


def test_an_interval_that_is_not_symmetric_is_drawn_as_it_is(tmp_path: Path) -> None:
    make = make_run_factory(tmp_path)
    for seed in range(3):
        make("long", seed)
        make("twin", seed, model__attention="dense")
    (text,) = [
        text
        for text in load_evaluated_models(["long-*", "twin-*"], outputs=str(tmp_path)).comparison.texts
        if text.text == "long"
    ]
    places = [replace(p, over_windows=(p.difference - 0.1, p.difference + 0.3)) for p in text.places]
    (axes,) = plot_difference_by_position(replace(text, places=places)).axes
    octave = next(p for p in places if p.place[0].isdigit())
    low, high = axes.containers[0][2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(octave.over_windows)


def test_a_share_is_over_all_facts_and_depth_1_is_at_the_question() -> None:
    cell = {"task": "needle", "length": 260, "depth": 0.5}
    few = {**cell, "sequences": 10, "answers": 10, "right": 10, "right_at_depth": 10}
    many = {**cell, "sequences": 40, "answers": 40, "right": 0, "right_at_depth": 0}
    axes = plot_retrieval_grid({"long": [few, many]}, ["needle"]).axes[0]
    assert axes.images[0].get_array()[0, 0] == 0.2 and axes.texts[0].get_text() == "20%"
    axes = plot_retrieval({"run": "r", "step": 1, "retrieval": [few]}).axes[0]
    assert axes.get_ylabel() == "depth of the fact\n(1: at the question)"
