"""Comparisons of runs at one layer, one head group and one step: the views of notebook 06's explorer, as functions.

Every view takes runs (paths or histories). The text is from their records; the map of the selected blocks needs a
checkpoint. Curves of one layer are in `figures.layer_comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from nsa_lab.config import BRANCHES
from nsa_lab.figures import plot_selection_by_layer
from nsa_lab.figures.layer_comparison import STATISTICS
from nsa_lab.figures.run_axes import Run
from nsa_lab.runs import checkpoint_files
from nsa_lab.runs.history import History, get_latest_training_losses, have_different_eval_texts
from nsa_lab.runs.summary import format_speed
from nsa_lab.workbook.samples import observe_blocks

NAME_COLUMN_WIDTH = 36


def format_numbers_at(runs: Sequence[Run], layer: int, step: int) -> str:
    """Format the last numbers of each run at or before `step`: loss, throughput, gates and selection of one layer."""
    histories = [History.read(run) for run in runs]
    columns = [_collect_numbers(history, layer, step) for history in histories]
    # Run names are too wide for columns. The box character keeps the lines of the table unwrapped on a page.
    lines = [f"[{number}] {history.run}" for number, history in enumerate(histories, 1)]
    lines += [
        f"{f'gates and selection: layer {layer}':<{NAME_COLUMN_WIDTH}}│"
        + "".join(f"{f'[{number}]':>12}" for number in range(1, len(columns) + 1))
    ]
    for name in columns[0] if columns else {}:
        lines.append(f"{name:<{NAME_COLUMN_WIDTH}}│" + "".join(f"{column[name]:>12}" for column in columns))
    if have_different_eval_texts(histories):
        lines.append("The runs were validated on different texts. Do not compare their validation loss.")
    return "\n".join(lines)


def plot_selection_map(run: Run, layer: int, group: int, step: int | None = None) -> Figure:
    """Plot the blocks that one layer and head group selects in a standard-library text.

    The model is the checkpoint nearest to `step`. Raises `NoCheckpoint` if the run has none, and `ValueError` for a dense
    run or for a layer or group that does not exist.
    """
    history = History.read(run)
    model = history.config.model
    if model.attention != "nsa":
        raise ValueError(f"{history.run}: a dense model selects no blocks")
    if not (0 <= layer < model.n_layers and 0 <= group < model.n_kv_groups):
        raise ValueError(
            f"layer {layer}, head group {group}: {history.run} has layers 0 to {model.n_layers - 1} and head "
            f"groups 0 to {model.n_kv_groups - 1}"
        )
    steps = list_checkpoint_steps(history)
    nearest = (
        min(steps, key=lambda candidate: abs(candidate - step)) if steps and step is not None else max(steps, default=None)
    )
    blocks = observe_blocks(history.run_dir, step=nearest)[layer][0, :, group]
    return plot_selection_by_layer(
        {layer: blocks}, history.config.nsa, f"{history.run}, step {nearest:,}, group {group}, on argparse.py"
    )


def list_checkpoint_steps(run: Run) -> list[int]:
    """Return the steps of the run's checkpoints on disk, ascending."""
    return checkpoint_files.list_steps(checkpoint_files.get_checkpoint_dir(History.read(run).run_dir))


def _collect_numbers(history: History, layer: int, step: int) -> dict[str, str]:
    history = history.truncate_at(step)
    numbers = {
        "step": "–" if not history.steps else f"{history.steps[-1]['step']:,}",
        "training, bits per byte": _format_number(_mean_or_nan(get_latest_training_losses(history))),
        "validation, bits per byte": _format_number(_last_or_nan(history.validation()[1])),
        "tokens per second, median": format_speed(history) or "–",
    }
    labels = {f"gate_share_{branch}": f"gate share, {label}" for branch, label in BRANCHES.items()} | STATISTICS
    for name, label in labels.items():
        steps, values = history.layer_series(name)
        layer_values = values[:, layer] if values.shape[1] > layer else np.full(len(steps), np.nan)
        numbers[label] = _format_number(_last_or_nan(layer_values))
    return numbers


def _mean_or_nan(readings: np.ndarray) -> float:
    return float(readings.mean()) if len(readings) else math.nan


def _last_or_nan(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else math.nan


def _format_number(value: float, form: str = "{:.3f}") -> str:
    return form.format(value) if math.isfinite(value) else "–"
