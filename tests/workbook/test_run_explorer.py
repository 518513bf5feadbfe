"""Comparisons of runs as functions and as widgets, on records without checkpoints."""

import re

import pytest
from fake_run import make_config, write_run
from looping import looped

from nsa_lab.figures.style import get_title
from nsa_lab.inference import NoCheckpoint
from nsa_lab.runs.history import History
from nsa_lab.workbook import run_comparison, run_explorer
from nsa_lab.workbook.run_explorer import GATES, LOSS, MAP, VIEWS, plot_view


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return an NSA run and its dense baseline."""
    folder = tmp_path_factory.mktemp("runs")
    dense = write_run(folder / "dense", make_config(model__attention="dense"))
    return [write_run(folder / "nsa"), dense.rename(dense.with_name("fake-dense"))]


@looped
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_accepts_nsa_and_dense_runs(view, pair):
    plots, problems = plot_view(pair, view, 1, 0, 100)
    assert all(get_title(figure) for figure in plots)
    assert (len(plots), len(problems)) == ((0, 2) if view == MAP else (1, 0))


def test_numbers_are_the_last_ones_before_the_step(pair):
    text = run_comparison.format_numbers_at(pair, 1, 110)
    rows = {name.strip(): values.split() for name, _, values in (line.partition("│") for line in text.splitlines())}
    assert rows["step"] == ["110", "110"] and rows["gates and selection: layer 1"] == ["[1]", "[2]"]
    assert max(map(len, text.splitlines())) <= 80, "columns that a page would wrap"
    assert rows["gate share, compressed"] == ["0.350", "–"]
    assert rows["validation, bits per byte"][0] == f"{History.read(pair[0]).evaluations[2]['bpb']:.3f}"
    assert set(run_comparison.format_numbers_at(pair, 1, -1).split()) >= {"–"}


def test_numbers_of_one_layer(tmp_path):
    """Runs of different depth are compared."""

    def unlike(events):
        for event in events:
            if "gate_entropy" in event:
                event["gate_entropy"] = [0.5, 0.6, 0.7]

    run = write_run(tmp_path, spoil=unlike)
    for layer, value in enumerate(["0.500", "0.600", "0.700", "–"]):
        (line,) = [
            row
            for row in run_comparison.format_numbers_at([run], layer, 110).splitlines()
            if row.startswith("gate entropy")
        ]
        assert line.split()[-1].lstrip("│") == value


def test_missing_selection_map_is_explained(pair):
    with pytest.raises(NoCheckpoint, match="no checkpoint found"):
        run_comparison.plot_selection_map(pair[0], 0, 0)
    with pytest.raises(ValueError, match="layers 0 to 2"):
        run_comparison.plot_selection_map(pair[0], 3, 0)
    with pytest.raises(ValueError, match="a dense model selects no blocks"):
        run_comparison.plot_selection_map(pair[1], 0, 0)


def test_no_widget_without_a_front_end(pair, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(run_explorer, "show_figure", shown.append)
    monkeypatch.setattr(run_explorer, "build_run_explorer", None)
    run_explorer.explore_runs(pair, use_widgets=False)
    assert len(shown) == 1
    printed = capsys.readouterr().out
    assert re.search(r"validation, bits per byte +│ +2\.\d+ +2\.\d+", printed) and "no map" in printed


@pytest.mark.nightly
def test_controls_redraw(pair):
    explorer = run_explorer.build_run_explorer(pair[:1], pair[1:])
    which, (view, depth, heads), step, pictures, text = (
        explorer.children[0],
        explorer.children[1].children,
        *explorer.children[2:],
    )
    first = pictures.children[0].value
    assert first[:4] == b"\x89PNG" and list(which.value) == [pair[0].name] and len(which.options) == 2
    step.value = 40
    assert pictures.children[0].value != first and "│          40" in text.value
    view.value, depth.value = "loss", 2
    which.value = [run.name for run in pair]
    assert len(pictures.children) == 1 and "fake-dense" in text.value
    view.value = MAP
    assert not pictures.children and text.value.count("no map") == 2
    which.value = []
    assert "select a run" in text.value
    assert list(heads.options) == [0]


def test_controls_have_the_ranges_of_the_selected_runs(pair, tmp_path, monkeypatch):
    """A large run that is not selected must not change the step range of a small one."""
    monkeypatch.setattr(run_explorer, "render_png", lambda figure: get_title(figure).encode())
    long = make_config(
        train__steps=5000, train__log_every=500, train__eval_every=5000, train__save_every=0, train__stats_every=500
    )
    config = long.model_copy(
        update={"model": long.model.model_copy(update={"n_layers": 12, "n_heads": 2, "n_kv_groups": 2})}
    )
    large = write_run(tmp_path, config)
    large = large.rename(large.with_name("large"))
    explorer = run_explorer.build_run_explorer(pair[:1], [large], layer=7, step=4000)
    which, (_, depth, heads), step, pictures, text = (
        explorer.children[0],
        explorer.children[1].children,
        *explorer.children[2:],
    )
    assert (list(depth.options), list(heads.options)) == ([0, 1, 2], [0])
    assert (step.max, step.value, depth.value) == (200, 200, 2), "the nearest that there is"
    depth.value, step.value = 1, 100
    which.value = ["large"]
    assert (len(depth.options), list(heads.options), step.max) == (12, [0, 1], 5000)
    assert (depth.value, step.value) == (1, 100), "what was chosen stays where it is still offered"
    depth.value, step.value = 9, 5000
    assert pictures.children[0].value == b"Gate shares of layer 9"
    which.value = [pair[0].name]
    assert (depth.value, step.max, step.value) == (2, 200, 200), "a step that was the last stays the last"
    assert pictures.children[0].value == b"Gate shares of layer 2" and "200" in text.value
    which.value = []
    assert (len(depth.options), step.max) == (3, 200)


def test_plots_include_all_runs(pair):
    many = [pair[0]] * 9
    (gates,), (reuse,) = plot_view(many, GATES, 0, 0, 100)[0], plot_view(many, "sel_reuse", 0, 0, 100)[0]
    mark = 1  # the line at the chosen step
    assert len(gates.axes[0].lines) == 3 * 9 + mark and len(reuse.axes[0].lines) == 9 + mark
    assert len(plot_view(many, LOSS, 0, 0, 100)[0][0].axes[0].lines) == 2 * 9
