"""Views of evaluated runs for notebook 09, read from the records of the runs. Nothing is computed again.

If there are no such runs yet, every view prints the reason and how to make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from IPython.display import Markdown, display

from nsa_lab import figures
from nsa_lab.figures.loss import plot_sweep
from nsa_lab.health import comparison_tables as tables
from nsa_lab.health.comparison import ModelComparison, compare_models
from nsa_lab.health.model_runs import ModelRuns, find_baseline, group_runs
from nsa_lab.health.sweep_results import compute_curve
from nsa_lab.runs import resolve
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.history import have_different_eval_texts
from nsa_lab.workbook.display import show_figure


@dataclass(frozen=True)
class EvaluatedModels:
    """Models with their seeds, and their comparison with a baseline.

    `comparison` is None if there are no runs; `reason` is then the explanation.
    """

    models: list[ModelRuns]
    comparison: ModelComparison | None
    reason: str = ""

    def show_costs(self) -> None:
        """Show model sizes, tokens, training time and throughput."""
        if comparison := self._get_comparison():
            display(Markdown(tables.format_costs(comparison)))

    def show_needles(self, tasks: Sequence[str] = ("needle", "multi_key", "multi_query")) -> None:
        """Show the facts found by task and length, and a plot by depth of those of `tasks` that were evaluated."""
        if not (comparison := self._get_comparison()):
            return
        display(Markdown(tables.format_needles(comparison) or "No run was evaluated on facts."))
        cells = {
            model.name: [cell for evaluation in model.evaluated.values() for cell in evaluation.get("retrieval", [])]
            for model in self.models
            if model.evaluated
        }
        if evaluated_tasks := [
            task for task in tasks if any(cell["task"] == task for model_cells in cells.values() for cell in model_cells)
        ]:
            show_figure(figures.plot_retrieval_grid(cells, evaluated_tasks))

    def show_text(self, name: str, target: float | None = None) -> None:
        """Show the loss on one text and the difference of each model from the baseline.

        If the text was evaluated by position, plot the difference, with a line at `target`.
        """
        if not (comparison := self._get_comparison()):
            return
        display(
            Markdown(
                tables.format_texts(comparison, name)
                or f"No two of these models were evaluated on the text {name!r} in the same windows."
            )
        )
        for text in comparison.texts:
            if text.text == name and figures.get_position_ranges(text):
                show_figure(figures.plot_difference_by_position(text, target))

    def show_training_time(self) -> None:
        """Plot validation loss against tokens and against step time (optimizer steps only)."""
        if not self._get_comparison():
            return
        runs = [run.history for model in self.models for run in model.runs.values()]
        if have_different_eval_texts(runs):
            print("not plotted: these runs were validated on different texts or at different lengths")
            return
        curves = [compute_curve(model.name, [run.history for run in model.runs.values()]) for model in self.models]
        show_figure(plot_sweep(curves, title="Validation while training"))

    def show_ablations(self) -> None:
        """Show needles and text with replaced blocks, or with a branch disabled."""
        if comparison := self._get_comparison():
            display(Markdown(tables.format_ablations(comparison) or "No run was evaluated with other blocks."))

    def show_excluded(self) -> None:
        """Show what the tables omit or compare only in part, with reasons."""
        if comparison := self._get_comparison():
            display(Markdown(tables.format_not_compared(comparison)))

    def _get_comparison(self) -> ModelComparison | None:
        if self.comparison is None:
            print(self.reason)
        return self.comparison


def load_evaluated_models(runs: Sequence[str], baseline: str | None = None, outputs: str = "") -> EvaluatedModels:
    """Load the evaluated runs that `runs` names (directories, ids or patterns, as in `nsa-lab compare`).

    They are compared with the model `baseline`. A name that matches no run is skipped with a note. Raises ConfigError if
    the runs cannot be compared.
    """
    folder, notes, run_dirs = resolve.get_outputs_dir(Path(outputs) if outputs else None), list[str](), list[Path]()
    for run in runs:
        try:
            run_dirs += resolve.find_runs(run, folder)
        except RunDirectoryError as error:
            notes.append(str(error))
    models = group_runs(run_dirs, {}, notes.append)
    if not models:
        return EvaluatedModels([], None, "; ".join(notes))
    return EvaluatedModels(models, compare_models(models, find_baseline(models, baseline), notes))
