"""Evaluated runs side by side, as notebook 08 shows them: read from what the runs recorded, nothing computed anew.

A notebook of the project can be opened where no such run was made yet; every view then says so, and how to make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from IPython.display import Markdown, display

from nsa_lab import figures
from nsa_lab.figures.sweep import sweep_curves
from nsa_lab.health import comparison_tables as tables
from nsa_lab.health.comparison import Compared, compare_models
from nsa_lab.health.models import ModelRuns, baseline_of, models_of
from nsa_lab.health.sweep import curve_of
from nsa_lab.runs import names
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.history import evaluated_apart
from nsa_lab.workbook.show import show


@dataclass(frozen=True)
class EvaluatedModels:
    """Models, each with its seeds, beside `found.baseline`; without `found` there are no runs, as `missing` says."""

    models: list[ModelRuns]
    found: Compared | None
    missing: str = ""

    def costs(self) -> None:
        """Sizes, tokens, seconds and speeds."""
        if found := self._told():
            display(Markdown(tables.costs(found)))

    def needles(self, tasks: Sequence[str] = ("needle", "multi_key", "multi_query")) -> None:
        """What was found, by task and length; and by depth, drawn for those of `tasks` that were asked."""
        if not (found := self._told()):
            return
        display(Markdown(tables.needles(found) or "No run was asked for facts."))
        cells = {
            model.name: [cell for one in model.evaluated.values() for cell in one.get("retrieval", [])]
            for model in self.models
            if model.evaluated
        }
        if asked := [task for task in tasks if any(cell["task"] == task for own in cells.values() for cell in own)]:
            show(figures.retrieval_maps(cells, asked))

    def text(self, name: str, bar: float | None = None) -> None:
        """Loss in one text, and what each model loses to the baseline; drawn, with `bar` as a level, where it was read
        by position."""
        if not (found := self._told()):
            return
        display(Markdown(tables.texts(found, name) or f"No two of these models read the text {name!r} in the same cut."))
        for text in found.texts:
            if text.text == name and figures.octaves_of(text):
                show(figures.difference_by_position(text, bar))

    def time(self) -> None:
        """Validation over tokens and over seconds of optimiser steps."""
        if not self._told():
            return
        runs = [run.history for model in self.models for run in model.runs.values()]
        if evaluated_apart(runs):
            print("these runs validate on other texts, or at other lengths: not drawn beside each other")
            return
        curves = [curve_of(model.name, [run.history for run in model.runs.values()]) for model in self.models]
        show(sweep_curves(curves, named="Validation while training"))

    def interventions(self) -> None:
        """What becomes of needles and text when blocks are replaced, or a branch is silent."""
        if found := self._told():
            display(Markdown(tables.interventions(found) or "No run was asked with other blocks."))

    def not_compared(self) -> None:
        """What the tables do not hold, or not alike, with reasons."""
        if found := self._told():
            display(Markdown(tables.not_compared(found)))

    def _told(self) -> Compared | None:
        if self.found is None:
            print(self.missing)
        return self.found


def evaluated(runs: Sequence[str], against: str | None = None, outputs: str = "") -> EvaluatedModels:
    """The runs that `runs` name (folders, ids or patterns, as `nsa-lab compare` has them), beside the model `against`.

    Of `runs` those that name none are left out, with a line; raises ConfigError for runs that cannot be compared.
    """
    folder, notes, paths = names.outputs_folder(Path(outputs) if outputs else None), list[str](), list[Path]()
    for run in runs:
        try:
            paths += names.find_runs(run, folder)
        except RunDirectoryError as error:
            notes.append(str(error))
    models = models_of(paths, {}, notes.append)
    if not models:
        return EvaluatedModels([], None, "; ".join(notes))
    return EvaluatedModels(models, compare_models(models, baseline_of(models, against), notes))
