"""Format a comparison of models as Markdown tables, for `nsa-lab compare` and notebook 09."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from nsa_lab.health.comparison import (
    AblationSummary,
    ModelComparison,
    ModelCost,
    NeedleResult,
    Proportion,
    RulerScore,
    RunCost,
)
from nsa_lab.health.paired_text_loss import RangeDifference, TextDifference
from nsa_lab.health.sweep_results import SeedMean
from nsa_lab.runs.tables import EMPTY_CELL, Table

TaskResult = TypeVar("TaskResult", NeedleResult, RulerScore)


def format_markdown(comparison: ModelComparison) -> str:
    """Return all tables with headings, and the list of omitted comparisons."""
    parts = {
        "Models": format_costs,
        "Needles": format_needles,
        "RULER": format_ruler,
        "Text": format_texts,
        "Ablations": format_ablations,
    }
    tables = {heading: format_part(comparison) for heading, format_part in parts.items()}
    sections = [f"## {heading}\n\n{table}\n" for heading, table in tables.items() if table]
    return "\n".join([*sections, "## Not compared, or under different conditions", "", format_not_compared(comparison)])


def format_not_compared(comparison: ModelComparison) -> str:
    """Return the list of omitted comparisons, or a sentence that there are none."""
    return "\n".join([f"* {line}" for line in comparison.not_compared] or ["Nothing was omitted."])


def format_costs(comparison: ModelComparison) -> str:
    """Return the table of sizes, tokens, times and speeds of all models."""
    return "\n".join(_format_cost_lines(comparison))


def format_needles(comparison: ModelComparison) -> str:
    """Return the tables of correct answers by task and length; empty if there are none."""
    return "\n".join(_format_needle_lines(comparison))


def format_ruler(comparison: ModelComparison) -> str:
    """Return the table of RULER's scores by task and length; empty if there are none."""
    title = (
        "Score from 0 to 100: the percentage of answers that occur in the generated text, per seed: mean over seeds [95% "
        f"Wilson interval over questions]; difference to {comparison.baseline} on the same questions, ± 95% over questions."
    )
    return "\n".join(_format_task_table(title, "tokens", comparison.ruler, _format_ruler_score))


def format_texts(comparison: ModelComparison, only: str | None = None, *, level: int = 3) -> str:
    """Return a table of losses by position for each text, under headings of `level`; empty if there are no texts.

    `only`: name of the only text to include; None: all texts.
    """
    return "\n".join(_format_text_lines(comparison, only, "#" * level))


def format_ablations(comparison: ModelComparison) -> str:
    """Return the table of answers and text losses under all ablations; empty if there are none."""
    return "\n".join(_format_ablation_lines(comparison))


def _format_cost_lines(comparison: ModelComparison) -> Iterator[str]:
    ratio = f"ratio to {comparison.baseline}"
    names = ("model", "seeds", "parameters", "tokens", "step time, s", ratio, "total time, s", ratio)
    yield from _format_table((*names, "tokens per second, by stage"), map(_format_cost_row, comparison.costs))
    yield from (
        "Times are per seed, in order: optimizer steps only, and the whole run with evaluation, saving and compilation. "
        f"Ratios are to {comparison.baseline} over the same seeds. Speeds are medians of readings, averaged over seeds.",
        "",
    )


def _format_cost_row(cost: ModelCost) -> list[str]:
    return [
        cost.model,
        ", ".join(str(run.seed) for run in cost.runs),
        _format_per_run(cost.runs, lambda run: run.parameters),
        _format_per_run(cost.runs, lambda run: run.tokens),
        " / ".join(_format_number(run.seconds, "{:,.1f}") for run in cost.runs),
        _format_number(cost.seconds_share, "{:.3f}"),
        " / ".join(_format_number(run.wall_s, "{:,.1f}") for run in cost.runs),
        _format_number(cost.wall_share, "{:.3f}"),
        _format_speeds(cost.runs),
    ]


def _format_per_run(runs: Sequence[RunCost], get_value: Callable[[RunCost], int | None]) -> str:
    """Return the value of each run; only once if all are equal."""
    return " / ".join(dict.fromkeys(_format_number(get_value(run), "{:,}") for run in runs))


def _format_speeds(runs: Sequence[RunCost]) -> str:
    if len({len(run.tokens_per_s) for run in runs}) > 1:
        return "different stages: " + "; ".join(_format_speeds([run]) for run in runs)
    return ", ".join(f"{speed:,.0f}" for speed in np.mean([run.tokens_per_s for run in runs], axis=0)) or EMPTY_CELL


def _format_needle_lines(comparison: ModelComparison) -> Iterator[str]:
    tables: tuple[tuple[str, Callable[[NeedleResult], str]], ...] = (
        (
            "Percent of answers with all tokens correct, per seed: over all seeds [95% Wilson interval].",
            lambda result: _format_proportions(result.by_seed, result.every),
        ),
        (
            "Only facts beyond the window and after the first block, over all seeds:",
            lambda result: _format_proportion(result.far),
        ),
        ("Generated answers, over all seeds:", lambda result: _format_proportion(result.written)),
    )
    for title, format_cell in tables:
        yield from _format_task_table(title, "bytes", comparison.needles, format_cell)


def _format_task_table(
    title: str, unit: str, results: Sequence[TaskResult], format_cell: Callable[[TaskResult], str]
) -> Iterator[str]:
    """Yield the lines of a table with its title; none if no model has such a result. `unit`: of lengths."""
    models = list(dict.fromkeys(result.model for result in results))
    cells = {(result.task, result.length, result.model): format_cell(result) for result in results}
    rows = dict.fromkeys((task, length) for (task, length, _), text in cells.items() if text != EMPTY_CELL)
    if not rows:
        return
    yield from (title, "")
    yield from _format_table(
        ("task", unit, *models),
        (
            [task, f"{length:,}", *(cells.get((task, length, model), EMPTY_CELL) for model in models)]
            for task, length in rows
        ),
    )


def _format_ruler_score(result: RulerScore) -> str:
    per_seed = " / ".join(EMPTY_CELL if score is None else f"{score:.1f}" for score in result.by_seed.values())
    difference = "; {:+.1f} ± {:.1f}".format(*result.difference) if result.difference else ""
    return f"{per_seed}: {result.score:.1f} [{result.low:.1f}, {result.high:.1f}] of {result.questions:,}{difference}"


def _format_text_lines(comparison: ModelComparison, only: str | None, heading: str) -> Iterator[str]:
    texts = [text for text in comparison.texts if only in (None, text.text)]
    if not texts:
        return
    yield from ("Bits per byte, means over seeds, and differences with 95% confidence intervals (Student's t).", "")
    for text in texts:
        seeds = f"seed{'s' * (len(text.seeds) != 1)} {', '.join(map(str, text.seeds))}"
        yield from (f"{heading} {text.text}: {text.model} minus {text.baseline}, {seeds}", "")
        names = ("positions", text.model, text.baseline, "difference", "over windows", "windows", "over seeds")
        yield from _format_table(names, (_format_range_row(place, text) for place in text.places))


def _format_range_row(place: RangeDifference, text: TextDifference) -> list[str]:
    return [
        place.place,
        f"{place.bits:.4f}",
        f"{place.baseline_bits:.4f}",
        f"{place.difference:+.4f}",
        _format_interval(place.over_windows, "unknown" if place.windows is None else "none: one window"),
        _format_number(place.windows, "{:,}"),
        _format_interval(place.over_seeds, "none: one seed"),
    ]


def _format_ablation_lines(comparison: ModelComparison) -> Iterator[str]:
    if not comparison.interventions:
        return
    yield from (
        "Percent of needles found, per seed: over all seeds [95% Wilson interval]; only facts beyond the window and after "
        "the first block; and bits per byte of the surrounding text minus those with selected blocks, ± 95% over seeds.",
        "",
    )
    for model in dict.fromkeys(result.model for result in comparison.interventions):
        yield from (f"### {model}", "")
        own = [result for result in comparison.interventions if result.model == model]
        yield from _format_table(
            ("bytes", "blocks, or disabled branch", "found", "far facts", "text"), map(_format_ablation_row, own)
        )


def _format_ablation_row(result: AblationSummary) -> list[str]:
    return [
        f"{result.length:,}",
        result.name,
        _format_proportions(result.by_seed, result.every),
        _format_proportion(result.far),
        _format_seed_mean(result.d_text),
    ]


def _format_proportions(by_seed: dict[int, Proportion | None], every: Proportion | None) -> str:
    per_seed = " / ".join(
        EMPTY_CELL if proportion is None else f"{100 * proportion.share:.1f}" for proportion in by_seed.values()
    )
    return f"{per_seed}: {_format_proportion(every)}"


def _format_proportion(proportion: Proportion | None) -> str:
    if proportion is None:
        return EMPTY_CELL
    low, high = 100 * proportion.low, 100 * proportion.high
    return f"{100 * proportion.share:.1f} [{low:.1f}, {high:.1f}] of {proportion.total:,}"


def _format_seed_mean(seed_mean: SeedMean | None) -> str:
    if seed_mean is None:
        return EMPTY_CELL
    return f"{seed_mean.mean:+.4f} " + ("(one seed)" if seed_mean.half is None else f"± {seed_mean.half:.4f}")


def _format_interval(interval: tuple[float, float] | None, placeholder: str) -> str:
    return placeholder if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"


def _format_number(value: float | None, form: str) -> str:
    return EMPTY_CELL if value is None else form.format(value)


def _format_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (Table(names, rows).to_markdown(), "")
