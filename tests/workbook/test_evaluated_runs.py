"""Views of evaluated runs in notebook 09: with one seed, with several, and without runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_evaluation import make_run_factory
from IPython.display import Image, Markdown

from nsa_lab.figures import plot_difference_by_position, plot_loss_by_position, plot_retrieval, plot_retrieval_grid
from nsa_lab.runs.evaluation import get_depth_counts
from nsa_lab.workbook import evaluated_runs as module
from nsa_lab.workbook.evaluated_runs import EvaluatedModels, load_evaluated_models
from nsa_lab.workbook.notebook import Stop


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what a notebook would display, in order."""
    displayed: list[Any] = []
    monkeypatch.setattr(module, "display", displayed.append)
    monkeypatch.setattr("nsa_lab.workbook.display.display", displayed.append)
    return displayed


def runs_of(outputs: Path, seeds: int) -> EvaluatedModels:
    make = make_run_factory(outputs)
    for seed in range(seeds):
        make("long", seed)
        make("twin", seed, model__attention="dense")
    return load_evaluated_models(["long-*", "twin-*"], outputs=str(outputs))


def kinds(shown: list[Any]) -> list[type]:
    return [type(one) for one in shown]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_every_view(tmp_path: Path, shown: list[Any], seeds: int) -> None:
    models = runs_of(tmp_path, seeds)
    for view, expected in {
        models.show_results: [Markdown],
        models.show_costs: [Markdown, Markdown],
        models.show_needles: [Markdown, Image, Markdown],
        lambda: models.show_text("long", target=0.005): [Markdown, Image, Markdown],
        models.show_training_time: [Image],
        models.show_ablations: [Markdown, Markdown],
        models.show_excluded: [Markdown],
    }.items():
        shown.clear()
        view()
        assert kinds(shown) == expected
    for text in models.comparison.texts:  # a text that was evaluated as whole documents only
        text.places[:] = text.places[:1]
    shown.clear()
    models.show_text("long")
    assert kinds(shown) == [Markdown, Markdown]
    shown.clear()
    models.show_text("no such text")
    (note,) = shown
    assert "'no such text'" in note.data


def test_target_is_drawn(tmp_path: Path, shown: list[Any]) -> None:
    models, pictures = runs_of(tmp_path, 1), []
    for bar in (None, None, 0.005):
        shown.clear()
        models.show_text("long", bar)
        pictures.append(shown[1].data)
    assert pictures[0] == pictures[1] != pictures[2]


def test_without_runs_every_view_prints_the_reason(tmp_path: Path, shown: list[Any], capsys) -> None:
    models = load_evaluated_models(["long-*"], outputs=str(tmp_path))
    for view in (
        models.show_costs,
        models.show_needles,
        lambda: models.show_text("long"),
        models.show_training_time,
        models.show_ablations,
        models.show_excluded,
    ):
        view()
        assert "'long-*' matches no run in" in capsys.readouterr().out
    assert not shown


def test_pattern_without_runs_is_noted(tmp_path: Path, shown: list[Any]) -> None:
    make_run_factory(tmp_path)("twin", 0, model__attention="dense")
    load_evaluated_models(["long-*", "twin-*"], outputs=str(tmp_path)).show_excluded()
    assert "'long-*' matches no run in" in shown[0].data


def test_an_unreadable_run_is_noted_and_the_others_are_shown(tmp_path: Path, shown: list[Any]) -> None:
    make = make_run_factory(tmp_path)
    make("long", 0)
    make("twin", 0, model__attention="dense")
    bad = make("long", 1)
    (Path(bad) / "config.yaml").write_text("train: [")
    models = load_evaluated_models(["long-*", "twin-*"], outputs=str(tmp_path))
    assert sorted(model.name for model in models.models) == ["long", "twin"]
    models.show_excluded()
    assert Path(bad).name in shown[0].data and "not YAML" in shown[0].data


def test_without_a_dense_run_the_baseline_must_be_named(tmp_path: Path) -> None:
    make_run_factory(tmp_path)("long", 0)
    with pytest.raises(Stop, match="baseline = NAME, one of long"):
        load_evaluated_models(["long-*"], outputs=str(tmp_path))
    with pytest.raises(Stop, match="baseline = lang: no such model among these runs; available: long"):
        load_evaluated_models(["long-*"], "lang", outputs=str(tmp_path))
    assert load_evaluated_models(["long-*"], "long", outputs=str(tmp_path)).comparison.baseline == "long"


def test_retrieval_grid_combines_all_seeds(tmp_path: Path) -> None:
    models = runs_of(tmp_path, 3).models
    cells = {model.name: [cell for one in model.evaluated.values() for cell in one["retrieval"]] for model in models}
    figure = plot_retrieval_grid(cells, ["needle"])
    (left, right), colours = figure.axes[:2], figure.axes[2]
    assert (left.get_title(), right.get_title(), colours.get_ylabel()) == ("long:\nneedle", "twin:\nneedle", "found")
    fractions = left.images[0].get_array()
    seed_cells = [c for c in cells["long"] if c["task"] == "needle" and (c["length"], c["depth"]) == (260, 0.9)]
    assert len(seed_cells) == 3
    n_right, n_questions = (sum(counts) for counts in zip(*map(get_depth_counts, seed_cells), strict=True))
    assert fractions[2, 0] == n_right / n_questions
    with pytest.raises(ValueError, match="expected at least one model and one task"):
        plot_retrieval_grid(cells, [])


def test_differences_by_position_range_have_both_intervals(tmp_path: Path) -> None:
    (text,) = [text for text in runs_of(tmp_path, 3).comparison.texts if text.text == "long"]
    (axes,) = plot_difference_by_position(text, target=0.005).axes
    ranges = [place for place in text.places if place.place[0].isdigit()]
    assert len(ranges) == 5 and len(text.places) > 5
    assert axes.get_xticklabels()[0].get_text() == "0–255"
    means = next(line for line in axes.lines if line.get_label() == "mean").get_ydata()
    assert list(means) == [place.difference for place in ranges]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["+0.005", "mean", "95% over windows", "95% over seeds"]
    low, high = axes.containers[0][2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(ranges[0].over_windows)
    bounds = [bound for place in ranges for bound in place.over_windows]
    bottom, top = axes.get_ylim()
    assert bottom < min(bounds) and max(bounds) < top < max(bounds) + (top - bottom) / 2  # whatever seeds say


def test_seed_intervals_do_not_set_the_y_range(tmp_path: Path) -> None:
    (text,) = [text for text in runs_of(tmp_path, 3).comparison.texts if text.text == "long"]
    wide = [replace(place, over_seeds=(-50.0, 50.0)) for place in text.places]
    (axes,) = plot_difference_by_position(replace(text, places=wide)).axes
    assert max(map(abs, axes.get_ylim())) < 10


def test_loss_by_position_is_in_bits_with_errors() -> None:
    octaves = [{"first": 0, "last": 256, "loss": 2 * math.log(2), "error": 0.5 * math.log(2)}]
    (axes,) = plot_loss_by_position({"run": "r", "positions": {"windows": 4, "length": 256, "octaves": octaves}}).axes
    low, high = axes.containers[0][2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((1.5, 2.5))


def test_asymmetric_interval_is_drawn(tmp_path: Path) -> None:
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


def test_fraction_is_over_all_facts() -> None:
    cell = {"task": "needle", "length": 260, "depth": 0.5}
    few = {**cell, "sequences": 10, "answers": 10, "right": 10, "right_at_depth": 10}
    many = {**cell, "sequences": 40, "answers": 40, "right": 0, "right_at_depth": 0}
    axes = plot_retrieval_grid({"long": [few, many]}, ["needle"]).axes[0]
    assert axes.images[0].get_array()[0, 0] == 0.2 and axes.texts[0].get_text() == "20%"
    axes = plot_retrieval({"run": "r", "step": 1, "retrieval": [few]}).axes[0]
    assert axes.get_ylabel() == "depth of the fact\n(1: at the question)"
