"""The explorer of notebook 05: choose runs, a view, a layer, a head group and a step; see the runs beside each other.

Every view is a function of `figures` or `compare`. Without a front end no widget is created, and the views are drawn once.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import ipywidgets as widgets
from IPython.display import display
from matplotlib.figure import Figure

import nsa_lab.figures as figures
from nsa_lab.figures.layer_comparison import STATISTICS
from nsa_lab.figures.style import render_png
from nsa_lab.inference import NoCheckpoint
from nsa_lab.runs.history import History
from nsa_lab.workbook import run_comparison
from nsa_lab.workbook.display import has_front_end, show_figure

MAP, LOSS, GATES = "blocks selected", "loss", "gate shares"
VIEWS = (LOSS, GATES, *STATISTICS, MAP)


def explore_runs(
    selected: Sequence[figures.Run],
    others: Sequence[figures.Run] = (),
    *,
    layer: int = 0,
    group: int = 0,
    step: int | None = None,
    use_widgets: bool | None = None,
) -> None:
    """Show the explorer on the `chosen` runs; `others` can be chosen too. `with_widgets` as in `explore`."""
    if has_front_end() if use_widgets is None else use_widgets:
        display(build_run_explorer(selected, others, layer=layer, group=group, step=step))
        return
    histories = list(_index_by_name(selected).values())
    at = get_last_step(histories) if step is None else step
    print(run_comparison.format_numbers_at(histories, layer, at))
    for view in (GATES, MAP):
        drawn, problems = plot_view(histories, view, layer, group, at)
        for figure in drawn:
            show_figure(figure)
        print("\n".join(problems), end="\n" if problems else "")


def plot_view(runs: Sequence[figures.Run], view: str, layer: int, group: int, step: int) -> tuple[list[Figure], list[str]]:
    """The pictures of one of `VIEWS`, and a line for each run that has none."""
    if view == LOSS:
        return [figures.plot_loss_curves(runs)], []
    if view == GATES:
        return [figures.plot_layer_gates(runs, layer, step)], []
    if view in STATISTICS:
        return [figures.plot_layer_statistic(runs, view, layer, step)], []
    drawn, problems = [], []
    for run in runs:
        try:
            drawn.append(run_comparison.plot_selection_map(run, layer, group, step))
        except (NoCheckpoint, ValueError) as error:
            problems.append(f"no map: {error}")
    return drawn, problems


def get_last_step(histories: Sequence[History]) -> int:
    return max((history.last_step for history in histories), default=0)


def _index_by_name(runs: Sequence[figures.Run]) -> dict[str, History]:
    return {history.run: history for history in map(History.read, runs)}


def build_run_explorer(
    selected: Sequence[figures.Run],
    others: Sequence[figures.Run] = (),
    *,
    layer: int = 0,
    group: int = 0,
    step: int | None = None,
) -> widgets.VBox:
    """The controls and the pictures as one widget."""
    known = _index_by_name([*selected, *others])
    which = widgets.SelectMultiple(
        options=list(known),
        value=list(_index_by_name(selected)),
        description="runs",
        rows=min(len(known), 6),
        layout=widgets.Layout(width="60%"),
    )
    view = widgets.Dropdown(options=[(STATISTICS.get(name, name), name) for name in VIEWS], value=GATES, description="view")
    depth = widgets.Dropdown(description="layer", layout=widgets.Layout(width="11em"))
    heads = widgets.Dropdown(description="head group", layout=widgets.Layout(width="11em"))
    at = widgets.IntSlider(description="step", continuous_update=False, layout=widgets.Layout(width="60%"))
    pictures, text = widgets.VBox(), widgets.HTML()

    def redraw(_change: object = None) -> None:
        runs = [known[name] for name in which.value]
        name, layer, group = view.value, depth.value, heads.value
        assert name is not None and layer is not None and group is not None, "each control was made with a value"
        drawn, problems = plot_view(runs, name, layer, group, at.value) if runs else ([], ["choose a run"])
        pictures.children = [
            widgets.Image(value=render_png(figure), format="png", layout=widgets.Layout(max_width="100%"))
            for figure in drawn
        ]
        told = "\n".join([run_comparison.format_numbers_at(runs, layer, at.value), *problems])
        text.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(told)}</pre>"

    def choose(_change: object = None) -> None:
        # Three controls change, and one picture follows.
        for control in fitted:
            control.unobserve(redraw, names="value")
        fit_controls([known[name] for name in which.value], *fitted)
        for control in fitted:
            control.observe(redraw, names="value")
        redraw()

    fitted = depth, heads, at
    fit_controls([known[name] for name in which.value] or list(known.values()), *fitted, initial=(layer, group, step))
    for control in (view, *fitted):
        control.observe(redraw, names="value")
    which.observe(choose, names="value")
    redraw()
    return widgets.VBox([which, widgets.HBox([view, depth, heads]), at, pictures, text])


def fit_controls(
    runs: Sequence[History],
    layer_control: widgets.Dropdown,
    group_control: widgets.Dropdown,
    step_slider: widgets.IntSlider,
    initial: tuple[int, int, int | None] | None = None,
) -> None:
    """Have the controls offer what these runs have: their layers, head groups and steps; without runs, what they offered.

    A value stays if it is still offered, or becomes the nearest one; a step that was the last one stays the last one.
    `wanted` are the first values, of layer, group and step (None: the last).
    """
    if not runs:
        return
    layer, group, step = initial or (
        layer_control.value,
        group_control.value,
        None if step_slider.value == step_slider.max else step_slider.value,
    )
    end = get_last_step(runs)
    for control, value, count in (
        (layer_control, layer, max(history.config.model.n_layers for history in runs)),
        (group_control, group, max(history.config.model.n_kv_groups for history in runs)),
    ):
        control.options = list(range(count))
        control.value = min(value or 0, count - 1)
    step_slider.max = end
    step_slider.value = end if step is None else min(step, end)
