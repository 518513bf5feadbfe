"""Paired differences of runs: coverage of the interval, what can be paired, and messages otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import Event, edit_history, make_config, write_run
from looping import looped

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
    """run(offset, windows, **config): write a healthy run with `offset` added to its losses in bits per byte."""
    run_dirs: list[Path] = []

    def make(offset: float = 0.0, windows: list[float | None] | None = None, **changes: Any) -> History:
        def spoil(events: list[Event]) -> None:
            for event in events:
                if event["kind"] in ("step", "eval"):
                    event["bpb"] += offset
                    event["loss"] = event["bpb"] * math.log(2)
            if windows is not None:
                [event for event in events if event["kind"] == "eval"][-1]["window_losses"] = windows

        run_dirs.append(write_run(tmp_path / str(len(run_dirs)), make_config(**changes), spoil))
        return History.read(run_dirs[-1])

    return make


@looped
@pytest.mark.parametrize("freedom", range(1, MAX_SEGMENTS))
def test_quantiles_are_those_of_student(freedom: int) -> None:
    """The density from 0 to the quantile integrates to 0.95 / 2, within the precision of three decimals."""
    t = np.linspace(0, T_QUANTILES[freedom - 1], 200_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    assert np.trapezoid(scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2), t) == pytest.approx(0.475, abs=3e-5)


def test_interval_has_its_nominal_coverage() -> None:
    """Neighboring values correlate, as batches do. An interval that assumes independence would cover only 65%."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        noise = rng.normal(size=1020)
        correlated = np.convolve(noise, np.ones(4) / 4, mode="valid")[:1000]
        difference = compute_paired_difference("x", 0.1 + correlated, np.zeros(1000))
        assert isinstance(difference, PairedDifference)
        covered += abs(difference.mean - 0.1) <= difference.half_width
    assert 0.91 <= covered / 400 <= 0.985


def test_shared_difficulty_of_the_text_cancels(run: Make) -> None:
    text_difficulty = np.linspace(0.5, 3.0, 64)
    nats = text_difficulty * np.log(2)
    nsa = run(windows=(nats + 0.001).tolist())
    dense = run(windows=nats.tolist(), model__attention="dense")
    difference = compare_validation_windows(nsa, dense)
    assert isinstance(difference, PairedDifference) and difference.is_significant and difference.n_pairs == 64
    assert difference.mean == pytest.approx(0.001 / math.log(2)) and difference.half_width < 1e-6
    assert str(difference) == "validation, paired by window: +0.0014 ± 0.0000 bits per byte over 64 pairs"


def test_difference_within_noise_is_not_significant() -> None:
    difference = compute_paired_difference("x", np.array([0.1, -0.1, 0.2, -0.1]), np.zeros(4))
    assert isinstance(difference, PairedDifference) and not difference.is_significant
    assert str(difference).endswith("over 4 pairs; not significant")


def test_training_uses_equal_batches_of_the_later_half(run: Make) -> None:
    nsa, dense = run(0.25), run(model__attention="dense")
    difference = compare_training_batches(nsa, dense)
    assert isinstance(difference, PairedDifference) and difference.mean == pytest.approx(0.25)
    assert difference.n_pairs == len([event for event in nsa.steps if event["step"] > 100])
    assert "different batches" in str(compare_training_batches(nsa, run(train__seed=7)))


def test_missing_window_losses_are_reported(run: Make) -> None:
    nsa, dense = run(), run(model__attention="dense")
    assert "no matching window losses" in str(compare_validation_windows(nsa, dense))
    lines = summarize_comparisons([nsa, dense])
    assert len(lines) == 3 and "1 seed (1337): 1 pair; an interval needs at least 2" in lines[2]


def test_seeds_are_compared_in_matched_pairs(run: Make) -> None:
    seeds = (1, 2, 3)
    runs = [run(offset, train__seed=seed) for seed, offset in zip(seeds, (0.01, 0.02, 0.03), strict=True)]
    dense_runs = [run(train__seed=seed, model__attention="dense") for seed in seeds]
    assert [(a.config.train.seed, b.config.train.seed) for a, b in find_matched_pairs([*dense_runs, *runs])] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    (difference,) = compare_seeds([*runs, *dense_runs])
    assert isinstance(difference, PairedDifference)
    assert (difference.mean, difference.half_width) == (pytest.approx(0.02), pytest.approx(4.303 * 0.01 / math.sqrt(3)))
    assert "3 seeds (1, 2, 3)" in str(difference)
    other = [run(0.5, train__seed=1, train__lr=2e-3), run(train__seed=1, train__lr=2e-3, model__attention="dense")]
    assert len(compare_seeds([*runs, *dense_runs, *other])) == 2, "another configuration is a separate comparison"


def test_repeated_seed_gives_no_interval(run: Make) -> None:
    """Also if the two runs differ only in how they were computed: it is unknown which one is intended."""
    runs = [run(0.1, train__seed=1), run(0.2, train__seed=2), run(0.7, train__seed=2, runtime__compile=True)]
    dense_runs = [run(train__seed=seed, model__attention="dense") for seed in (1, 2)]
    for order in (runs, runs[::-1]):
        (difference,) = compare_seeds([*order, *dense_runs])
        assert difference.startswith("NSA minus dense: expected one pair per seed, got several for seed 2;")


def test_matched_pair_may_differ_in_indexer_settings(run: Make) -> None:
    dense = run(model__attention="dense")
    with_indexer = run(model__selection_loss=0.05, model__indexer_block=1, model__indexer_width=4)
    assert check_same_training(with_indexer, dense).ok and check_same_training(run(), dense).ok
    # A setting that only one of the runs has, on either side.
    for verdict in (check_same_training(run(model__ngrams=3), dense), check_same_training(run(), run(model__ngrams=3))):
        assert not verdict.ok and verdict.text == "different: model.ngrams"


def test_matched_pair_may_differ_in_runtime_but_not_in_training(run: Make) -> None:
    stages = [{"steps": 100, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in (64, 128)]
    graphs = [{**stage, "cuda_graph": False} for stage in stages]
    longer = [stages[0], {**stages[1], "steps": 101}]
    nsa, same, other = (
        replace(run(), config=RunConfig.from_dict({"train": {"stages": plan}, "runtime": {"compile": plan is graphs}}))
        for plan in (stages, graphs, longer)
    )
    assert check_same_training(nsa, same).ok
    assert check_same_training(nsa, other).text == "different: train.stages"


def test_the_page_of_the_production_run_agrees_with_its_record() -> None:
    page = " ".join((ROOT / "docs/science/production_50k.md").read_text(encoding="utf-8").split())
    nsa, dense = (
        History.read(next((ROOT / "outputs").glob(f"{name}-20261121*")))
        for name in ("production_50k", "production_50k_dense")
    )
    difference = compare_training_batches(nsa, dense)
    assert isinstance(difference, PairedDifference) and difference.is_significant and difference.mean > 0
    assert f"worse, by {difference.mean:.4f} ± {difference.half_width:.4f} bits per byte" in page
    text = check_same_training(nsa, dense).text
    assert "+6.9%" in text and "+10.2%" in text and "6.9% more parameters and 10% more FLOPs" in page
    assert "1 seed (1337): 1 pair" in summarize_comparisons([nsa, dense])[-1] and "It is one seed" in page


def test_other_planted_facts_are_other_batches(run: Make) -> None:
    dense = run(data__source="recall", train__planted_share=0.5, model__attention="dense")
    assert "different batches" in str(compare_training_batches(run(data__source="recall"), dense))


def test_other_stage_boundaries_are_other_batches(tmp_path: Path) -> None:
    def staged(first: int) -> History:
        stage = {"steps": first, "seq_len": 1024, "batch_size": 4, "lr": 1e-3}
        stages = [stage, {**stage, "steps": 200 - first, "seq_len": 2048, "batch_size": 2}]
        config = RunConfig.from_dict({**make_config().to_dict(), "train": {"stages": stages}})
        return History.read(write_run(tmp_path / str(first), config))

    assert "different batches" in str(compare_training_batches(staged(100), staged(60)))


def test_two_dense_models_give_two_comparisons(run: Make) -> None:
    nsa = [run(train__seed=seed) for seed in (1, 2)]
    widths = ((1, 128), (2, 160))
    dense = [run(train__seed=seed, model__attention="dense", model__mlp_hidden=width) for seed, width in widths]
    differences = compare_seeds([*nsa, *dense])
    assert len(differences) == 2 and all("1 pair; an interval needs at least 2" in str(result) for result in differences)


def test_window_losses_are_converted_to_bits_per_byte(tmp_path: Path) -> None:
    """The ratio of `bpb` and `loss` of the evaluation gives the bytes per token."""

    def make_run(name: str, windows: list[float], **changes: Any) -> History:
        def spoil(events: list[Event]) -> None:
            for event in (event for event in events if event["kind"] == "eval"):
                event["bpb"] = event["loss"] / math.log(2) / 4
                event["window_losses"] = windows

        return History.read(write_run(tmp_path / name, make_config(**changes), spoil))

    nsa, dense = make_run("nsa", [1.0, 2.0, 3.0]), make_run("dense", [0.5, 1.6, 2.3], model__attention="dense")
    assert compare_validation_windows(nsa, dense).mean == pytest.approx(1.6 / 3 / math.log(2) / 4)


def test_seeds_are_compared_at_the_last_evaluation(tmp_path: Path, run: Make) -> None:
    """Not at their best evaluation: a loss that rises at the end counts."""

    def raise_last_loss(events: list[Event]) -> None:
        for event in events:
            if event["kind"] in ("step", "eval"):
                event["loss"] = event["bpb"] * math.log(2)
        [event for event in events if event["kind"] == "eval"][-1]["bpb"] += 1.0

    runs = [
        History.read(write_run(tmp_path / f"r{seed}", make_config(train__seed=seed), raise_last_loss)) for seed in (1, 2)
    ]
    (difference,) = compare_seeds([*runs, *(run(train__seed=seed, model__attention="dense") for seed in (1, 2))])
    assert difference.mean == pytest.approx(1.0)


def test_run_with_changed_data_is_not_a_matched_pair(tmp_path: Path) -> None:
    def make_run(name: str, *texts: str, **changes: Any) -> History:
        def spoil(events: list[Event]) -> None:
            events[0]["data_identity"] = texts[0]
            if len(texts) > 1:
                index = next(i for i, e in enumerate(events) if e["step"] == 100 and e["kind"] == "checkpoint")
                fields = {"kind": "resume", "attempt": 2, "step": 100, "from_step": 100, "data_identity": texts[1]}
                events.insert(index + 1, {**events[0], **fields})

        return History.read(write_run(tmp_path / name, make_config(**changes), spoil))

    verdict = check_same_training(
        make_run("nsa", "a" * 64, "b" * 64), make_run("dense", "b" * 64, model__attention="dense")
    )
    assert verdict.ok is False and "the data" in verdict.text


def test_significance_in_both_directions_and_of_equal_runs() -> None:
    for sign in (-1, 1):
        difference = compute_paired_difference("x", sign * np.array([0.1, 0.11, 0.09]), np.zeros(3))
        assert (
            isinstance(difference, PairedDifference)
            and difference.is_significant
            and "not significant" not in str(difference)
        )
    same = compute_paired_difference("x", np.ones(3), np.ones(3))
    assert isinstance(same, PairedDifference) and not same.is_significant and same.half_width == 0


def test_nonfinite_pair_is_dropped_with_its_weight() -> None:
    first, weights = np.array([np.nan, 1.0, 2.0, 4.0]), np.array([50.0, 1.0, 2.0, 3.0])
    assert compute_paired_difference("x", first, np.zeros(4), weights) == compute_paired_difference(
        "x", first[1:], np.zeros(3), weights[1:]
    )


def test_unrecorded_window_is_not_paired(run: Make) -> None:
    nsa, dense = run(windows=[1.0, None, 3.0, 4.0]), run(windows=[1.0, 2.0, 2.5, 3.9], model__attention="dense")
    difference = compare_validation_windows(nsa, dense)
    assert isinstance(difference, PairedDifference) and difference.n_pairs == 3
    assert difference.mean == pytest.approx(0.6 / 3 / math.log(2))


@pytest.mark.parametrize("changes", [{"train__batch_size": 4}, {"train__min_document_tokens": 16}])
def test_other_batch_settings_are_other_batches(run: Make, changes: dict[str, Any]) -> None:
    assert "different batches" in str(compare_training_batches(run(), run(model__attention="dense", **changes)))


def test_batches_of_other_data_are_not_paired(run: Make) -> None:
    nsa, dense = run(), run(model__attention="dense")
    nsa = edit_history(nsa, lambda events: events[0].update(data_identity="another text"))
    assert "different batches" in str(compare_training_batches(nsa, dense))


def test_seed_without_evaluation_is_not_paired(run: Make) -> None:
    runs = [run(0.1 * seed, train__seed=seed) for seed in (1, 2, 3)]
    dense_runs = [run(train__seed=seed, model__attention="dense") for seed in (1, 2, 3)]
    (difference,) = compare_seeds([*runs[:2], replace(runs[2], evaluations=[]), *dense_runs])
    assert isinstance(difference, PairedDifference) and difference.n_pairs == 2 and difference.mean == pytest.approx(0.15)
