"""The explorer of notebook 06: select runs, a view, a layer, a head group and a step, and compare the runs.

Every view is a function of `figures` or `run_comparison`. Without a front end no widget is created, and some views are
drawn once.
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
    """Show the explorer on the `selected` runs; `others` can be selected too. `use_widgets` is as in `explore_query`."""
    if has_front_end() if use_widgets is None else use_widgets:
        display(build_run_explorer(selected, others, layer=layer, group=group, step=step))
        return
    histories = list(_index_by_name(selected).values())
    end_step = get_last_step(histories) if step is None else step
    print(run_comparison.format_numbers_at(histories, layer, end_step))
    for view in (GATES, MAP):
        plots, problems = plot_view(histories, view, layer, group, end_step)
        for figure in plots:
            show_figure(figure)
        print("\n".join(problems), end="\n" if problems else "")


def plot_view(runs: Sequence[figures.Run], view: str, layer: int, group: int, step: int) -> tuple[list[Figure], list[str]]:
    """Return the figures of one of `VIEWS`, and a line for each run that has none."""
    if view == LOSS:
        return [figures.plot_loss_curves(runs)], []
    if view == GATES:
        return [figures.plot_layer_gates(runs, layer, step)], []
    if view in STATISTICS:
        return [figures.plot_layer_statistic(runs, view, layer, step)], []
    plots, problems = [], []
    for run in runs:
        try:
            plots.append(run_comparison.plot_selection_map(run, layer, group, step))
        except (NoCheckpoint, ValueError) as error:
            problems.append(f"no map: {error}")
    return plots, problems


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
    """Return the controls and the figures as one widget."""
    histories = _index_by_name([*selected, *others])
    run_control = widgets.SelectMultiple(
        options=list(histories),
        value=list(_index_by_name(selected)),
        description="runs",
        rows=min(len(histories), 6),
        layout=widgets.Layout(width="60%"),
    )
    view_control = widgets.Dropdown(
        options=[(STATISTICS.get(name, name), name) for name in VIEWS], value=GATES, description="view"
    )
    layer_control = widgets.Dropdown(description="layer", layout=widgets.Layout(width="11em"))
    group_control = widgets.Dropdown(description="head group", layout=widgets.Layout(width="11em"))
    step_slider = widgets.IntSlider(description="step", continuous_update=False, layout=widgets.Layout(width="60%"))
    image_box, text_area = widgets.VBox(), widgets.HTML()

    def redraw(_change: object = None) -> None:
        runs = [histories[name] for name in run_control.value]
        name, layer, group = view_control.value, layer_control.value, group_control.value
        assert name is not None and layer is not None and group is not None, "each control has an initial value"
        plots, problems = plot_view(runs, name, layer, group, step_slider.value) if runs else ([], ["select a run"])
        image_box.children = [
            widgets.Image(value=render_png(figure), format="png", layout=widgets.Layout(max_width="100%"))
            for figure in plots
        ]
        lines = "\n".join([run_comparison.format_numbers_at(runs, layer, step_slider.value), *problems])
        text_area.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(lines)}</pre>"

    def select_runs(_change: object = None) -> None:
        # Three controls change, but the figure is drawn once.
        for control in fitted_controls:
            control.unobserve(redraw, names="value")
        fit_controls([histories[name] for name in run_control.value], *fitted_controls)
        for control in fitted_controls:
            control.observe(redraw, names="value")
        redraw()

    fitted_controls = layer_control, group_control, step_slider
    fit_controls(
        [histories[name] for name in run_control.value] or list(histories.values()),
        *fitted_controls,
        initial=(layer, group, step),
    )
    for control in (view_control, *fitted_controls):
        control.observe(redraw, names="value")
    run_control.observe(select_runs, names="value")
    redraw()
    return widgets.VBox(
        [run_control, widgets.HBox([view_control, layer_control, group_control]), step_slider, image_box, text_area]
    )


def fit_controls(
    runs: Sequence[History],
    layer_control: widgets.Dropdown,
    group_control: widgets.Dropdown,
    step_slider: widgets.IntSlider,
    initial: tuple[int, int, int | None] | None = None,
) -> None:
    """Set the ranges of the controls to the layers, head groups and steps of these runs. Without runs, change nothing.

    A value that is still valid stays; otherwise it becomes the nearest one. A step that was the last one stays the last
    one. `initial` has the first values of layer, group and step (None: the last step).
    """
    if not runs:
        return
    layer, group, step = initial or (
        layer_control.value,
        group_control.value,
        None if step_slider.value == step_slider.max else step_slider.value,
    )
    last_step = get_last_step(runs)
    for control, value, count in (
        (layer_control, layer, max(history.config.model.n_layers for history in runs)),
        (group_control, group, max(history.config.model.n_kv_groups for history in runs)),
    ):
        control.options = list(range(count))
        control.value = min(value or 0, count - 1)
    step_slider.max = last_step
    step_slider.value = last_step if step is None else min(step, last_step)
