"""Views of evaluated runs for notebook 09, read from the records of the runs. Nothing is computed again.

If there are no such runs yet, every view prints the reason and how to make one. Most recorded runs of a checkout are in an
archive, from which they are unpacked once.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from IPython.display import Markdown, display

from nsa_lab import figures
from nsa_lab.config import ConfigError, UsageError
from nsa_lab.figures.loss import plot_sweep
from nsa_lab.health import comparison_tables as tables
from nsa_lab.health.comparison import ModelComparison, compare_models
from nsa_lab.health.model_runs import EvaluatedRun, ModelRuns, find_baseline, group_runs
from nsa_lab.health.sweep_results import compute_curve
from nsa_lab.runs import resolve
from nsa_lab.runs.atomic_io import write_bytes
from nsa_lab.runs.directory import RunDirectoryError, describe_read_error
from nsa_lab.runs.history import have_different_eval_texts
from nsa_lab.workbook import result_sentences
from nsa_lab.workbook.display import show_figure
from nsa_lab.workbook.notebook import Stop

# Relative to the project. tools/records.py writes both files.
ARCHIVE = Path("docs", "science", "records", "runs.tar.xz")
UNPACKED = Path(".cache", "records")


@dataclass(frozen=True)
class EvaluatedModels:
    """Models with their seeds, and their comparison with a baseline.

    `comparison` is None if there are no runs; `reason` is then the explanation.
    """

    models: list[ModelRuns]
    comparison: ModelComparison | None
    reason: str = ""

    def show_results(self, text: str = "long", target: float | None = None) -> None:
        """State all results in sentences: facts, the loss on `text`, ablations, cost, and the seeds of each model."""
        if not (comparison := self._get_comparison()):
            return
        seeds = [
            f"`{cost.model}`: {', '.join(str(run.seed) for run in cost.runs)}" for cost in comparison.costs if cost.runs
        ]
        _show_sentences(
            [
                *result_sentences.describe_needles(comparison),
                *result_sentences.describe_text(comparison, text, target),
                *result_sentences.describe_ablations(comparison),
                *result_sentences.describe_costs(comparison),
                f"Seeds: {'; '.join(seeds)}.",
            ]
        )

    def show_costs(self) -> None:
        """Show model sizes, tokens, training time and throughput, after the result in a sentence."""
        if comparison := self._get_comparison():
            _show_sentences(result_sentences.describe_costs(comparison))
            display(Markdown(tables.format_costs(comparison)))

    def show_needles(self) -> None:
        """Show the facts found by task and length: in sentences, as a plot, and as tables, folded."""
        if not (comparison := self._get_comparison()):
            return
        _show_sentences(result_sentences.describe_needles(comparison))
        if any(result.every for result in comparison.needles):
            show_figure(figures.plot_facts_by_length(comparison.needles))
        _show_folded_table(
            "All tasks and lengths, per seed; facts that only selection can reach; generated answers",
            tables.format_needles(comparison) or "No run was evaluated on facts.",
        )

    def show_text(self, name: str, target: float | None = None) -> None:
        """Show the loss on one text and the difference of each model from the baseline.

        If the text was evaluated by position, plot the difference, with a line at `target`.
        """
        if not (comparison := self._get_comparison()):
            return
        _show_sentences(result_sentences.describe_text(comparison, name, target))
        for text in comparison.texts:
            if text.text == name and figures.get_position_ranges(text):
                show_figure(figures.plot_difference_by_position(text, target))
        display(
            Markdown(
                tables.format_texts(comparison, name, level=4)
                or f"No two of these models were evaluated on the text {name!r} in the same windows."
            )
        )

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
        """Show needles and text with replaced blocks, or with a branch disabled: in sentences, and as a table, folded."""
        if comparison := self._get_comparison():
            _show_sentences(result_sentences.describe_ablations(comparison))
            _show_folded_table(
                "All lengths and ablations",
                tables.format_ablations(comparison) or "No run was evaluated with other blocks.",
            )

    def show_excluded(self) -> None:
        """Show what the tables omit or compare only in part, with reasons."""
        if comparison := self._get_comparison():
            _show_folded_table("All conditions and omissions", tables.format_not_compared(comparison))

    def _get_comparison(self) -> ModelComparison | None:
        if self.comparison is None:
            print(self.reason)
        return self.comparison


def load_evaluated_models(runs: Sequence[str], baseline: str | None = None, outputs: str = "") -> EvaluatedModels:
    """Load the evaluated runs that `runs` names (directories, ids or patterns, as in `nsa-lab compare`).

    Without `outputs`, archived runs of the checkout are found too. The runs are compared with the model `baseline`. A name
    that matches no run and a run that cannot be read are skipped with a note. Raises `Stop` if the runs cannot be compared.
    """
    folder, notes, run_dirs = resolve.get_outputs_dir(Path(outputs) if outputs else None), list[str](), list[Path]()
    for run in runs:
        archived = [] if outputs else find_archived_runs(run)
        try:
            found = resolve.find_runs(run, folder)
        except RunDirectoryError as error:
            found = []
            if not archived:
                notes.append(str(error))
        names = {path.name for path in found}
        run_dirs += [*found, *(path for path in archived if path.name not in names)]

    def read_each(read: Callable[[Path], EvaluatedRun], paths: Iterable[Path]) -> Iterator[EvaluatedRun]:
        for path in paths:
            try:
                yield read(path)
            except (UsageError, OSError) as error:
                notes.append(f"{path.name}: {describe_read_error(error)}")

    try:
        models = group_runs(run_dirs, {}, notes.append, read_each)
        if not models:
            return EvaluatedModels([], None, "; ".join(notes))
        return EvaluatedModels(models, compare_models(models, find_baseline(models, baseline, "baseline ="), notes))
    except ConfigError as error:
        raise Stop(f"ConfigError: {error}") from None


def _show_sentences(sentences: Sequence[str]) -> None:
    if sentences:
        display(Markdown("\n".join(f"* {sentence}" for sentence in sentences)))


def _show_folded_table(summary: str, markdown: str) -> None:
    display(Markdown(f"<details><summary>{summary}</summary>\n\n{markdown}\n\n</details>"))


def find_archived_runs(pattern: str) -> list[Path]:
    """Return the directories of archived runs whose id matches `pattern`, or begins with it, ordered by id.

    Runs that were not needed before are unpacked into `.cache/records`. The list is empty outside a checkout.
    """
    archive, folder = resolve.get_root() / ARCHIVE, resolve.get_root() / UNPACKED
    manifest = archive.with_suffix("").with_suffix(".json")
    if not (archive.is_file() and manifest.is_file()):
        return []
    entries = json.loads(manifest.read_text(encoding="utf-8"))
    archived = [run for run, entry in entries.items() if entry["place"] == ARCHIVE.as_posix()]
    runs = sorted(run for run in archived if fnmatch(run, pattern) or run.startswith(pattern))
    if missing := {run for run in runs if not (folder / run / "config.yaml").is_file()}:
        _unpack(archive, missing, folder)
    return [folder / run for run in runs]


def _unpack(archive: Path, runs: set[str], folder: Path) -> None:
    files: dict[str, bytes] = {}
    with tarfile.open(archive) as members:
        for member in members:
            run, _, name = member.name.partition("/")
            content = members.extractfile(member)
            if run in runs and content is not None and "/" not in name:
                files[member.name] = content.read()
    # The configuration comes last: a run directory that has one is complete.
    for path in sorted(files, key=lambda path: path.endswith("/config.yaml")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / path, files[path])
