"""A comparison of models as Markdown, for `nsa-lab compare` and notebook 08: tables that a page can hold as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from nsa_lab.health.comparison import AblationResult, ModelComparison, ModelCost, NeedleResult, RunCost
from nsa_lab.health.paired_text_loss import RangeDifference, TextDifference
from nsa_lab.health.proportions import Proportion
from nsa_lab.health.sweep_results import SeedMean

# What a table holds where there is nothing to tell.
EMPTY_CELL = "–"


def format_markdown(found: ModelComparison) -> str:
    """Every table under its heading, and what was not compared."""
    parts = {"Models": format_costs, "Needles": format_needles, "Text": format_texts, "Interventions": format_ablations}
    tables = {heading: part(found) for heading, part in parts.items()}
    told = [f"## {heading}\n\n{table}\n" for heading, table in tables.items() if table]
    return "\n".join([*told, "## What could not be compared, or not alike", "", format_not_compared(found)])


def format_not_compared(found: ModelComparison) -> str:
    """A list of it, or that there is nothing."""
    return "\n".join([f"* {line}" for line in found.not_compared] or ["Everything was."])


def format_costs(found: ModelComparison) -> str:
    """Sizes, tokens, seconds and speeds of every model."""
    return "\n".join(_format_cost_lines(found))


def format_needles(found: ModelComparison) -> str:
    """Answers that are right, by task and length; empty where none was asked."""
    return "\n".join(_format_needle_lines(found))


def format_texts(found: ModelComparison, only: str | None = None, *, level: int = 3) -> str:
    """Losses by position of every text, or of `only` that one, a heading of `level` for each; empty where there is none."""
    return "\n".join(_format_text_lines(found, only, "#" * level))


def format_ablations(found: ModelComparison) -> str:
    """Answers and text under every intervention; empty where there was none."""
    return "\n".join(_format_ablation_lines(found))


def _format_cost_lines(found: ModelComparison) -> Iterator[str]:
    share = f"share of {found.baseline}"
    names = ("model", "seeds", "parameters", "tokens", "steps, seconds", share, "whole runs, seconds", share)
    yield from _format_table((*names, "tokens per second, stage by stage"), map(_format_cost_row, found.costs))
    yield from (
        "Seconds of each seed in order: of optimiser steps, and of whole runs, with evaluations, saves and compiling. "
        f"Shares are of the time of {found.baseline} at the same seeds. Speeds are medians of readings, means over seeds.",
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


def _format_per_run(runs: Sequence[RunCost], of: Callable[[RunCost], int | None]) -> str:
    """What all runs have, once, or that of each."""
    return " / ".join(dict.fromkeys(_format_number(of(run), "{:,}") for run in runs))


def _format_speeds(runs: Sequence[RunCost]) -> str:
    if len({len(run.tokens_per_s) for run in runs}) > 1:
        return "readings of other stages: " + "; ".join(_format_speeds([run]) for run in runs)
    return ", ".join(f"{speed:,.0f}" for speed in np.mean([run.tokens_per_s for run in runs], axis=0)) or EMPTY_CELL


def _format_needle_lines(found: ModelComparison) -> Iterator[str]:
    if not found.needles:
        return
    yield from (
        "Percent of the answers that are right in every token, seed by seed: of all seeds [95 %, Wilson].",
        "",
    )
    yield from _format_needle_table(found.needles, lambda one: _format_proportions(one.by_seed, one.every))
    yield from ("Of these, facts beyond the window and behind the first block, of all seeds:", "")
    yield from _format_needle_table(found.needles, lambda one: _format_proportion(one.far))
    yield from ("Written by the model itself, of all seeds:", "")
    yield from _format_needle_table(found.needles, lambda one: _format_proportion(one.written))


def _format_needle_table(needles: Sequence[NeedleResult], cell: Callable[[NeedleResult], str]) -> Iterator[str]:
    models = list(dict.fromkeys(one.model for one in needles))
    cells = {(one.task, one.length, one.model): cell(one) for one in needles}
    rows = dict.fromkeys((task, length) for (task, length, _), text in cells.items() if text != EMPTY_CELL)
    yield from _format_table(
        ("task", "bytes", *models),
        (
            [task, f"{length:,}", *(cells.get((task, length, model), EMPTY_CELL) for model in models)]
            for task, length in rows
        ),
    )


def _format_text_lines(found: ModelComparison, only: str | None, heading: str) -> Iterator[str]:
    wanted = [text for text in found.texts if only in (None, text.text)]
    if not wanted:
        return
    yield from ("Bits per byte, means over seeds, and differences with their 95 % intervals (Student's t).", "")
    for text in wanted:
        seeds = f"seed{'s' * (len(text.seeds) != 1)} {', '.join(map(str, text.seeds))}"
        yield from (f"{heading} {text.text}: {text.model} less {text.baseline}, {seeds}", "")
        names = ("positions", text.model, text.baseline, "difference", "over windows", "windows", "over seeds")
        yield from _format_table(names, (_format_range_row(place, text) for place in text.places))


def _format_range_row(place: RangeDifference, text: TextDifference) -> list[str]:
    return [
        place.place,
        f"{place.bits:.4f}",
        f"{place.baseline_bits:.4f}",
        f"{place.difference:+.4f}",
        _format_interval(place.over_windows, "not known" if place.windows is None else "none: one window"),
        _format_number(place.windows, "{:,}"),
        _format_interval(place.over_seeds, "none: one seed"),
    ]


def _format_ablation_lines(found: ModelComparison) -> Iterator[str]:
    if not found.interventions:
        return
    yield from (
        "Percent of the needles found, seed by seed: of all seeds [95 %, Wilson]; of facts beyond the window and behind "
        "the first block; and bits per byte of the text around, less those of the chosen blocks, ± 95 % over seeds.",
        "",
    )
    for model in dict.fromkeys(one.model for one in found.interventions):
        yield from (f"### {model}", "")
        own = [one for one in found.interventions if one.model == model]
        yield from _format_table(
            ("bytes", "blocks, or what is silent", "found", "of far facts", "text"), map(_format_ablation_row, own)
        )


def _format_ablation_row(one: AblationResult) -> list[str]:
    return [
        f"{one.length:,}",
        one.name,
        _format_proportions(one.by_seed, one.every),
        _format_proportion(one.far),
        _format_seed_mean(one.d_text),
    ]


def _format_proportions(by_seed: dict[int, Proportion | None], every: Proportion | None) -> str:
    each = " / ".join(EMPTY_CELL if share is None else f"{100 * share.share:.1f}" for share in by_seed.values())
    return f"{each}: {_format_proportion(every)}"


def _format_proportion(share: Proportion | None) -> str:
    if share is None:
        return EMPTY_CELL
    low, high = 100 * share.low, 100 * share.high
    return f"{100 * share.share:.1f} [{low:.1f}, {high:.1f}] of {share.asked:,}"


def _format_seed_mean(found: SeedMean | None) -> str:
    if found is None:
        return EMPTY_CELL
    return f"{found.mean:+.4f} " + ("(one seed)" if found.half is None else f"± {found.half:.4f}")


def _format_interval(found: tuple[float, float] | None, without: str) -> str:
    return without if found is None else f"[{found[0]:+.4f}, {found[1]:+.4f}]"


def _format_number(value: float | None, form: str) -> str:
    return EMPTY_CELL if value is None else form.format(value)


def _format_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))
    yield ""
