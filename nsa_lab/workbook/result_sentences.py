"""State the results of a comparison of models in sentences, from the same numbers as the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsa_lab.figures import get_position_ranges
from nsa_lab.health.comparison import AblationSummary, ModelComparison, NeedleResult, Proportion
from nsa_lab.health.paired_text_loss import RangeDifference, TextDifference
from nsa_lab.health.summary_sentence import format_count

FACTS = {
    "needle": "single facts",
    "multi_key": "facts among many others",
    "multi_query": "facts that are asked for four at a time",
}


def describe_costs(comparison: ModelComparison) -> list[str]:
    """Return one sentence per model: its step time and total time relative to the baseline."""
    sentences = []
    for cost in comparison.costs:
        if cost.model == comparison.baseline or cost.seconds_share is None:
            continue
        total = "" if cost.wall_share is None else f", and {cost.wall_share:.1%} of its total time"
        sentences.append(
            f"`{cost.model}` trained in {cost.seconds_share:.1%} of the step time of `{comparison.baseline}`{total} "
            f"({format_count(len(cost.runs), 'seed')})."
        )
    return sentences


def describe_needles(comparison: ModelComparison) -> list[str]:
    """Return one sentence per task, at the longest length that all models were evaluated at."""
    sentences = []
    for task in dict.fromkeys(result.task for result in comparison.needles):
        results = _select_longest([result for result in comparison.needles if result.task == task])
        found = [f"`{result.model}` retrieves {_format_proportion(result.every)}" for result in results if result.every]
        if found:
            shares = " and ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
            sentences.append(f"From texts of {results[0].length:,} bytes, {shares} of {FACTS.get(task, task)}.")
    return sentences


def describe_text(comparison: ModelComparison, name: str, target: float | None = None) -> list[str]:
    """Return the sentences on one text: the difference from the baseline with its intervals, and the worst position range.

    `target`: largest difference in bits per byte that the protocol allows.
    """
    return [
        sentence
        for text in comparison.texts
        if text.text == name
        for sentence in (_describe_difference(text), *_describe_positions(text, target))
    ]


def describe_ablations(comparison: ModelComparison) -> list[str]:
    """Return the sentences on each model at the longest length: facts and text with random blocks, and with an oracle's."""
    sentences = []
    for model in dict.fromkeys(result.model for result in comparison.interventions):
        own = [result for result in comparison.interventions if result.model == model]
        longest = max(result.length for result in own)
        sentences += _describe_model_ablations(model, {r.name: r for r in own if r.length == longest}, longest)
    return sentences


def _describe_model_ablations(model: str, results: dict[str, AblationSummary], length: int) -> Iterator[str]:
    chosen, random, oracle = (results.get(name) for name in ("chosen", "random", "oracle"))
    if chosen is None or random is None or chosen.every is None or random.every is None:
        return
    finds = chosen.every.low > random.every.high
    seeds = format_count(sum(proportion is not None for proportion in random.by_seed.values()), "seed")
    yield (
        f"With random blocks, `{model}` retrieves {_format_proportion(random.every)} of the facts at {length:,} bytes, and "
        f"{_format_proportion(chosen.every)} with its selected blocks ({seeds}). "
        + ("The selection finds them." if finds else "The selection does not contribute, as far as these answers show.")
    )
    if random.d_text is not None:
        note = "" if oracle is None or oracle.d_text is None else f", and those of an oracle {oracle.d_text.mean:+.4f}"
        yield f"On the text around them, random blocks cost {random.d_text.mean:+.4f} bits per byte{note}."


def _describe_difference(text: TextDifference) -> str:
    whole = text.places[0]
    intervals = [
        _describe_interval("over windows", whole.over_windows),
        _describe_interval("over seeds", whole.over_seeds),
    ]
    known = "; ".join(filter(None, intervals))
    return (
        f"On the text `{text.text}`, `{text.model}` has {whole.bits:.4f} bits per byte, which is "
        f"{_format_difference(whole.difference)} than `{text.baseline}` with {whole.baseline_bits:.4f} "
        f"({format_count(len(text.seeds), 'seed')}). {known[:1].upper()}{known[1:]}{'.' * bool(known)}"
    ).strip()


def _describe_positions(text: TextDifference, target: float | None) -> Iterator[str]:
    ranges: Sequence[RangeDifference] = get_position_ranges(text)
    if not ranges or target is None:
        return
    worst = max(ranges, key=lambda place: place.difference)
    is_within = worst.difference <= target
    yield (
        f"The target, at most {target:+g} bits per byte in every position range, is {'met' if is_within else 'missed'} by "
        f"the mean over {format_count(len(text.seeds), 'seed')}: the largest difference is {worst.difference:+.4f}, at "
        f"positions {worst.place}."
    )


def _describe_interval(kind: str, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    meaning = "contains 0" if low <= 0 <= high else "excludes 0"
    return f"the 95% interval {kind}, [{low:+.4f}, {high:+.4f}], {meaning}"


def _format_difference(difference: float) -> str:
    return f"{abs(difference):.4f} {'lower' if difference < 0 else 'higher'}"


def _select_longest(results: Sequence[NeedleResult]) -> list[NeedleResult]:
    """Return the results at the greatest length that every model has; without one, those at the greatest length."""
    models = {result.model for result in results}
    lengths = {result.length for result in results}
    common = [n for n in lengths if {result.model for result in results if result.length == n} == models]
    longest = max(common or lengths)
    return [result for result in results if result.length == longest]


def _format_proportion(proportion: Proportion | None) -> str:
    if proportion is None:
        return "an unknown share"
    return f"{proportion.share:.1%} ({proportion.right:,} of {proportion.total:,})"
