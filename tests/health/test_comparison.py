"""Comparison of models: grouping of runs, pairing, and every number of the tables against plain loops."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_evaluation import POSITION_RANGES, WINDOWS, make_evaluation, make_run_factory
from fake_run import Event, make_config, write_run
from looping import looped

from nsa_lab import cli
from nsa_lab.config import ConfigError
from nsa_lab.health.comparison import ModelComparison, Proportion, compare_models, is_far
from nsa_lab.health.comparison_tables import format_markdown
from nsa_lab.health.model_runs import find_baseline, get_model_name, group_runs
from nsa_lab.health.paired_difference import MAX_SEGMENTS, T_QUANTILES, PairedDifference, compute_paired_difference
from nsa_lab.health.paired_text_loss import SLOPE_LABEL
from nsa_lab.runs.evaluation import compute_wilson_interval, write_evaluation
from nsa_lab.runs.history import History

Make = Callable[..., Path]
NAMES = ["0 to 255", "256 to 4,095", "4,096 to 8,191", "8,192 to 16,383", "16,384 to 29,999"]


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """make_run("long", 1, edit, attention=, ...): write a run of that name and seed with its own random evaluation."""
    return make_run_factory(tmp_path / "outputs")


def compare(*runs: Path, against: str | None = None, **named: list[Path]) -> ModelComparison:
    notes: list[str] = []
    models = group_runs([run for run in runs if not any(run in own for own in named.values())], named, notes.append)
    return compare_models(models, find_baseline(models, against), notes)


def make_dense(make_run: Make, seed: int, *evaluate: Any, **config: Any) -> Path:
    return make_run("other", seed, *evaluate, model__attention="dense", **config)


def read(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation.json").read_text())


def t_interval(values: list[float]) -> tuple[float, float]:
    """Return Student's 95% interval by its formula."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half_width = T_QUANTILES[len(values) - 2] * math.sqrt(variance / len(values))
    return mean - half_width, mean + half_width


@looped
@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # Newcombe (1998), table I.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_matches_published_values(right: int, asked: int, low: float, high: float) -> None:
    assert compute_wilson_interval(right, asked) == pytest.approx((low, high), abs=6e-5)
    assert compute_wilson_interval(asked - right, asked) == pytest.approx((1 - high, 1 - low), abs=6e-5)


@looped
@pytest.mark.parametrize(("right", "asked"), [(1, 2), (7, 11), (499, 500), (500, 500), (0, 3)])
def test_wilson_bounds_satisfy_the_score_test(right: int, asked: int) -> None:
    for end in set(compute_wilson_interval(right, asked)) - {0.0, 1.0}:
        assert abs(right / asked - end) / math.sqrt(end * (1 - end) / asked) == pytest.approx(1.959964, abs=1e-5)


def write_ruler(run: Path, step: int = 200, **found: list[int]) -> Path:
    """Write ruler.json with two references per question at length 4096."""
    results = [
        {"task": task, "length": 4096, "questions": len(own), "references": 2, "found": own}
        | {"score": round(100 * sum(own) / (2 * len(own)), 2), "low": 0.0, "high": 100.0}
        for task, own in found.items()
    ]
    skipped = [{"task": "cwe", "length": 4096, "why": "too short"}]
    record = {"v": 1, "run": run.name, "step": step, "seed": 0, "dtype": "float32", "device": "cpu", "attention": "nsa"}
    record |= {"data_identity": "d" * 64, "tokenizer": "byte", "code": {}, "results": results, "not_asked": skipped}
    (run / "ruler.json").write_text(json.dumps(record))
    return run


def test_ruler_scores_are_means_over_seeds(make_run: Make) -> None:
    """Also of a run without evaluation.json; not of another step."""
    runs = [
        write_ruler(make_run("one", 0), vt=[2, 1, 0, 2], fwe=[1]),
        write_ruler(make_run("one", 1, None), vt=[0, 0]),
        write_ruler(make_run("one", 2), 100, vt=[2, 2]),
        write_ruler(make_dense(make_run, 0), vt=[2, 2, 2, 2]),
    ]
    comparison = compare(*runs)
    vt, fwe, dense = comparison.ruler
    assert (vt.model, vt.task, vt.length, vt.by_seed, vt.questions) == ("one", "vt", 4096, {0: 62.5, 1: 0.0}, 6)
    assert vt.score == pytest.approx(100 * 2.5 / 6)
    assert (vt.low, vt.high) == pytest.approx([100 * bound for bound in compute_wilson_interval(2.5, 6)])
    assert fwe.by_seed == {0: 50.0, 1: None} and (dense.model, dense.score, dense.high) == ("other", 100, 100)
    # Seed 0 alone has a baseline: differences 0, -50, -100 and 0 by question.
    differences = [0.0, -50.0, -100.0, 0.0]
    half_width = t_interval(differences)[1] - sum(differences) / 4
    assert vt.difference == pytest.approx((-37.5, half_width)) and fwe.difference is None and dense.difference is None
    page, notes = format_markdown(comparison), "\n".join(comparison.not_compared)
    assert f"] of 6; -37.5 ± {half_width:.1f} |" in page and "] of 4 |" in page
    assert "| vt | 4,096 | 62.5 / 0.0: 41.7 [" in page and "| 50.0 / –: 50.0 [" in page
    assert f"{runs[2].name} was evaluated at step 100 of 200, so that evaluation is not listed" in notes
    assert (
        f"fwe at 4,096: not requested ({runs[1].name}, {runs[3].name})" in notes and "cwe at 4,096: skipped: too" in notes
    )
    assert f"{runs[1].name} has no readable evaluation, so only its cost and its RULER scores are listed" in notes
    assert "vt at 4,096: different counts" in notes


def test_ruler_scores_are_paired_on_the_same_questions_only(make_run: Make) -> None:
    def find_difference(changes: dict[str, Any], *, n_dense: int = 3) -> tuple[float, float] | None:
        runs = []
        for seed in (0, 1):
            runs.append(write_ruler(make_run("one", seed), vt=[2 - seed, 1, 1]))
            runs.append(write_ruler(make_dense(make_run, seed), vt=[2, 0, seed][:n_dense]))
        record = json.loads((runs[-1] / "ruler.json").read_text())
        (runs[-1] / "ruler.json").write_text(json.dumps(record | changes))
        return compare(*runs).ruler[0].difference

    differences = [-25.0, 50.0, 25.0]
    low, high = t_interval(differences)
    assert find_difference({}) == pytest.approx((50 / 3, (high - low) / 2)), "means over seeds by question"
    assert find_difference({"seed": 1}) is find_difference({"tokenizer": "x"}) is find_difference({}, n_dense=2) is None


def test_proportion_of_nothing_is_none() -> None:
    assert Proportion.from_counts(0, 0) is None and Proportion.pool([None, None]) is None
    assert Proportion.pool([Proportion.from_counts(1, 3), None, Proportion.from_counts(2, 2)]) == Proportion.from_counts(
        3, 5
    )


def test_weights_apply_to_every_mean() -> None:
    rng = np.random.default_rng(1)
    first, second, weights = rng.normal(size=47), rng.normal(size=47), rng.integers(1, 9, 47)
    difference = compute_paired_difference("x", first, second, weights)
    means, start = [], 0
    for segment in range(MAX_SEGMENTS):
        end = start + 47 // MAX_SEGMENTS + (segment < 47 % MAX_SEGMENTS)
        total = sum(weights[i] * (first[i] - second[i]) for i in range(start, end))
        means.append(total / sum(weights[i] for i in range(start, end)))
        start = end
    low, high = t_interval(means)
    assert isinstance(difference, PairedDifference) and difference.half_width == pytest.approx((high - low) / 2)
    assert difference.mean == pytest.approx(np.average(first - second, weights=weights))


def test_text_comparison_matches_plain_loops(make_run: Make) -> None:
    seeds = (3, 1, 8)
    runs = {seed: (make_run("one", seed), make_dense(make_run, seed)) for seed in seeds}
    comparison = compare(*(run for pair in runs.values() for run in pair))
    texts = {text.text: text for text in comparison.texts}
    assert set(texts) == {"long", "held-out text"} and texts["long"].seeds == [1, 3, 8]
    records = {seed: [read(run)["texts"]["long"] for run in pair] for seed, pair in runs.items()}
    places = {position_range.place: position_range for position_range in texts["long"].places}
    assert list(places) == ["whole documents", *NAMES, SLOPE_LABEL]
    for column, name in enumerate(NAMES):
        differences = [
            [
                (records[seed][0]["windows"][w][column] - records[seed][1]["windows"][w][column]) / math.log(2)
                for w in range(WINDOWS)
            ]
            for seed in seeds
        ]
        by_window = [sum(seed[w] for seed in differences) / 3 for w in range(WINDOWS)]
        # 23 windows in 20 segments: 3 of two, 17 of one.
        segments = [sum(by_window[w : w + 2]) / 2 for w in (0, 2, 4)] + by_window[6:]
        by_seed = [sum(seed) / WINDOWS for seed in differences]
        position_range = places[name]
        low, high = t_interval(segments)
        assert position_range.difference == pytest.approx(sum(by_window) / WINDOWS)
        assert position_range.difference == pytest.approx(position_range.bits - position_range.baseline_bits)
        center, half = position_range.difference, (high - low) / 2
        assert (
            position_range.over_windows == pytest.approx((center - half, center + half))
            and position_range.windows == WINDOWS
        )
        assert position_range.over_seeds == pytest.approx(t_interval(by_seed))
        bits = [sum(window[column] for window in records[seed][0]["windows"]) / WINDOWS / math.log(2) for seed in seeds]
        assert position_range.bits == pytest.approx(sum(bits) / 3)
    whole = places["whole documents"]
    assert (
        whole.bits == pytest.approx(sum(records[seed][0]["loss"] for seed in seeds) / 3 / math.log(2))
        and whole.windows == 7
    )
    assert whole.over_windows and sum(whole.over_windows) / 2 == pytest.approx(whole.difference)
    slopes = [
        [np.polyfit(range(3), np.array(losses["windows"])[:, 2:].T / math.log(2), 1)[0].mean() for losses in records[seed]]
        for seed in seeds
    ]
    assert places[SLOPE_LABEL].over_seeds == pytest.approx(t_interval([first - second for first, second in slopes]))


def test_needle_counts_by_seed_in_total_and_far(make_run: Make) -> None:
    runs = {seed: make_run("one", seed) for seed in (0, 1)}
    comparison = compare(*runs.values(), make_dense(make_run, 0), make_dense(make_run, 1))
    cells = {seed: read(run)["retrieval"] for seed, run in runs.items()}
    (row,) = [
        result for result in comparison.needles if (result.model, result.task, result.length) == ("one", "needle", 4096)
    ]
    own_cells = {
        seed: [c for c in row_cells if (c["task"], c["length"]) == ("needle", 4096)] for seed, row_cells in cells.items()
    }
    right = {seed: sum(cell["right"] for cell in row_cells) for seed, row_cells in own_cells.items()}
    assert row.by_seed == {
        seed: Proportion.from_counts(right[seed], 21) for seed in (0, 1)
    } and row.every == Proportion.from_counts(sum(right.values()), 42)
    # The window is 512 and the first block 64: at depth 0.9 a fact is 410 bytes away, at depth 0 in the first block.
    far = sum(cell["right"] for row_cells in own_cells.values() for cell in row_cells if cell["depth"] == 0.3)
    assert row.far == Proportion.from_counts(far, 14)
    assert row.written == Proportion.from_counts(
        sum(cell["written_right"] for row_cells in own_cells.values() for cell in row_cells), 6
    )
    assert all(result.far is None for result in comparison.needles if result.task == "multi_query" or result.length == 260)
    for run in runs.values():
        evaluation = read(run)
        for cell in evaluation["retrieval"]:
            cell.update(right_at_depth=5, right=max(cell["right"], 5) if cell["answers"] > cell["sequences"] else 5)
        write_evaluation(run, evaluation)
    counted = compare(*runs.values(), make_dense(make_run, 0), make_dense(make_run, 1)).needles
    (row,) = [result for result in counted if (result.model, result.task, result.length) == ("one", "multi_query", 4096)]
    assert row.far == Proportion.from_counts(10, 14), "one fact per sequence is at that depth, of four"
    assert len(comparison.needles) == 2 * 4


def test_far_is_beyond_the_window_and_after_the_first_block() -> None:
    nsa = make_config().nsa
    assert (nsa.w, nsa.l_sel) == (512, 64)
    assert [is_far(depth, 4096, nsa) for depth in (0.0, 0.01, 0.1, 0.8, 0.9)] == [False, False, True, True, False]
    edges = [is_far(place / 4096, 4096, nsa) for place in (63, 64, 4096 - 513, 4096 - 512)]
    assert edges == [False, True, True, False]


def test_ablation_counts_and_text_loss_in_bits(make_run: Make) -> None:
    runs = [make_run("one", seed) for seed in (0, 1)]
    ablations = compare(*runs, make_dense(make_run, 0), make_dense(make_run, 1)).interventions
    assert [(result.model, result.length, result.name) for result in ablations] == [
        ("one", 4096, "chosen"),
        ("one", 4096, "random"),
    ]
    effects = [read(run)["selection"][0]["interventions"][1] for run in runs]
    assert ablations[1].by_seed == {
        seed: Proportion.from_counts(sum(effect["right"]), 4) for seed, effect in enumerate(effects)
    }
    # Depths 0.2 and 0.5 of 0, 0.2, 0.5 and 0.9.
    assert ablations[1].far == Proportion.from_counts(sum(sum(effect["right"][1:3]) for effect in effects), 4)
    low, high = t_interval([effect["d_loss"] / math.log(2) for effect in effects])
    text = ablations[1].d_text
    assert text and (text.mean, text.half) == (pytest.approx((low + high) / 2), pytest.approx((high - low) / 2))


def test_cost_ratios_use_common_seeds(make_run: Make) -> None:
    nsa_runs, dense_runs = [make_run("one", seed) for seed in (0, 1, 5)], [make_dense(make_run, seed) for seed in (1, 0)]
    comparison = compare(*nsa_runs, *dense_runs)
    nsa, dense = comparison.costs
    assert [run.seed for run in nsa.runs] == [0, 1, 5] and [run.seed for run in dense.runs] == [0, 1]
    # A step of run `number` takes 0.5 + number / 100 s.
    seconds = [200 * (0.5 + number / 100) for number in range(5)]
    assert [run.seconds for run in nsa.runs] == pytest.approx(seconds[:3])
    assert nsa.seconds_share == pytest.approx(sum(seconds[:2]) / sum(seconds[3:])) and dense.seconds_share == 1
    assert nsa.runs[0].tokens == 200 * 2 * 2048 and nsa.runs[0].parameters == 123_456
    assert "other has no run with seed 5 of one: not paired" in comparison.not_compared
    fewer = compare(nsa_runs[0], *dense_runs)
    assert "one has no run with seed 1 of other: not paired" in fewer.not_compared


def test_runs_that_differ_only_in_seed_are_one_model(make_run: Make) -> None:
    runs = [
        make_run("one", 0),
        make_run("one", 1),
        make_run("rates.high.s0", 0),
        make_run("rates.high.s1", 1),
        make_run("rates.low.s0", 0),
    ]
    models = group_runs([*runs, runs[0]], {}, lambda line: None)
    assert [(model.name, list(model.runs)) for model in models] == [
        ("one", [0, 1]),
        ("rates.high", [0, 1]),
        ("rates.low", [0]),
    ]
    assert get_model_name(History.read(make_run("s3", 3))) == "s3"
    with pytest.raises(
        ConfigError, match=r"have one name but differ in train\.lr; give the runs of one of them another name"
    ):
        compare(*runs, make_run("one", 2, train__lr=3e-3))
    with pytest.raises(ConfigError, match=r"one-0-\S+ and one-\S+ are both one with seed 0; omit one"):
        compare(*runs, make_run("one", 0))


def test_runtime_settings_do_not_split_a_model_but_are_noted(make_run: Make) -> None:
    runs = [make_run("one", 0), make_run("one", 1, runtime__compile=True), make_run("one", 2), make_dense(make_run, 0)]
    comparison = compare(*runs)
    assert (
        comparison.not_compared.count(
            f"one was computed in different ways: {runs[0].name} and {runs[1].name} differ in runtime.compile"
        )
        == 1
    )
    assert not any(runs[2].name in line and "differ in" in line for line in comparison.not_compared)
    with pytest.raises(ConfigError, match=r"have one name but differ in runtime\.precision"):
        compare(*runs, make_run("one", 3, runtime__precision="bf16"))
    notes = compare(*runs, make_run("one", 3, runtime__heartbeat_s=1.0)).not_compared
    assert sum("different ways" in line for line in notes) == 1, "heartbeats are not a difference"


def test_runs_on_different_data_are_not_one_model(make_run: Make) -> None:
    runs = [make_run("one", 0), make_run("one", 1), make_dense(make_run, 0)]
    for run, text in zip(runs, ("a" * 64, "b" * 64, "a" * 64), strict=True):
        lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        for event in lines:
            if event["kind"] == "start":
                event["data_identity"] = text
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    with pytest.raises(ConfigError, match="have one name but differ in the data; give"):
        compare(*runs)
    assert any("named as one model" in line and "the data" in line for line in compare(runs[2], one=runs[:2]).not_compared)


def test_named_runs_are_one_model_and_differences_are_noted(make_run: Make) -> None:
    cut = [make_dense(make_run, seed, train__steps=200 - seed, train__lr=2e-3) for seed in (0, 1)]
    for run, steps in zip(cut, (200, 199), strict=True):
        write_evaluation(run, {**read(run), "step": steps})
    nsa_runs = [make_run("one", seed) for seed in (0, 1)]
    comparison = compare(*cut, *nsa_runs, cut=cut)
    assert comparison.baseline == "cut" and [cost.model for cost in comparison.costs] == ["cut", "one"]
    assert any("cut was named as one model" in line and "differ in train.steps" in line for line in comparison.not_compared)
    assert comparison.texts[0].seeds == [0, 1]


def test_baseline_is_the_only_dense_model_or_named(make_run: Make) -> None:
    first, second, dense = make_run("one", 0), make_run("two", 0, train__lr=5e-4), make_dense(make_run, 0)
    assert compare(first, second, dense).baseline == "other"
    assert compare(first, second, dense, against="two").baseline == "two"
    with pytest.raises(ConfigError, match="got 0 of 2 models; name the baseline: --against NAME, one of one, two"):
        compare(first, second)
    with pytest.raises(ConfigError, match="--against three: no such model among these runs; available: one, other"):
        compare(first, dense, against="three")


def test_run_without_final_evaluation_is_noted(make_run: Make) -> None:
    def early(evaluation: dict[str, Any]) -> None:
        evaluation["step"] = 100

    runs = [
        make_run("one", 0),
        make_run("one", 1, None),
        make_run("one", 2, early),
        *(make_dense(make_run, seed) for seed in (0, 1, 2)),
    ]
    comparison = compare(*runs)
    assert [run.seed for run in comparison.costs[0].runs] == [0, 1, 2]
    assert [text.seeds for text in comparison.texts] == [[0], [0]] and comparison.texts[0].places[0].over_seeds is None
    assert list(comparison.needles[0].by_seed) == [0]
    notes = "\n".join(comparison.not_compared)
    assert f"{runs[1].name} has no readable evaluation" in notes
    assert f"{runs[2].name} was evaluated at step 100 of 200" in notes
    assert "one and other have only one common seed, so no interval over seeds" in notes


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"identity": "f" * 16}, "bytes"),
        ({"length": 65536}, "length"),
        ({"window_documents": [0] * WINDOWS}, "windows"),
        ({"rows": [[tokens, 1.0] for tokens in (300, 300, 299, 300, 280, 41, 300)]}, "rows"),
        ({"octaves": [[0, 128], *POSITION_RANGES[1:]]}, "position ranges"),
        ({"identity": "f" * 16, "length": 65536}, "bytes and length"),
    ],
)
def test_text_under_other_conditions_is_not_compared(make_run: Make, changes: dict[str, Any], differences: str) -> None:
    runs = [
        make_run("one", 0),
        make_run("one", 1),
        make_dense(make_run, 0),
        make_dense(make_run, 1, lambda evaluation: evaluation["texts"]["long"].update(changes)),
    ]
    comparison = compare(*runs)
    assert [text.text for text in comparison.texts] == ["held-out text"]
    note = f"long, one minus other: not compared: {runs[0].name} and {runs[3].name} differ in {differences} under this name"
    assert any(line.startswith(note) for line in comparison.not_compared)


def test_missing_or_nonfinite_text_losses_are_not_compared(make_run: Make) -> None:
    def spoil(evaluation: dict[str, Any]) -> None:
        evaluation["texts"].clear()
        evaluation["positions"]["octaves"][1]["windows"][2] = math.nan

    runs = [make_run("one", 0), make_dense(make_run, 0, spoil)]
    comparison = compare(*runs)
    notes = "\n".join(comparison.not_compared)
    assert comparison.texts == [] and f"not compared: {runs[1].name} has no losses on it" in notes
    assert f"held-out text, one minus other: not compared: {runs[1].name} has non-finite losses" in notes


def test_older_evaluation_without_windows_is_read(make_run: Make) -> None:
    def remove_windows(evaluation: dict[str, Any]) -> None:
        del evaluation["texts"]
        for octave in evaluation["positions"]["octaves"]:
            del octave["windows"]
        for part in evaluation["selection"]:
            del part["depths"]
            for effect in part["interventions"]:
                del effect["right"]

    runs = [
        make_run("one", 0),
        make_run("one", 1),
        make_dense(make_run, 0, remove_windows),
        make_dense(make_run, 1, remove_windows),
    ]
    runs += [make_run("old", seed, remove_windows, train__lr=3e-3) for seed in (0, 1)]
    comparison = compare(*runs)
    for text in comparison.texts:
        assert text.text == "held-out text" and all(place.over_windows is place.windows is None for place in text.places)
        assert text.places[0].over_seeds is not None
    assert "held-out text, one minus other: no intervals over windows" in "\n".join(comparison.not_compared)
    assert [result.far for result in comparison.interventions if result.model == "old"] == [None, None]


def test_different_evaluation_settings_are_noted(make_run: Make) -> None:
    def edit(evaluation: dict[str, Any]) -> None:
        evaluation.update(seed=4, dtype="float32", not_asked=[])
        evaluation["retrieval"] = [
            {**cell, "sequences": 3} if cell["task"] == "needle" else cell
            for cell in evaluation["retrieval"]
            if cell["length"] > 260
        ]

    nsa, dense = make_run("one", 0), make_dense(make_run, 0, edit)
    notes = "\n".join(compare(nsa, dense).not_compared)
    assert f"the evaluations differ in the seed of the questions: 0 ({nsa.name}); 4 ({dense.name})" in notes
    assert f"differ in dtype: bfloat16 ({nsa.name}); float32 ({dense.name})" in notes and "in device" not in notes
    counts = f"7 at depths 0, 0.3, 0.9 ({nsa.name}); 3 at depths 0, 0.3, 0.9 ({dense.name})"
    assert f"needle at 4,096: different counts: {counts}" in notes and "multi_query at 4,096" not in notes
    assert f"needle at 260: not requested ({dense.name})" in notes
    assert f"multi_key at 260: skipped: too short ({nsa.name})" in notes
    assert f"ablations at 4,096: dense attention has neither blocks nor branches ({dense.name})" in notes


def test_copied_evaluations_are_noted(make_run: Make) -> None:
    def copy(evaluation: dict[str, Any]) -> None:
        evaluation.update(copied)

    copied = {name: make_evaluation(1)[name] for name in ("retrieval", "positions", "texts")}
    runs = [make_run("one", seed, copy) for seed in (0, 1)]
    notes = "\n".join(compare(*runs, make_dense(make_run, 0)).not_compared)
    assert f"evaluations have the same losses and answers: all but one are copies ({runs[0].name}, {runs[1].name})" in notes
    others = [make_run("two", seed) for seed in (0, 1)]
    assert "copies" not in "\n".join(compare(*others, make_dense(make_run, 0)).not_compared)


def test_incomplete_records_give_gaps(make_run: Make, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        remaining = [event for event in events if event["kind"] in ("step", "end")]
        return [{key: value for key, value in event.items() if key not in ("dt_s", "tokens_per_s")} for event in remaining]

    bare = write_run(tmp_path / "outputs", make_config(train__seed=0).model_copy(update={"name": "bare"}), spoil)
    skipped = {"retrieval": [], "not_asked": [], "texts": {}, "selection": []}
    write_evaluation(bare, make_evaluation(9, run=bare.name, **skipped))
    comparison = compare(bare, make_dense(make_run, 0))
    cost = comparison.costs[0]
    assert (cost.runs[0].parameters, cost.runs[0].seconds, cost.seconds_share) == (None, None, None)
    assert [text.text for text in comparison.texts] == ["held-out text"]
    assert "| bare | 0 | – | 819,200 | – | – | – | – | – |" in format_markdown(comparison)
    notes = "\n".join(comparison.not_compared)
    assert f"needle at 260: not requested ({bare.name})" in notes and f"{bare.name} has no losses on it" in notes


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """command(*arguments): run `nsa-lab compare`; return exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["nsa-lab", "compare", *arguments, "--outputs", str(tmp_path / "outputs")])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return (exit_info.value.code or 0, *capsys.readouterr())

    return run


def parse_tables(text: str) -> dict[str, list[list[str]]]:
    """Return the rows of the tables of a Markdown page by heading. Tables under one heading are joined."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        if line.startswith("|"):
            tables.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return tables


def test_command_tables_contain_the_numbers_of_the_json(make_run: Make, command: Callable[..., Any]) -> None:
    for seed in (0, 1, 2):
        make_run("one", seed), make_dense(make_run, seed)
    code, page, _ = command("one-*", "other-*")
    json_code, data, _ = command("one-*", "other-*", "--json")
    assert code == json_code == 0
    record, tables = json.loads(data), parse_tables(page)
    assert {len({len(row) for row in rows}) for rows in tables.values() if rows} <= {1, 2}
    place = next(text for text in record["texts"] if text["text"] == "long")["places"][3]
    row = next(row for row in tables["long: one minus other, seeds 0, 1, 2"] if row[0] == place["place"])
    low, high = place["over_seeds"]
    assert row[3] == f"{place['difference']:+.4f}" and row[6] == f"[{low:+.4f}, {high:+.4f}]" and row[5] == str(WINDOWS)
    needles = next(result for result in record["needles"] if [*result.values()][:3] == ["other", "needle", 4096])
    per_seed = " / ".join(f"{100 * share['share']:.1f}" for share in needles["by_seed"].values())
    row = next(row for row in tables["Needles"] if row[:2] == ["needle", "4,096"])
    assert row[3].startswith(f"{per_seed}: {100 * needles['every']['share']:.1f} [") and row[3].endswith("of 63")
    assert tables["Models"][2][0] == "one" and tables["Models"][2][5] == f"{record['costs'][0]['seconds_share']:.3f}"
    assert [row[1] for row in tables["one"][2:]] == ["chosen", "random"] and "other" not in tables
    assert record["v"] == 1 and all(f"* {line}" in page.splitlines() for line in record["not_compared"])


def test_command_accepts_ids_folders_patterns_and_names(make_run: Make, command: Callable[..., Any]) -> None:
    nsa, dense = make_run("one", 0), make_dense(make_run, 0)
    assert command(nsa.name, str(dense))[0] == command(str(nsa.parent / "o*"))[0] == 0
    code, page, _ = command(f"a={nsa.name}", "b=other-*", "--against", "a")
    assert code == 0 and "### long: b minus a, seed 0" in page and "none: one seed" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one-*"], "got 0 of 1 models"),
        (["one-*", "other-*", "--against", "three"], "--against three: no such model"),
        (["none-*"], "'none-*' matches no run in"),
        (["none"], "'none': no such run in"),
        (["=one-*"], "=one-*: expected NAME=RUN"),
    ],
)
def test_command_errors_are_one_line(
    make_run: Make, command: Callable[..., Any], arguments: list[str], message: str
) -> None:
    make_run("one", 0), make_dense(make_run, 0)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and err.startswith("nsa-lab: ") and message in err and err.count("\n") == 1


def test_named_run_belongs_only_to_the_named_model(tmp_path: Path) -> None:
    make_run = make_run_factory(tmp_path)
    runs = [make_run("long", 0), make_run("long", 1)]
    models = group_runs(runs, {"mine": [runs[1]]}, lambda line: None)
    assert [(model.name, [*model.runs]) for model in models] == [("mine", [1]), ("long", [0])]


def test_baseline_must_be_named_among_two_dense_models(tmp_path: Path) -> None:
    make_run = make_run_factory(tmp_path)
    runs = [
        make_run("long", 0),
        make_run("second", 0, model__attention="dense"),
        make_run("other", 0, model__attention="dense"),
    ]
    with pytest.raises(ConfigError, match="got 2 of 3 models"):
        find_baseline(group_runs(runs, {}, lambda line: None), None)


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"data_identity": "e" * 64}, "bytes"),
        ({"positions": {"length": 8192}}, "length"),
        ({"positions": {"windows": 4}}, "windows"),
    ],
)
def test_held_out_text_under_other_conditions_is_not_compared(
    make_run: Make, changes: dict[str, Any], differences: str
) -> None:
    def edit(evaluation: dict[str, Any]) -> None:
        evaluation["positions"].update(changes.get("positions", {}))
        for octave in evaluation["positions"]["octaves"]:
            del octave["windows"][evaluation["positions"]["windows"] :]
        evaluation.update({key: value for key, value in changes.items() if key != "positions"})

    nsa, dense = make_run("one", 0), make_dense(make_run, 0, edit)
    comparison = compare(nsa, dense)
    note = (
        f"held-out text, one minus other: not compared: {nsa.name} and {dense.name} differ in {differences} under this name"
    )
    assert [text.text for text in comparison.texts] == ["long"] and any(
        line.startswith(note) for line in comparison.not_compared
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device": "a GPU"}, "device: cpu ({}); a GPU ({})"),
        ({"code": {"source": "def"}}, "code: abc ({}); def ({})"),
        ({"data_identity": "e" * 64}, f"the text of the questions: {'d' * 64} ({{}}); {'e' * 64} ({{}})"),
        ({"recall": {"value_length": 9}}, "data.value_length of the questions: 7 ({}); 9 ({})"),
    ],
)
def test_different_evaluation_conditions_are_noted(make_run: Make, changes: dict[str, Any], text: str) -> None:
    nsa, dense = make_run("one", 0), make_dense(make_run, 0, lambda evaluation: evaluation.update(changes))
    notes = compare(nsa, dense).not_compared
    assert [line for line in notes if line.startswith("the evaluations differ")] == [
        f"the evaluations differ in {text.format(nsa.name, dense.name)}"
    ]


def test_time_ratio_needs_the_times_of_all_seeds(make_run: Make) -> None:
    nsa_runs, dense_runs = [make_run("one", seed) for seed in (0, 1)], [make_dense(make_run, seed) for seed in (0, 1)]
    record = nsa_runs[1] / "events.jsonl"
    events = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps({k: v for k, v in e.items() if k != "dt_s"}) + "\n" for e in events))
    cost = compare(*nsa_runs, *dense_runs).costs[0]
    assert cost.runs[0].seconds and cost.runs[1].seconds is None and cost.seconds_share is None and cost.wall_share


def test_accuracy_is_rounded_to_whole_answers(make_run: Make) -> None:
    """29 of 100 is stored as accuracy 0.29, and 100 * 0.29 is slightly less than 29 in floating point."""

    def set_29_percent(evaluation: dict[str, Any]) -> None:
        (part,) = evaluation["selection"]
        part.update(sequences=100, depths=[0.5] * 100)
        for effect in part["interventions"]:
            effect.update(accuracy=0.29, right=[1.0] * 29 + [0.0] * 71)

    ablations = compare(make_run("one", 0, set_29_percent), make_dense(make_run, 0)).interventions
    assert ablations and all(result.every == result.far == Proportion.from_counts(29, 100) for result in ablations)


def test_far_needles_need_counts_of_every_run(make_run: Make) -> None:
    def add_counts(evaluation: dict[str, Any]) -> None:
        for cell in evaluation["retrieval"]:
            cell.update(right_at_depth=5, right=max(cell["right"], 5) if cell["answers"] > cell["sequences"] else 5)

    needles = compare(make_run("one", 0, add_counts), make_run("one", 1), make_dense(make_run, 0)).needles
    assert [
        result.far for result in needles if (result.model, result.task, result.length) == ("one", "multi_query", 4096)
    ] == [None]


def test_a_table_of_needles_without_rows_is_omitted(make_run: Make) -> None:
    def generate_nothing(evaluation: dict[str, Any]) -> None:
        for cell in evaluation["retrieval"]:
            cell.update(written=0, written_right=0)

    for edit, n_tables in ((None, 3), (generate_nothing, 2)):
        evaluate = [] if edit is None else [edit]
        page = format_markdown(compare(make_run("one", n_tables, *evaluate), make_dense(make_run, n_tables, *evaluate)))
        assert page.count("| task | bytes | one | other |") == n_tables
        assert ("Generated answers" in page) == (n_tables == 3)


@pytest.mark.parametrize("state", ["HALTED", "PREEMPTED"])
def test_unfinished_run_is_noted(make_run: Make, state: str) -> None:
    runs = [make_run("one", 0), make_dense(make_run, 0)]
    status = json.loads((runs[0] / "status.json").read_text())
    (runs[0] / "status.json").write_text(json.dumps({**status, "status": state}))
    assert f"{runs[0].name} is {state}: its cost covers 200 of 200 steps" in compare(*runs).not_compared


def test_every_table_column_has_its_own_number(make_run: Make) -> None:
    comparison = compare(*(make_run("one", seed) for seed in (0, 1)), *(make_dense(make_run, seed) for seed in (0, 1)))
    tables = parse_tables(format_markdown(comparison))
    place = next(text for text in comparison.texts if text.text == "long").places[2]
    row = next(row for row in tables["long: one minus other, seeds 0, 1"] if row[0] == place.place)
    assert row[1:3] == [f"{place.bits:.4f}", f"{place.baseline_bits:.4f}"] and row[1] != row[2]
    assert place.over_windows and row[4] == "[{:+.4f}, {:+.4f}]".format(*place.over_windows)
    cost = comparison.costs[0]
    assert tables["Models"][2][5] == f"{cost.seconds_share:.3f}" != tables["Models"][2][7] == f"{cost.wall_share:.3f}"
    needles = next(
        result for result in comparison.needles if (result.model, result.task, result.length) == ("one", "needle", 4096)
    )
    row = next(row for row in tables["Needles"] if row[:2] == ["needle", "4,096"])
    costs = [replace(run, tokens_per_s=[speed]) for run, speed in zip(cost.runs, (1000.0, 3000.0), strict=True)]
    edited = parse_tables(format_markdown(replace(comparison, costs=[replace(cost, runs=costs)])))
    assert edited["Models"][2][8] == "2,000"
    assert needles.every and row[2].endswith(f"[{100 * needles.every.low:.1f}, {100 * needles.every.high:.1f}] of 42")
