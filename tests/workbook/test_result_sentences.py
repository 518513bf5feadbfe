"""Sentences on a comparison state the numbers of its tables, and the right conclusion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_lab.health.comparison import AblationSummary, ModelComparison, ModelCost, NeedleResult, Proportion, RunCost
from nsa_lab.health.paired_text_loss import RangeDifference, TextDifference
from nsa_lab.health.sweep_results import SeedMean
from nsa_lab.workbook import result_sentences as sentences


def needle(model: str, length: int, right: int, asked: int) -> NeedleResult:
    share = Proportion.from_counts(right, asked)
    return NeedleResult(model, "needle", length, {0: share}, share, share, None)


def ablation(name: str, right: int, d_text: float) -> AblationSummary:
    share = Proportion.from_counts(right, 20)
    return AblationSummary("nsa", 4096, name, {0: share, 1: None}, share, share, SeedMean.from_values([d_text]))


def place(name: str, difference: float, over_windows: tuple[float, float] | None = None) -> RangeDifference:
    return RangeDifference(name, 1.0 + difference, 1.0, difference, 5, over_windows, None)


def cost(model: str, share: float | None) -> ModelCost:
    return ModelCost(model, "nsa", [RunCost("run", seed, 1, 1, 1, 1.0, 1.0, [1.0]) for seed in (0, 1)], share, share)


@pytest.fixture
def comparison() -> ModelComparison:
    return ModelComparison(
        baseline="dense",
        costs=[cost("nsa", 0.625), cost("dense", 1.0)],
        needles=[needle("nsa", 4096, 10, 10), needle("dense", 4096, 9, 10), needle("nsa", 8192, 3, 10)],
        ruler=[],
        texts=[
            TextDifference(
                "long",
                "nsa",
                "dense",
                [0, 1],
                [place("whole documents", -0.01, (-0.02, -0.005)), place("0 to 255", 0.004), place("256 to 511", -0.02)],
            )
        ],
        interventions=[ablation("chosen", 20, 0.0), ablation("random", 1, 0.2399), ablation("oracle", 20, 0.0002)],
        not_compared=[],
    )


def test_costs_and_facts(comparison: ModelComparison) -> None:
    assert sentences.describe_costs(comparison) == [
        "`nsa` trained in 62.5% of the step time of `dense`, and 62.5% of its total time (2 seeds)."
    ]
    # At 8,192 the baseline was not evaluated.
    assert sentences.describe_needles(comparison) == [
        "From texts of 4,096 bytes, `nsa` retrieves 100.0% (10 of 10) and `dense` retrieves 90.0% (9 of 10) of single "
        "facts."
    ]


def test_text_states_both_signs_intervals_and_the_target(comparison: ModelComparison) -> None:
    difference, target = sentences.describe_text(comparison, "long", 0.005)
    assert "`nsa` has 0.9900 bits per byte, which is 0.0100 lower than `dense` with 1.0000 (2 seeds)." in difference
    assert difference.endswith("The 95% interval over windows, [-0.0200, -0.0050], excludes 0.")
    assert "is met by the mean over 2 seeds: the largest difference is +0.0040, at positions 0 to 255." in target
    (_, missed) = sentences.describe_text(comparison, "long", 0.003)
    assert "is missed by" in missed
    (text,) = comparison.texts
    worse = [place("whole documents", 0.02, (-0.01, 0.05)), *text.places[1:]]
    (sentence,) = sentences.describe_text(replace(comparison, texts=[replace(text, places=worse)]), "long")
    assert "0.0200 higher" in sentence and "contains 0" in sentence
    assert sentences.describe_text(comparison, "other", 0.005) == []


def test_ablations_conclude_only_what_the_intervals_show(comparison: ModelComparison) -> None:
    finding, text = sentences.describe_ablations(comparison)
    assert (
        "With random blocks, `nsa` retrieves 5.0% (1 of 20) of the facts at 4,096 bytes, and 100.0% (20 of 20)" in finding
    )
    assert finding.endswith("(1 seed). The selection finds them.")
    assert text == "On the text around them, random blocks cost +0.2399 bits per byte, and those of an oracle +0.0002."
    equal = replace(comparison, interventions=[ablation("chosen", 12, 0.0), ablation("random", 11, 0.0)])
    assert "does not contribute" in sentences.describe_ablations(equal)[0]


def test_nothing_is_stated_without_results() -> None:
    empty = ModelComparison("dense", [cost("dense", 1.0), cost("nsa", None)], [], [], [], [], [])
    for describe in (sentences.describe_costs, sentences.describe_needles, sentences.describe_ablations):
        assert describe(empty) == []
