"""Pictures of runs, from what a run directory records. Every function takes runs and gives a matplotlib Figure.

A run is a path, or a `History` that was read already. Figures carry a title, units and legends, use one colour a branch
everywhere (colour-blind-safe), and mark where a run was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from nsa_lab.explore.show import BRANCH_COLOURS, DENSE, FORCED
from nsa_lab.health import LIMITS
from nsa_lab.health.branches import choice_range
from nsa_lab.history import History

Run = str | Path | History

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STEP = "optimiser step"
LONG = 400  # readings from which on a run is long
BRANCH_NAMES = {"cmp": "compressed", "sel": "selected", "win": "window"}
# The lightest fifth of the map is left out: it is hard to see on white.
LAYER_MAP = LinearSegmentedColormap.from_list("layers", colormaps["cividis"](np.linspace(0, 0.82, 64)))


def loss_curves(runs: Run | Sequence[Run], *, smooth: int = 10) -> Figure:
    """Loss in nats a token, and bits a byte with the validation, over steps; thin as recorded and thick smoothed.

    The mean is over `smooth` readings: over fewer where there are few, so that it does not lag behind, more where there are
    many.
    """
    histories = _histories(runs)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle("Loss: " + ", ".join(h.run for h in histories), fontsize=11)
    nats, bits = figure.subplots(1, 2)
    for history, colour, width in zip(histories, cycle(RUN_COLOURS), _widths(histories), strict=False):
        named = f"{_attention(history, histories)}training"
        _draw_smoothed(nats, *history.series("loss"), smooth, colour, named, width)
        _mark_resumes(nats, history)
    nats.set(xlabel=STEP, ylabel="loss, nats a token")
    _legend(nats)
    _draw_loss(bits, histories, smooth)
    _close_to_the_end([(nats, "loss"), (bits, "bpb")], histories)
    return figure


def validation_gap(nsa: Run, dense: Run, limit: float = LIMITS.twin_gap) -> Figure:
    """Validation bits a byte of a run over that of its dense twin, in percent, at the steps that both evaluated."""
    ours, theirs = (dict(zip(*(v.tolist() for v in History.read(run).validation()), strict=True)) for run in (nsa, dense))
    steps = [step for step in ours if step in theirs]
    figure, axes = _figure(8, 3.4, "Validation beside the dense twin")
    gaps = [100 * (ours[step] / theirs[step] - 1) for step in steps]
    axes.plot(steps, gaps, color=RUN_COLOURS[0], marker="o", markersize=3.5)
    axes.axhline(0, color="black", linewidth=0.8)
    _mark_level(axes, 100 * limit, f"limit, {limit:+.0%}")
    axes.set(xlabel=STEP, ylabel="bits a byte, NSA over dense, %")
    over_steps(axes)
    return figure


def learning_rate(runs: Run | Sequence[Run]) -> Figure:
    """Learning rate and gradient norm over steps."""
    figure, (rate, norm) = _rows("Optimiser", 2)
    for history, colour in zip(_histories(runs), cycle(RUN_COLOURS), strict=False):
        rate.plot(*history.series("lr"), color=colour, label=history.run)
        norm.plot(*history.series("grad_norm"), color=colour, linewidth=0.8, label=history.run)
        norm.axhline(history.config.train.grad_clip, color=colour, linestyle=":", linewidth=1)
    for axes in (rate, norm):
        over_steps(axes)
    rate.set_ylabel("learning rate")
    norm.set(ylabel="gradient norm\n(clipped at the dotted line)", yscale="log", xlabel=STEP)
    rate.legend(frameon=False, fontsize=8)
    return figure


def gate_shares(run: Run) -> Figure:
    """Share of each branch in the gates, and their entropy, of every layer over steps."""
    history = History.read(run)
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(f"Gates of {history.run}, by layer", fontsize=11)
    panels = figure.subplots(2, 2, sharex=True).flatten()
    for index, (axes, branch) in enumerate(zip(panels, BRANCH_NAMES, strict=False)):
        _draw_layers(figure if index % 2 else None, axes, history, f"gate_share_{branch}")
        axes.set_title(f"share of the {BRANCH_NAMES[branch]} branch", fontsize=9, color=BRANCH_COLOURS[branch])
        axes.axhline(1 / 3, color="black", linestyle=":", linewidth=1)
        axes.set(ylabel="share of the gates", ylim=(0, 1))
    _draw_layers(figure, panels[3], history, "gate_entropy")
    _mark_level(panels[3], math.log(3), "ln 3: all branches alike")
    panels[3].set_title("entropy", fontsize=9)
    panels[3].set(ylabel="nats", ylim=(0, 1.25))
    for axes in panels[2:]:
        axes.set_xlabel(STEP)
    return figure


def gate_layers(run: Run) -> Figure:
    """How each layer divides its gates over the branches, at the first reading and at the last."""
    history = History.read(run)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.suptitle(f"Gates by layer: {history.run}", fontsize=11)
    panels = figure.subplots(1, 2, sharey=True)
    steps, _ = history.layers("gate_entropy")
    for axes, which in zip(panels, (0, -1), strict=True):
        axes.set(xlabel="layer", ylim=(0, 1))
        if len(steps):
            axes.set_title(f"{'last' if which else 'first'} reading, step {steps[which]:,}", fontsize=9)
            _stack_shares(axes, history, which)
        else:
            _say_nothing(axes)
    panels[0].set_ylabel("share of the gates")
    if len(steps):
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    return figure


def selection_statistics(run: Run) -> Figure:
    """By layer over steps: reuse between neighbours, distance, first block's share, overlap with the window.

    Dotted lines: what blocks chosen by chance, always the nearest or always the oldest would give.
    """
    history = History.read(run)
    length, nsa = history.config.train.seq_len, history.config.nsa
    span = choice_range(length, nsa)
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(f"Block selection of {history.run} ({length} tokens, {nsa.n_sel} blocks of {nsa.l_sel})", fontsize=11)
    panels = figure.subplots(2, 2, sharex=True).flatten()
    named = {
        "sel_reuse": ("blocks shared with the query before", {"by chance": span.chance_reuse}),
        "sel_distance": ("mean distance, blocks", {"always the nearest": span.nearest, "always the oldest": span.farthest}),
        "sel_sink_share": ("attention on the first block, share", {}),
        "sel_window_overlap": ("selected keys also in the window, share", {}),
    }
    for index, (axes, (name, (label, marks))) in enumerate(zip(panels, named.items(), strict=True)):
        _draw_layers(figure if index % 2 else None, axes, history, name)
        axes.set_title(label, fontsize=9)
        for text, value in marks.items():
            _mark_level(axes, value, text)
    for axes in panels[2:]:
        axes.set_xlabel(STEP)
    return figure


def branch_norms(run: Run) -> Figure:
    """Root mean square of each branch's output, mean and range over layers, over steps."""
    history = History.read(run)
    figure, axes = _figure(8, 3.8, f"Size of each branch's output: {history.run}")
    for branch, label in BRANCH_NAMES.items():
        _band(axes, *history.layers(f"norm_{branch}"), BRANCH_COLOURS[branch], label)
    axes.set(xlabel=STEP, ylabel="root mean square of the output")
    _legend(axes)
    return figure


def throughput(runs: Run | Sequence[Run]) -> Figure:
    """Tokens a second over steps with the median and the stalls, the share of time spent waiting for data, peak memory."""
    histories = _histories(runs)
    figure, (speed, wait, memory) = _rows("Pace: " + ", ".join(h.run for h in histories), 3)
    for history, colour in zip(histories, cycle(RUN_COLOURS), strict=False):
        _draw_speed(speed, history, colour)
        _mark_stalls(speed, history)
        steps, took = history.series("dt_s")
        wait.plot(steps, 100 * history.series("data_s")[1] / np.maximum(took, 1e-12), color=colour, linewidth=1)
        steps, peak = history.series("mem_peak_bytes")
        over_steps(memory)
        memory.plot(steps, peak / 1e9, color=colour, linewidth=1.5)
    memory.margins(y=0.12)
    speed.set_ylabel("tokens a second")
    wait.set_ylabel("data wait, %")
    memory.set(ylabel="peak memory, GB", xlabel=STEP, ylim=(0, None))
    speed.legend(frameon=False, fontsize=8)
    return figure


def overview(run: Run) -> Figure:
    """The first screen of a report: loss, gates, selection and pace."""
    history = History.read(run)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    figure.suptitle(history.run, fontsize=11)
    dense = history.config.model.attention == "dense"
    panels = figure.subplots(1 if dense else 2, 2, squeeze=False)
    loss, speed = panels[-1][0] if dense else panels[0][0], panels[-1][1]
    loss.set_title("Loss", fontsize=10)
    _draw_loss(loss, [history], smooth=10)
    _close_to_the_end([(loss, "bpb")], [history])
    if not dense:
        panels[0][1].set_title("Gate shares, mean and range over layers", fontsize=10)
        _draw_gates(panels[0][1], history)
        panels[1][0].set_title("Blocks shared with the query before, by layer", fontsize=10)
        _draw_layers(figure, panels[1][0], history, "sel_reuse")
    speed.set_title("Throughput", fontsize=10)
    _draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens a second")
    for axes in panels[-1]:
        axes.set_xlabel(STEP)
    return figure


def progress(run: Run) -> Figure:
    """A run under way: loss, learning rate, gates and pace."""
    history = History.read(run)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    figure.suptitle(f"{history.run}, step {history.reached:,} of {history.config.train.steps:,}", fontsize=11)
    (loss, gates), (rate, speed) = figure.subplots(2, 2)
    loss.set_title("Loss, as recorded and smoothed", fontsize=10)
    _draw_loss(loss, [history], smooth=10)
    gates.set_title("Gate shares, mean and range over layers", fontsize=10)
    if history.config.model.attention == "nsa":
        _draw_gates(gates, history)
    else:
        _say_nothing(gates, "a dense model has no gates")
    rate.set_title("Learning rate", fontsize=10)
    rate.plot(*history.series("lr"), color=RUN_COLOURS[0])
    over_steps(rate)
    rate.set_ylabel("learning rate")
    speed.set_title("Throughput", fontsize=10)
    _draw_speed(speed, history, RUN_COLOURS[0])
    speed.set_ylabel("tokens a second")
    for axes in (rate, speed):
        axes.set_xlabel(STEP)
    return figure


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values, fewer at the start; values that are not finite are left out."""
    finite = np.isfinite(values)
    total = np.cumsum(np.where(finite, values, 0.0))
    count = np.cumsum(finite)
    total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def _draw_loss(axes: Axes, histories: list[History], smooth: int) -> None:
    for history, colour, width in zip(histories, cycle(RUN_COLOURS), _widths(histories), strict=False):
        named = _attention(history, histories)
        _draw_smoothed(axes, *history.series("bpb"), smooth, colour, f"{named}training", width)
        held_out, validation = history.validation()
        axes.plot(
            held_out,
            validation,
            color=colour,
            linestyle="--",
            marker="o",
            markersize=3.5,
            zorder=3,
            label=f"{named}validation",
        )
        _mark_resumes(axes, history)
    axes.set(xlabel=STEP, ylabel="bits a byte")
    _legend(axes)
    over_steps(axes)


def _draw_smoothed(
    axes: Axes, steps: np.ndarray, values: np.ndarray, smooth: int, colour: str, label: str, width: float
) -> None:
    axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
    window = max(1, min(smooth, len(values) // 20), len(values) // 50)
    axes.plot(steps, smoothed(values, window), color=colour, linewidth=width, label=label)
    over_steps(axes)


def _widths(histories: list[History]) -> list[float]:
    """Of each run's curve: the first of several is the widest, so that one that lies under another is seen."""
    return [1.6] if len(histories) == 1 else [max(3.2 - 1.8 * index, 1.0) for index in range(len(histories))]


def _close_to_the_end(panels: list[tuple[Axes, str]], histories: list[History]) -> None:
    """Where a run is long, its first tenth would press all the rest into a line: the axes show from there on upwards."""
    for axes, name in panels:
        shown = [
            values[len(values) // 10 :]
            for values in (history.series(name)[1] for history in histories)
            if len(values) >= LONG and np.isfinite(values[len(values) // 10 :]).any()
        ]
        if shown and len(shown) == len(histories):
            low, high = min(np.nanmin(values) for values in shown), max(np.nanmax(values) for values in shown)
            margin = 0.1 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + 3 * margin)
            # Outside the axes, where no curve and no mark of an attempt can be.
            axes.annotate(
                "the beginning lies above ↑", (0.0, 1.01), xycoords="axes fraction", fontsize=8, va="bottom", color=DENSE
            )


def _attention(history: History, among: list[History]) -> str:
    """What tells a run apart in a legend: its attention where that does, else its name; nothing if it is alone."""
    if len(among) < 2:
        return ""
    kinds = [other.config.model.attention for other in among]
    return f"{history.config.model.attention if len(set(kinds)) == len(kinds) else history.run}: "


def _stack_shares(axes: Axes, history: History, which: int) -> None:
    bottom: np.ndarray | float = 0.0
    for branch, label in BRANCH_NAMES.items():
        values = history.layers(f"gate_share_{branch}")[1][which]
        axes.bar(np.arange(len(values)), values, bottom=bottom, color=BRANCH_COLOURS[branch], label=label)
        bottom = bottom + values
    axes.set_xticks(_ticks(len(values)))


def _draw_gates(axes: Axes, history: History) -> None:
    for branch, label in BRANCH_NAMES.items():
        _band(axes, *history.layers(f"gate_share_{branch}"), BRANCH_COLOURS[branch], label)
    axes.axhline(1 / 3, color="black", linestyle=":", linewidth=1)
    axes.set(ylabel="share of the gates", ylim=(0, 1))
    _legend(axes, columns=3)


def _draw_speed(axes: Axes, history: History, colour: str) -> None:
    steps, speed = history.series("tokens_per_s")
    over_steps(axes)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
    axes.plot(steps, speed, color=colour, linewidth=1, marker="." if len(steps) < 80 else None, label=history.run)
    if len(speed):
        median = float(np.median(speed))
        axes.axhline(median, color=colour, linestyle=":", linewidth=1, label=f"median {median:,.0f}")
        axes.set_ylim(0, 1.25 * float(speed.max()))
    _legend(axes)
    _mark_resumes(axes, history)


def _draw_layers(figure: Figure | None, axes: Axes, history: History, name: str) -> None:
    """A line a layer; with `figure` a colour bar that says which is which."""
    steps, values = history.layers(name)
    if not len(values):
        _say_nothing(axes)
        return
    colours = ScalarMappable(Normalize(0, max(values.shape[1] - 1, 1)), LAYER_MAP)
    for layer, line in enumerate(values.T):
        axes.plot(steps, line, color=colours.to_rgba(layer), linewidth=1.2, marker="." if len(steps) < 30 else None)
    over_steps(axes)
    if figure is not None:
        figure.colorbar(colours, ax=axes, label="layer", ticks=_ticks(values.shape[1]))


def _band(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    if not len(values):
        _say_nothing(axes)
        return
    axes.fill_between(steps, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.18, linewidth=0)
    axes.plot(steps, values.mean(axis=1), color=colour, label=label, marker="." if len(steps) < 30 else None)
    over_steps(axes)


def over_steps(axes: Axes) -> None:
    """Steps along the bottom: whole numbers, few enough to be read, over a faint grid."""
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.25, linewidth=0.5)


def _mark_level(axes: Axes, value: float, text: str) -> None:
    axes.axhline(value, color="black", linestyle=":", linewidth=1)
    axes.margins(y=0.12)
    axes.annotate(
        text, (0, value), xycoords=axes.get_yaxis_transform(), xytext=(4, 3), textcoords="offset points", fontsize=8
    )


def _mark_resumes(axes: Axes, history: History) -> None:
    for attempt in history.attempts()[1:]:
        axes.axvline(attempt.from_step, color=DENSE, linestyle="--", linewidth=0.8)
        axes.annotate(
            f"attempt {attempt.number}",
            (attempt.from_step, 0.98),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            rotation=90,
            va="top",
            ha="right",
            color=DENSE,
        )


def _mark_stalls(axes: Axes, history: History) -> None:
    for index, stall in enumerate(history.of_kind("stall")):
        axes.axvline(stall["step"], color=FORCED, linewidth=1.2, label=None if index else "stall")
    _legend(axes)


def _histories(runs: Run | Sequence[Run]) -> list[History]:
    several = [runs] if isinstance(runs, str | Path | History) else list(runs)
    return [History.read(run) for run in several]


def _figure(width: float, height: float, named: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(named, fontsize=10)
    return figure, axes


def _rows(named: str, count: int) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(8, 1.2 + 2.2 * count), layout="constrained")
    figure.suptitle(named, fontsize=11)
    return figure, figure.subplots(count, 1, sharex=True)


def _ticks(layers: int) -> list[int]:
    return list(range(0, layers, max(1, layers // 6)))


def _legend(axes: Axes, columns: int = 1) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, ncols=columns)


def _say_nothing(axes: Axes, why: str = "not recorded") -> None:
    axes.annotate(why, (0.5, 0.5), xycoords="axes fraction", ha="center", color=DENSE)


# What a report without a notebook shows, in this order.
RUN_PICTURES: tuple[Callable[[Run], Figure], ...] = (overview, learning_rate, throughput)
NSA_PICTURES: tuple[Callable[[Run], Figure], ...] = (gate_shares, gate_layers, selection_statistics, branch_norms)
