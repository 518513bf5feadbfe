"""Evaluated runs side by side, as notebook 08 shows them: read from what the runs recorded, nothing computed anew.

A notebook of the project can be opened where no such run was made yet; every view then says so, and how to make one.
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
    """Models, each with its seeds, beside `found.baseline`; without `found` there are no runs, as `missing` says."""

    models: list[ModelRuns]
    comparison: ModelComparison | None
    reason: str = ""

    def show_costs(self) -> None:
        """Sizes, tokens, seconds and speeds."""
        if found := self._get_comparison():
            display(Markdown(tables.format_costs(found)))

    def show_needles(self, tasks: Sequence[str] = ("needle", "multi_key", "multi_query")) -> None:
        """What was found, by task and length; and by depth, drawn for those of `tasks` that were asked."""
        if not (found := self._get_comparison()):
            return
        display(Markdown(tables.format_needles(found) or "No run was asked for facts."))
        cells = {
            model.name: [cell for one in model.evaluated.values() for cell in one.get("retrieval", [])]
            for model in self.models
            if model.evaluated
        }
        if asked := [task for task in tasks if any(cell["task"] == task for own in cells.values() for cell in own)]:
            show_figure(figures.plot_retrieval_grid(cells, asked))

    def show_text(self, name: str, target: float | None = None) -> None:
        """Loss in one text, and what each model loses to the baseline; drawn, with `bar` as a level, where it was read
        by position."""
        if not (found := self._get_comparison()):
            return
        display(
            Markdown(tables.format_texts(found, name) or f"No two of these models read the text {name!r} in the same cut.")
        )
        for text in found.texts:
            if text.text == name and figures.get_position_ranges(text):
                show_figure(figures.plot_difference_by_position(text, target))

    def show_training_time(self) -> None:
        """Validation over tokens and over seconds of optimiser steps."""
        if not self._get_comparison():
            return
        runs = [run.history for model in self.models for run in model.runs.values()]
        if have_different_eval_texts(runs):
            print("these runs validate on other texts, or at other lengths: not drawn beside each other")
            return
        curves = [compute_curve(model.name, [run.history for run in model.runs.values()]) for model in self.models]
        show_figure(plot_sweep(curves, title="Validation while training"))

    def show_ablations(self) -> None:
        """What becomes of needles and text when blocks are replaced, or a branch is silent."""
        if found := self._get_comparison():
            display(Markdown(tables.format_ablations(found) or "No run was asked with other blocks."))

    def show_excluded(self) -> None:
        """What the tables do not hold, or not alike, with reasons."""
        if found := self._get_comparison():
            display(Markdown(tables.format_not_compared(found)))

    def _get_comparison(self) -> ModelComparison | None:
        if self.comparison is None:
            print(self.reason)
        return self.comparison


def load_evaluated_models(runs: Sequence[str], baseline: str | None = None, outputs: str = "") -> EvaluatedModels:
    """The runs that `runs` name (folders, ids or patterns, as `nsa-lab compare` has them), beside the model `against`.

    Of `runs` those that name none are left out, with a line; raises ConfigError for runs that cannot be compared.
    """
    folder, notes, paths = resolve.get_outputs_dir(Path(outputs) if outputs else None), list[str](), list[Path]()
    for run in runs:
        try:
            paths += resolve.find_runs(run, folder)
        except RunDirectoryError as error:
            notes.append(str(error))
    models = group_runs(paths, {}, notes.append)
    if not models:
        return EvaluatedModels([], None, "; ".join(notes))
    return EvaluatedModels(models, compare_models(models, find_baseline(models, baseline), notes))
