"""Runs beside each other, at one layer, one head group, one step: the views of notebook 05's explorer, usable without it.

Every view takes runs (paths or histories) and gives a matplotlib Figure, or text. Pictures of what a model selects need a
checkpoint of the run; the others read its record alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa_lab import rundir
from nsa_lab.explore.pictures import selection_by_layer
from nsa_lab.explore.plots import BRANCH_NAMES, RUN_COLOURS, STEP, Run, over_steps
from nsa_lab.explore.samples import observed_blocks
from nsa_lab.explore.show import BRANCH_COLOURS
from nsa_lab.history import History

STATISTICS = {
    "gate_entropy": "gate entropy, nats",
    "sel_reuse": "blocks shared with the query before",
    "sel_distance": "distance, blocks",
    "sel_sink_share": "first block's share",
    "sel_window_overlap": "overlap with window",
}
NAMES_WIDTH = 36
LINES = ("-", "--", ":", "-.")


def gates_of_layer(runs: Sequence[Run], layer: int, step: int | None = None) -> Figure:
    """Gate shares of one layer over steps: a colour a branch, a line style a run; `step` is marked."""
    histories = [History.read(run) for run in runs]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"Gate shares of layer {layer}", xlabel=STEP, ylabel="share of the gates", ylim=(0, 1))
    for history, line in zip(histories, cycle(LINES), strict=False):
        for branch, label in BRANCH_NAMES.items():
            steps, values = history.layers(f"gate_share_{branch}")
            if values.shape[1] > layer:
                named = f"{history.run}: {label}" if len(histories) > 1 else label
                axes.plot(steps, values[:, layer], color=BRANCH_COLOURS[branch], linestyle=line, label=named)
    _finish(figure, axes, step)
    return figure


def statistic_of_layer(runs: Sequence[Run], name: str, layer: int, step: int | None = None) -> Figure:
    """One of `STATISTICS` of one layer over steps, a colour a run; `step` is marked."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"{STATISTICS[name].capitalize()}, layer {layer}", xlabel=STEP, ylabel=STATISTICS[name])
    for history, colour in zip(map(History.read, runs), cycle(RUN_COLOURS), strict=False):
        steps, values = history.layers(name)
        if values.shape[1] > layer:
            axes.plot(steps, values[:, layer], color=colour, label=history.run)
    _finish(figure, axes, step)
    return figure


def numbers_at(runs: Sequence[Run], layer: int, step: int) -> str:
    """What each run said last at or before `step`, a column a run: loss, pace, and the gates and selection of one layer."""
    columns = {(history := History.read(run)).run: _numbers(history, layer, step) for run in runs}
    lines = [" " * NAMES_WIDTH + "".join(f"  {run:>10}" for run in columns)]
    for name in next(iter(columns.values()), {}):
        lines.append(
            f"{name:<{NAMES_WIDTH}}" + "".join(f"  {column[name]:>{max(len(run), 10)}}" for run, column in columns.items())
        )
    return "\n".join(lines)


def selection_map(run: Run, layer: int, group: int, step: int | None = None) -> Figure:
    """Which blocks one layer and head group selects on a text of the standard library, by the checkpoint nearest to `step`.

    Raises `NoCheckpoint` where the run has none, `ValueError` for a dense run or a layer or group that it has not.
    """
    history = History.read(run)
    model = history.config.model
    if model.attention != "nsa":
        raise ValueError(f"{history.run}: a dense model selects nothing")
    if not (0 <= layer < model.n_layers and 0 <= group < model.n_kv_groups):
        raise ValueError(
            f"layer {layer}, head group {group}: {history.run} has layers 0 to {model.n_layers - 1} and head "
            f"groups 0 to {model.n_kv_groups - 1}"
        )
    there = checkpoint_steps(history)
    nearest = min(there, key=lambda at: abs(at - step)) if there and step is not None else max(there, default=None)
    blocks = observed_blocks(history.run_dir, step=nearest)[layer][0, :, group]
    return selection_by_layer(
        {layer: blocks}, history.config.nsa, f"{history.run}, step {nearest:,}, group {group}, on argparse.py"
    )


def checkpoint_steps(run: Run) -> list[int]:
    """Steps that the run has a checkpoint of on disk, ascending."""
    folder = History.read(run).run_dir / rundir.CHECKPOINTS
    return sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit())


def _numbers(history: History, layer: int, step: int) -> dict[str, str]:
    at, bpb = _last(*history.series("bpb"), step)
    numbers = {
        "step": "–" if at is None else f"{at:,}",
        "training batch, bits a byte": _text(bpb),
        "validation, bits a byte": _text(_last(*history.validation(), step)[1]),
        "tokens a second": _text(_last(*history.series("tokens_per_s"), step)[1], "{:,.0f}"),
    }
    named = {f"gate_share_{branch}": f"gate share, {label}" for branch, label in BRANCH_NAMES.items()} | STATISTICS
    for name, label in named.items():
        steps, values = history.layers(name)
        known = values[:, layer] if values.shape[1] > layer else np.full(len(steps), np.nan)
        numbers[label] = _text(_last(steps, known, step)[1])
    return numbers


def _last(steps: np.ndarray, values: np.ndarray, step: int) -> tuple[int | None, float]:
    upto = np.flatnonzero(steps <= step)
    return (int(steps[upto[-1]]), float(values[upto[-1]])) if len(upto) else (None, math.nan)


def _text(value: float, form: str = "{:.3f}") -> str:
    return form.format(value) if math.isfinite(value) else "–"


def _finish(figure: Figure, axes: Axes, step: int | None) -> None:
    if step is not None:
        axes.axvline(step, color="black", linestyle=":", linewidth=1)
    over_steps(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    else:
        axes.annotate("not recorded", (0.5, 0.5), xycoords="axes fraction", ha="center")
