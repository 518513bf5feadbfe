"""Whether selection finds, over a run: what an answer costs when the blocks that were chosen are replaced."""

from __future__ import annotations

from matplotlib.figure import Figure

from nsa_lab.figures.run_axes import STEP_LABEL, Run, format_step_axis
from nsa_lab.figures.style import CMP, DENSE, FORCED, SEL, add_legend, annotate_empty, make_panel
from nsa_lab.runs.history import History

# Each with what takes the place of the blocks that were chosen, and its colour.
ABLATION_LINES = {
    "chosen": ("the blocks chosen", SEL),
    "random": ("random blocks", DENSE),
    "nearest": ("the nearest blocks", CMP),
    "no_sel": ("no selected branch", FORCED),
}


def plot_selection_benefit(run: Run) -> Figure:
    """Loss of answers that only the selected branch can reach, nats per byte, at every evaluation that asked for them."""
    history = History.read(run)
    asked = [event for event in history.current_events("reach") if isinstance(event.get("answer_loss"), dict)]
    figure, axes = make_panel(8, 3.8, f"Answers beyond the window: {history.run}")
    if not asked:
        annotate_empty(axes, "not recorded: the run is older than this question, or it could not be asked")
    for name, (label, colour) in ABLATION_LINES.items():
        told = [(event["step"], event["answer_loss"].get(name)) for event in asked]
        points = [(step, loss) for step, loss in told if loss is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=colour, label=label)
    axes.set(xlabel=STEP_LABEL, ylabel="loss of the answers, nats per byte")
    format_step_axis(axes)
    add_legend(axes)
    return figure
