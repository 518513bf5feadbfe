"""A comparison of models as Markdown, for `nsa-lab compare` and notebook 08: tables that a page can hold as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from nsa_lab.health.comparison import Compared, InterventionFound, ModelCost, NeedlesFound, RunCost
from nsa_lab.health.shares import Share
from nsa_lab.health.sweep import OverSeeds
from nsa_lab.health.text_pairs import PlaceDifference, TextDifference

# What a table holds where there is nothing to tell.
NONE = "–"


def markdown(found: Compared) -> str:
    """Every table under its heading, and what was not compared."""
    parts = {"Models": costs, "Needles": needles, "Text": texts, "Interventions": interventions}
    tables = {heading: part(found) for heading, part in parts.items()}
    told = [f"## {heading}\n\n{table}\n" for heading, table in tables.items() if table]
    return "\n".join([*told, "## What could not be compared, or not alike", "", not_compared(found)])


def not_compared(found: Compared) -> str:
    """A list of it, or that there is nothing."""
    return "\n".join([f"* {line}" for line in found.not_compared] or ["Everything was."])


def costs(found: Compared) -> str:
    """Sizes, tokens, seconds and speeds of every model."""
    return "\n".join(_costs(found))


def needles(found: Compared) -> str:
    """Answers that are right, by task and length; empty where none was asked."""
    return "\n".join(_needles(found))


def texts(found: Compared, only: str | None = None, *, level: int = 3) -> str:
    """Losses by position of every text, or of `only` that one, a heading of `level` for each; empty where there is none."""
    return "\n".join(_texts(found, only, "#" * level))


def interventions(found: Compared) -> str:
    """Answers and text under every intervention; empty where there was none."""
    return "\n".join(_interventions(found))


def _costs(found: Compared) -> Iterator[str]:
    share = f"share of {found.baseline}"
    names = ("model", "seeds", "parameters", "tokens", "steps, seconds", share, "whole runs, seconds", share)
    yield from _table((*names, "tokens per second, stage by stage"), map(_cost, found.costs))
    yield from (
        "Seconds of each seed in order: of optimiser steps, and of whole runs, with evaluations, saves and compiling. "
        f"Shares are of the time of {found.baseline} at the same seeds. Speeds are medians of readings, means over seeds.",
        "",
    )


def _cost(cost: ModelCost) -> list[str]:
    return [
        cost.model,
        ", ".join(str(run.seed) for run in cost.runs),
        _each(cost.runs, lambda run: run.parameters),
        _each(cost.runs, lambda run: run.tokens),
        " / ".join(_number(run.seconds, "{:,.1f}") for run in cost.runs),
        _number(cost.seconds_share, "{:.3f}"),
        " / ".join(_number(run.wall_s, "{:,.1f}") for run in cost.runs),
        _number(cost.wall_share, "{:.3f}"),
        _speeds(cost.runs),
    ]


def _each(runs: Sequence[RunCost], of: Callable[[RunCost], int | None]) -> str:
    """What all runs have, once, or that of each."""
    return " / ".join(dict.fromkeys(_number(of(run), "{:,}") for run in runs))


def _speeds(runs: Sequence[RunCost]) -> str:
    if len({len(run.tokens_per_s) for run in runs}) > 1:
        return "readings of other stages: " + "; ".join(_speeds([run]) for run in runs)
    return ", ".join(f"{speed:,.0f}" for speed in np.mean([run.tokens_per_s for run in runs], axis=0)) or NONE


def _needles(found: Compared) -> Iterator[str]:
    if not found.needles:
        return
    yield from (
        "Percent of the answers that are right in every token, seed by seed: of all seeds [95 %, Wilson].",
        "",
    )
    yield from _needle_table(found.needles, lambda one: _shares(one.by_seed, one.every))
    yield from ("Of these, facts beyond the window and behind the first block, of all seeds:", "")
    yield from _needle_table(found.needles, lambda one: _share(one.far))
    yield from ("Written by the model itself, of all seeds:", "")
    yield from _needle_table(found.needles, lambda one: _share(one.written))


def _needle_table(needles: Sequence[NeedlesFound], cell: Callable[[NeedlesFound], str]) -> Iterator[str]:
    models = list(dict.fromkeys(one.model for one in needles))
    cells = {(one.task, one.length, one.model): cell(one) for one in needles}
    rows = dict.fromkeys((task, length) for (task, length, _), text in cells.items() if text != NONE)
    yield from _table(
        ("task", "bytes", *models),
        ([task, f"{length:,}", *(cells.get((task, length, model), NONE) for model in models)] for task, length in rows),
    )


def _texts(found: Compared, only: str | None, heading: str) -> Iterator[str]:
    wanted = [text for text in found.texts if only in (None, text.text)]
    if not wanted:
        return
    yield from ("Bits per byte, means over seeds, and differences with their 95 % intervals (Student's t).", "")
    for text in wanted:
        seeds = f"seed{'s' * (len(text.seeds) != 1)} {', '.join(map(str, text.seeds))}"
        yield from (f"{heading} {text.text}: {text.model} less {text.baseline}, {seeds}", "")
        names = ("positions", text.model, text.baseline, "difference", "over windows", "windows", "over seeds")
        yield from _table(names, (_place(place, text) for place in text.places))


def _place(place: PlaceDifference, text: TextDifference) -> list[str]:
    return [
        place.place,
        f"{place.bits:.4f}",
        f"{place.baseline_bits:.4f}",
        f"{place.difference:+.4f}",
        _interval(place.over_windows, "not known" if place.windows is None else "none: one window"),
        _number(place.windows, "{:,}"),
        _interval(place.over_seeds, "none: one seed"),
    ]


def _interventions(found: Compared) -> Iterator[str]:
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
        yield from _table(("bytes", "blocks, or what is silent", "found", "of far facts", "text"), map(_intervention, own))


def _intervention(one: InterventionFound) -> list[str]:
    return [f"{one.length:,}", one.name, _shares(one.by_seed, one.every), _share(one.far), _over_seeds(one.d_text)]


def _shares(by_seed: dict[int, Share | None], every: Share | None) -> str:
    each = " / ".join(NONE if share is None else f"{100 * share.share:.1f}" for share in by_seed.values())
    return f"{each}: {_share(every)}"


def _share(share: Share | None) -> str:
    if share is None:
        return NONE
    low, high = 100 * share.low, 100 * share.high
    return f"{100 * share.share:.1f} [{low:.1f}, {high:.1f}] of {share.asked:,}"


def _over_seeds(found: OverSeeds | None) -> str:
    if found is None:
        return NONE
    return f"{found.mean:+.4f} " + ("(one seed)" if found.half is None else f"± {found.half:.4f}")


def _interval(found: tuple[float, float] | None, without: str) -> str:
    return without if found is None else f"[{found[0]:+.4f}, {found[1]:+.4f}]"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))
    yield ""
