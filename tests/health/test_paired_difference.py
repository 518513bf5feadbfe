"""Differences of runs, pair by pair: what an interval covers, what makes no pairs, and what is said where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import Event, make_config, write_run

from nsa_lab.config import RunConfig
from nsa_lab.health.matched_pair import check_same_training
from nsa_lab.health.paired_difference import (
    MAX_SEGMENTS,
    T_QUANTILES,
    PairedDifference,
    compare_seeds,
    compare_training_batches,
    compare_validation_windows,
    compute_paired_difference,
    find_matched_pairs,
    summarize_comparisons,
)
from nsa_lab.runs.history import History

Make = Callable[..., History]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Make:
    """run(over, windows, **config) -> a run whose losses lie `over` bits per byte above those of a healthy one."""
    made: list[Path] = []

    def make(over: float = 0.0, windows: list[float | None] | None = None, **changes: Any) -> History:
        def spoil(events: list[Event]) -> None:
            for event in events:
                if event["kind"] in ("step", "eval"):
                    event["bpb"] += over
                    event["loss"] = event["bpb"] * math.log(2)
            if windows is not None:
                [event for event in events if event["kind"] == "eval"][-1]["window_losses"] = windows

        made.append(write_run(tmp_path / str(len(made)), make_config(**changes), spoil))
        return History.read(made[-1])

    return make


@pytest.mark.parametrize("freedom", range(1, MAX_SEGMENTS))
def test_the_quantiles_are_those_of_student(freedom: int) -> None:
    """Half of .95 of the density lies between 0 and the quantile, to what three decimals of it are worth."""
    t = np.linspace(0, T_QUANTILES[freedom - 1], 200_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    assert np.trapezoid(scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2), t) == pytest.approx(0.475, abs=3e-5)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Neighbours that resemble each other, as batches do: an interval that took them for independent would cover 65 %."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(400):
        noise = draw.normal(size=1020)
        alike = np.convolve(noise, np.ones(4) / 4, mode="valid")[:1000]
        found = compute_paired_difference("x", 0.1 + alike, np.zeros(1000))
        assert isinstance(found, PairedDifference)
        covered += abs(found.mean - 0.1) <= found.half_width
    assert 0.91 <= covered / 400 <= 0.985


def test_what_text_is_hard_for_both_drops_out(run: Make) -> None:
    hard = np.linspace(0.5, 3.0, 64)
    bits = hard * np.log(2)
    nsa = run(windows=(bits + 0.001).tolist())
    dense = run(windows=bits.tolist(), model__attention="dense")
    found = compare_validation_windows(nsa, dense)
    assert isinstance(found, PairedDifference) and found.is_significant and found.n_pairs == 64
    assert found.mean == pytest.approx(0.001 / math.log(2)) and found.half_width < 1e-6
    assert str(found) == "validation, window by window: +0.0014 ± 0.0000 bits per byte over 64 pairs"


def test_a_difference_within_the_noise_is_called_none() -> None:
    found = compute_paired_difference("x", np.array([0.1, -0.1, 0.2, -0.1]), np.zeros(4))
    assert isinstance(found, PairedDifference) and not found.is_significant
    assert str(found).endswith("over 4 pairs; no difference can be told")


def test_training_is_compared_on_equal_batches_of_the_later_half(run: Make) -> None:
    nsa, dense = run(0.25), run(model__attention="dense")
    found = compare_training_batches(nsa, dense)
    assert isinstance(found, PairedDifference) and found.mean == pytest.approx(0.25)
    assert found.n_pairs == len([event for event in nsa.steps if event["step"] > 100])
    assert "different batches" in str(compare_training_batches(nsa, run(train__seed=7)))


def test_what_is_not_recorded_is_said(run: Make) -> None:
    nsa, dense = run(), run(model__attention="dense")
    assert "not recorded by both" in str(compare_validation_windows(nsa, dense))
    lines = summarize_comparisons([nsa, dense])
    assert len(lines) == 3 and "1 seed (1337): 1 pair, so no interval" in lines[2]


def test_seeds_are_compared_twin_by_twin(run: Make) -> None:
    seeds = (1, 2, 3)
    runs = [run(over, train__seed=seed) for seed, over in zip(seeds, (0.01, 0.02, 0.03), strict=True)]
    twins = [run(train__seed=seed, model__attention="dense") for seed in seeds]
    assert [(a.config.train.seed, b.config.train.seed) for a, b in find_matched_pairs([*twins, *runs])] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    (found,) = compare_seeds([*runs, *twins])
    assert isinstance(found, PairedDifference)
    assert (found.mean, found.half_width) == (pytest.approx(0.02), pytest.approx(4.303 * 0.01 / math.sqrt(3)))
    assert "3 seeds (1, 2, 3)" in str(found)
    other = [run(0.5, train__seed=1, train__lr=2e-3), run(train__seed=1, train__lr=2e-3, model__attention="dense")]
    assert len(compare_seeds([*runs, *twins, *other])) == 2, "another configuration is another question"


def test_a_seed_that_comes_twice_gives_no_interval(run: Make) -> None:
    """In whatever way it was computed: which of the two was meant, nobody can tell."""
    runs = [run(0.1, train__seed=1), run(0.2, train__seed=2), run(0.7, train__seed=2, runtime__compile=True)]
    twins = [run(train__seed=seed, model__attention="dense") for seed in (1, 2)]
    for order in (runs, runs[::-1]):
        (found,) = compare_seeds([*order, *twins])
        assert found == "NSA less dense: more than one pair at seed 2, so no interval; leave all but one out"


def test_twins_may_differ_in_what_a_dense_model_does_not_read(run: Make) -> None:
    dense = run(model__attention="dense")
    recipe = run(model__selection_loss=0.05, model__indexer_block=1, model__indexer_width=4)
    assert check_same_training(recipe, dense).ok and check_same_training(run(), dense).ok
    # Settings that a file leaves out at their first value, on either side.
    for told in (check_same_training(run(model__ngrams=3), dense), check_same_training(run(), run(model__ngrams=3))):
        assert not told.ok and told.text == "they differ in model.ngrams"


def test_twins_may_be_launched_unlike_and_not_trained_unlike(run: Make) -> None:
    stages = [{"steps": 100, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in (64, 128)]
    graphs = [{**stage, "cuda_graph": False} for stage in stages]
    longer = [stages[0], {**stages[1], "steps": 101}]
    nsa, same, other = (
        replace(run(), config=RunConfig.from_dict({"train": {"stages": plan}, "runtime": {"compile": plan is graphs}}))
        for plan in (stages, graphs, longer)
    )
    assert check_same_training(nsa, same).ok
    assert check_same_training(nsa, other).text == "they differ in train.stages"


def test_the_readme_says_of_the_production_run_what_its_record_says() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    nsa, dense = (
        History.read(next((ROOT / "outputs").glob(f"{name}-20261121*")))
        for name in ("production_50k", "production_50k_dense")
    )
    found = compare_training_batches(nsa, dense)
    assert isinstance(found, PairedDifference) and found.is_significant and found.mean > 0
    mean, half = (f"{value:.4f}".removeprefix("0") for value in (found.mean, found.half_width))
    assert f"*worse*, by {mean} ± {half} bits per byte" in text
    told = check_same_training(nsa, dense).text
    assert "+6.9%" in told and "+10.2%" in told and "6.9 % more parameters and 10 % more FLOPs" in text
    assert "1 seed (1337): 1 pair, so no interval" in summarize_comparisons([nsa, dense])[-1] and "it is one seed" in text


def test_other_facts_in_the_text_are_other_batches(run: Make) -> None:
    dense = run(data__source="recall", train__planted_share=0.5, model__attention="dense")
    assert "different batches" in str(compare_training_batches(run(data__source="recall"), dense))


def test_stages_that_change_at_another_step_are_other_batches(tmp_path: Path) -> None:
    def staged(first: int) -> History:
        stage = {"steps": first, "seq_len": 1024, "batch_size": 4, "lr": 1e-3}
        stages = [stage, {**stage, "steps": 200 - first, "seq_len": 2048, "batch_size": 2}]
        config = RunConfig.from_dict({**make_config().to_dict(), "train": {"stages": stages}})
        return History.read(write_run(tmp_path / str(first), config))

    assert "different batches" in str(compare_training_batches(staged(100), staged(60)))


def test_two_dense_models_are_two_questions(run: Make) -> None:
    nsa = [run(train__seed=seed) for seed in (1, 2)]
    widths = ((1, 128), (2, 160))
    dense = [run(train__seed=seed, model__attention="dense", model__mlp_hidden=width) for seed, width in widths]
    found = compare_seeds([*nsa, *dense])
    assert len(found) == 2 and all("1 pair, so no interval" in str(one) for one in found)


def test_windows_are_told_in_bits_per_byte_whatever_a_token_is(tmp_path: Path) -> None:
    """`bpb` and `loss` of the evaluation say how many bytes a token has."""

    def of(name: str, windows: list[float], **changes: Any) -> History:
        def spoil(events: list[Event]) -> None:
            for event in (event for event in events if event["kind"] == "eval"):
                event["bpb"] = event["loss"] / math.log(2) / 4
                event["window_losses"] = windows

        return History.read(write_run(tmp_path / name, make_config(**changes), spoil))

    nsa, dense = of("nsa", [1.0, 2.0, 3.0]), of("dense", [0.5, 1.6, 2.3], model__attention="dense")
    assert compare_validation_windows(nsa, dense).mean == pytest.approx(1.6 / 3 / math.log(2) / 4)


def test_seeds_are_compared_at_their_last_evaluation(tmp_path: Path, run: Make) -> None:
    """Not at their best: what rises at the end has risen."""

    def rises(events: list[Event]) -> None:
        for event in events:
            if event["kind"] in ("step", "eval"):
                event["loss"] = event["bpb"] * math.log(2)
        [event for event in events if event["kind"] == "eval"][-1]["bpb"] += 1.0

    runs = [History.read(write_run(tmp_path / f"r{seed}", make_config(train__seed=seed), rises)) for seed in (1, 2)]
    (found,) = compare_seeds([*runs, *(run(train__seed=seed, model__attention="dense") for seed in (1, 2))])
    assert found.mean == pytest.approx(1.0)


def test_a_run_that_changed_its_text_is_no_twin(tmp_path: Path) -> None:
    def of(name: str, *texts: str, **changes: Any) -> History:
        def spoil(events: list[Event]) -> None:
            events[0]["data_identity"] = texts[0]
            if len(texts) > 1:
                middle = next(i for i, e in enumerate(events) if e["step"] == 100 and e["kind"] == "checkpoint")
                more = {"kind": "resume", "attempt": 2, "step": 100, "from_step": 100, "data_identity": texts[1]}
                events.insert(middle + 1, {**events[0], **more})

        return History.read(write_run(tmp_path / name, make_config(**changes), spoil))

    verdict = check_same_training(of("nsa", "a" * 64, "b" * 64), of("dense", "b" * 64, model__attention="dense"))
    assert verdict.ok is False and "the data" in verdict.text


def test_a_difference_is_told_in_either_direction_and_of_equals_none() -> None:
    for sign in (-1, 1):
        found = compute_paired_difference("x", sign * np.array([0.1, 0.11, 0.09]), np.zeros(3))
        assert isinstance(found, PairedDifference) and found.is_significant and "no difference" not in str(found)
    same = compute_paired_difference("x", np.ones(3), np.ones(3))
    assert isinstance(same, PairedDifference) and not same.is_significant and same.half_width == 0


def test_a_pair_that_is_no_number_leaves_with_its_weight() -> None:
    first, weights = np.array([np.nan, 1.0, 2.0, 4.0]), np.array([50.0, 1.0, 2.0, 3.0])
    assert compute_paired_difference("x", first, np.zeros(4), weights) == compute_paired_difference(
        "x", first[1:], np.zeros(3), weights[1:]
    )


def test_a_window_that_was_not_recorded_makes_no_pair(run: Make) -> None:
    nsa, dense = run(windows=[1.0, None, 3.0, 4.0]), run(windows=[1.0, 2.0, 2.5, 3.9], model__attention="dense")
    found = compare_validation_windows(nsa, dense)
    assert isinstance(found, PairedDifference) and found.n_pairs == 3
    assert found.mean == pytest.approx(0.6 / 3 / math.log(2))


@pytest.mark.parametrize("changes", [{"train__batch_size": 4}, {"train__min_document_tokens": 16}])
def test_batches_that_hold_something_else_are_other_batches(run: Make, changes: dict[str, Any]) -> None:
    assert "different batches" in str(compare_training_batches(run(), run(model__attention="dense", **changes)))


def test_batches_of_other_data_are_other_batches(run: Make) -> None:
    nsa, dense = run(), run(model__attention="dense")
    for history, text in ((nsa, "a"), (dense, "b")):
        history.events_of_kind("start")[0]["data_identity"] = text
    assert "different batches" in str(compare_training_batches(nsa, dense))


def test_a_seed_that_was_not_evaluated_makes_no_pair(run: Make) -> None:
    runs = [run(0.1 * seed, train__seed=seed) for seed in (1, 2, 3)]
    twins = [run(train__seed=seed, model__attention="dense") for seed in (1, 2, 3)]
    (found,) = compare_seeds([*runs[:2], replace(runs[2], evaluations=[]), *twins])
    assert isinstance(found, PairedDifference) and found.n_pairs == 2 and found.mean == pytest.approx(0.15)
