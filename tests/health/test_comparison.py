"""Models side by side: what is one model, what makes pairs, and every number of the tables against plain loops."""

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
from fake_evaluation import POSITION_RANGES, WINDOWS, make_run_factory
from fake_run import Event, make_config, write_run

from nsa_lab import cli
from nsa_lab.config import ConfigError
from nsa_lab.health.comparison import ModelComparison, compare_models, is_far
from nsa_lab.health.comparison_tables import format_markdown
from nsa_lab.health.model_runs import find_baseline, get_model_name, group_runs
from nsa_lab.health.paired_difference import MAX_SEGMENTS, T_QUANTILES, PairedDifference, compute_paired_difference
from nsa_lab.health.paired_text_loss import SLOPE_LABEL
from nsa_lab.health.proportions import Proportion
from nsa_lab.runs.evaluation import compute_wilson_interval, write_evaluation
from nsa_lab.runs.history import History

Make = Callable[..., Path]
NAMES = ["0 to 255", "256 to 4,095", "4,096 to 8,191", "8,192 to 16,383", "16,384 to 29,999"]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """made("long", 1, spoil, attention=, ...) -> a run of that name and seed, evaluated with numbers that are its own."""
    return make_run_factory(tmp_path / "outputs")


def compare(*runs: Path, against: str | None = None, **named: list[Path]) -> ModelComparison:
    notes: list[str] = []
    models = group_runs([run for run in runs if not any(run in own for own in named.values())], named, notes.append)
    return compare_models(models, find_baseline(models, against), notes)


def make_dense(made: Make, seed: int, *evaluate: Any, **config: Any) -> Path:
    return made("other", seed, *evaluate, model__attention="dense", **config)


def read(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation.json").read_text())


def t_interval(values: list[float]) -> tuple[float, float]:
    """Student's, by its formula."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = T_QUANTILES[len(values) - 2] * math.sqrt(variance / len(values))
    return mean - half, mean + half


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # Newcombe (1998), table I.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_share_is_that_of_the_books(right: int, asked: int, low: float, high: float) -> None:
    assert compute_wilson_interval(right, asked) == pytest.approx((low, high), abs=6e-5)
    assert compute_wilson_interval(asked - right, asked) == pytest.approx((1 - high, 1 - low), abs=6e-5)


@pytest.mark.parametrize(("right", "asked"), [(1, 2), (7, 11), (499, 500), (500, 500), (0, 3)])
def test_the_ends_of_the_interval_are_where_the_score_test_begins_to_reject(right: int, asked: int) -> None:
    for end in set(compute_wilson_interval(right, asked)) - {0.0, 1.0}:
        assert abs(right / asked - end) / math.sqrt(end * (1 - end) / asked) == pytest.approx(1.959964, abs=1e-5)


def test_of_nothing_there_is_no_share() -> None:
    assert Proportion.from_counts(0, 0) is None and Proportion.pool([None, None]) is None
    assert Proportion.pool([Proportion.from_counts(1, 3), None, Proportion.from_counts(2, 2)]) == Proportion.from_counts(
        3, 5
    )


def test_weights_are_those_of_every_mean() -> None:
    draw = np.random.default_rng(1)
    first, second, weights = draw.normal(size=47), draw.normal(size=47), draw.integers(1, 9, 47)
    found = compute_paired_difference("x", first, second, weights)
    means, begin = [], 0
    for stretch in range(MAX_SEGMENTS):
        end = begin + 47 // MAX_SEGMENTS + (stretch < 47 % MAX_SEGMENTS)
        total = sum(weights[i] * (first[i] - second[i]) for i in range(begin, end))
        means.append(total / sum(weights[i] for i in range(begin, end)))
        begin = end
    low, high = t_interval(means)
    assert isinstance(found, PairedDifference) and found.half_width == pytest.approx((high - low) / 2)
    assert found.mean == pytest.approx(np.average(first - second, weights=weights))


def test_every_number_of_a_text_is_that_of_plain_loops(made: Make) -> None:
    seeds = (3, 1, 8)
    runs = {seed: (made("one", seed), make_dense(made, seed)) for seed in seeds}
    found = compare(*(run for pair in runs.values() for run in pair))
    texts = {text.text: text for text in found.texts}
    assert set(texts) == {"long", "held-out text"} and texts["long"].seeds == [1, 3, 8]
    told = {seed: [read(run)["texts"]["long"] for run in pair] for seed, pair in runs.items()}
    places = {place.place: place for place in texts["long"].places}
    assert list(places) == ["whole documents", *NAMES, SLOPE_LABEL]
    for column, name in enumerate(NAMES):
        apart = [
            [
                (told[seed][0]["windows"][w][column] - told[seed][1]["windows"][w][column]) / math.log(2)
                for w in range(WINDOWS)
            ]
            for seed in seeds
        ]
        by_window = [sum(seed[w] for seed in apart) / 3 for w in range(WINDOWS)]
        # 23 windows in 20 stretches: three of two, seventeen of one.
        stretches = [sum(by_window[w : w + 2]) / 2 for w in (0, 2, 4)] + by_window[6:]
        by_seed = [sum(seed) / WINDOWS for seed in apart]
        place = places[name]
        low, high = t_interval(stretches)
        assert place.difference == pytest.approx(sum(by_window) / WINDOWS)
        assert place.difference == pytest.approx(place.bits - place.baseline_bits)
        middle, half = place.difference, (high - low) / 2
        assert place.over_windows == pytest.approx((middle - half, middle + half)) and place.windows == WINDOWS
        assert place.over_seeds == pytest.approx(t_interval(by_seed))
        bits = [sum(window[column] for window in told[seed][0]["windows"]) / WINDOWS / math.log(2) for seed in seeds]
        assert place.bits == pytest.approx(sum(bits) / 3)
    whole = places["whole documents"]
    assert (
        whole.bits == pytest.approx(sum(told[seed][0]["loss"] for seed in seeds) / 3 / math.log(2)) and whole.windows == 7
    )
    assert whole.over_windows and sum(whole.over_windows) / 2 == pytest.approx(whole.difference)
    slopes = [
        [np.polyfit(range(3), np.array(losses["windows"])[:, 2:].T / math.log(2), 1)[0].mean() for losses in told[seed]]
        for seed in seeds
    ]
    assert places[SLOPE_LABEL].over_seeds == pytest.approx(t_interval([one - other for one, other in slopes]))


def test_needles_are_counted_by_seed_together_and_far(made: Make) -> None:
    runs = {seed: made("one", seed) for seed in (0, 1)}
    found = compare(*runs.values(), make_dense(made, 0), make_dense(made, 1))
    cells = {seed: read(run)["retrieval"] for seed, run in runs.items()}
    (row,) = [one for one in found.needles if (one.model, one.task, one.length) == ("one", "needle", 4096)]
    of = {seed: [c for c in own if (c["task"], c["length"]) == ("needle", 4096)] for seed, own in cells.items()}
    right = {seed: sum(cell["right"] for cell in own) for seed, own in of.items()}
    assert row.by_seed == {
        seed: Proportion.from_counts(right[seed], 21) for seed in (0, 1)
    } and row.every == Proportion.from_counts(sum(right.values()), 42)
    # A window of 512 and a first block of 64: at depth .9 a fact is 410 bytes away, and at 0 in that block.
    far = sum(cell["right"] for own in of.values() for cell in own if cell["depth"] == 0.3)
    assert row.far == Proportion.from_counts(far, 14)
    assert row.written == Proportion.from_counts(sum(cell["written_right"] for own in of.values() for cell in own), 6)
    assert all(one.far is None for one in found.needles if one.task == "multi_query" or one.length == 260)
    for run in runs.values():
        told = read(run)
        for cell in told["retrieval"]:
            cell["right_at_depth"] = 5
        write_evaluation(run, told)
    counted = compare(*runs.values(), make_dense(made, 0), make_dense(made, 1)).needles
    (row,) = [one for one in counted if (one.model, one.task, one.length) == ("one", "multi_query", 4096)]
    assert row.far == Proportion.from_counts(10, 14), "the fact at that depth, of four in each sequence"
    assert len(found.needles) == 2 * 4


def test_far_is_beyond_the_window_and_behind_the_first_block() -> None:
    nsa = make_config().nsa
    assert (nsa.w, nsa.l_sel) == (512, 64)
    assert [is_far(depth, 4096, nsa) for depth in (0.0, 0.01, 0.1, 0.8, 0.9)] == [False, False, True, True, False]
    edges = [is_far(place / 4096, 4096, nsa) for place in (63, 64, 4096 - 513, 4096 - 512)]
    assert edges == [False, True, True, False]


def test_interventions_are_counted_and_told_in_bits(made: Make) -> None:
    runs = [made("one", seed) for seed in (0, 1)]
    found = compare(*runs, make_dense(made, 0), make_dense(made, 1)).interventions
    assert [(one.model, one.length, one.name) for one in found] == [("one", 4096, "chosen"), ("one", 4096, "random")]
    effects = [read(run)["selection"][0]["interventions"][1] for run in runs]
    assert found[1].by_seed == {
        seed: Proportion.from_counts(sum(effect["right"]), 4) for seed, effect in enumerate(effects)
    }
    # Of the depths 0, .2, .5 and .9 those in the middle.
    assert found[1].far == Proportion.from_counts(sum(sum(effect["right"][1:3]) for effect in effects), 4)
    low, high = t_interval([effect["d_loss"] / math.log(2) for effect in effects])
    text = found[1].d_text
    assert text and (text.mean, text.half) == (pytest.approx((low + high) / 2), pytest.approx((high - low) / 2))


def test_costs_are_shares_of_the_same_seeds(made: Make) -> None:
    ours, theirs = [made("one", seed) for seed in (0, 1, 5)], [make_dense(made, seed) for seed in (1, 0)]
    found = compare(*ours, *theirs)
    one, other = found.costs
    assert [run.seed for run in one.runs] == [0, 1, 5] and [run.seed for run in other.runs] == [0, 1]
    # Every step of run `number` takes .5 s and number / 100 more.
    seconds = [200 * (0.5 + number / 100) for number in range(5)]
    assert [run.seconds for run in one.runs] == pytest.approx(seconds[:3])
    assert one.seconds_share == pytest.approx(sum(seconds[:2]) / sum(seconds[3:])) and other.seconds_share == 1
    assert one.runs[0].tokens == 200 * 2 * 2048 and one.runs[0].parameters == 123_456
    assert "other has no run at seed 5 of one: no pairs of those" in found.not_compared
    fewer = compare(ours[0], *theirs)
    assert "one has no run at seed 1 of other: no pairs of those" in fewer.not_compared


def test_what_differs_in_its_seed_alone_is_one_model(made: Make) -> None:
    runs = [made("one", 0), made("one", 1), made("rates.high.s0", 0), made("rates.high.s1", 1), made("rates.low.s0", 0)]
    models = group_runs([*runs, runs[0]], {}, lambda line: None)
    assert [(model.name, list(model.runs)) for model in models] == [
        ("one", [0, 1]),
        ("rates.high", [0, 1]),
        ("rates.low", [0]),
    ]
    assert get_model_name(History.read(made("s3", 3))) == "s3"
    with pytest.raises(ConfigError, match=r"called alike and differ in train\.lr; give the runs of one of them a name"):
        compare(*runs, made("one", 2, train__lr=3e-3))
    with pytest.raises(ConfigError, match=r"one-0-\S+ and one-\S+ are both of one at seed 0; leave one"):
        compare(*runs, made("one", 0))


def test_how_a_run_was_computed_makes_no_other_model_and_is_told(made: Make) -> None:
    runs = [made("one", 0), made("one", 1, runtime__compile=True), made("one", 2), make_dense(made, 0)]
    found = compare(*runs)
    assert (
        found.not_compared.count(
            f"one was computed in more than one way: {runs[0].name} and {runs[1].name} differ in runtime.compile"
        )
        == 1
    )
    assert not any(runs[2].name in line and "differ in" in line for line in found.not_compared)
    with pytest.raises(ConfigError, match=r"called alike and differ in runtime\.precision"):
        compare(*runs, made("one", 3, runtime__precision="bf16"))
    watched = compare(*runs, made("one", 3, runtime__heartbeat_s=1.0)).not_compared
    assert sum("more than one way" in line for line in watched) == 1, "how often it said that it lives is no difference"


def test_runs_of_other_text_are_no_model(made: Make) -> None:
    runs = [made("one", 0), made("one", 1), make_dense(made, 0)]
    for run, text in zip(runs, ("a" * 64, "b" * 64, "a" * 64), strict=True):
        told = (run / "events.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in told]
        for event in lines:
            if event["kind"] == "start":
                event["data_identity"] = text
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    with pytest.raises(ConfigError, match="are called alike and differ in the data; give"):
        compare(*runs)
    assert any(
        "said to be one model" in line and "the data" in line for line in compare(runs[2], one=runs[:2]).not_compared
    )


def test_runs_under_a_name_are_a_model_and_what_differs_is_told(made: Make) -> None:
    cut = [make_dense(made, seed, train__steps=200 - seed, train__lr=2e-3) for seed in (0, 1)]
    for run, steps in zip(cut, (200, 199), strict=True):
        write_evaluation(run, {**read(run), "step": steps})
    ours = [made("one", seed) for seed in (0, 1)]
    found = compare(*cut, *ours, cut=cut)
    assert found.baseline == "cut" and [cost.model for cost in found.costs] == ["cut", "one"]
    assert any("cut was said to be one model" in line and "differ in train.steps" in line for line in found.not_compared)
    assert found.texts[0].seeds == [0, 1]


def test_the_baseline_is_the_dense_model_or_is_asked_for(made: Make) -> None:
    one, two, twin = made("one", 0), made("two", 0, train__lr=5e-4), make_dense(made, 0)
    assert compare(one, two, twin).baseline == "other"
    assert compare(one, two, twin, against="two").baseline == "two"
    with pytest.raises(ConfigError, match="here 0 of 2 models are dense; say which is: --against NAME, of one, two"):
        compare(one, two)
    with pytest.raises(ConfigError, match="--against three: there is no such model among these runs; there is one, other"):
        compare(one, twin, against="three")


def test_a_run_without_an_evaluation_of_its_last_step_is_told_of(made: Make) -> None:
    def early(found: dict[str, Any]) -> None:
        found["step"] = 100

    runs = [made("one", 0), made("one", 1, None), made("one", 2, early), *(make_dense(made, seed) for seed in (0, 1, 2))]
    found = compare(*runs)
    assert [run.seed for run in found.costs[0].runs] == [0, 1, 2]
    assert [text.seeds for text in found.texts] == [[0], [0]] and found.texts[0].places[0].over_seeds is None
    assert list(found.needles[0].by_seed) == [0]
    told = "\n".join(found.not_compared)
    assert f"{runs[1].name} has no evaluation that can be read" in told
    assert f"{runs[2].name} was evaluated at step 100 of 200" in told
    assert "one and other have one seed alone, so no interval over seeds" in told


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"identity": "f" * 16}, "bytes"),
        ({"length": 65536}, "length"),
        ({"window_documents": [0] * WINDOWS}, "windows"),
        ({"rows": [[tokens, 1.0] for tokens in (300, 300, 299, 300, 280, 41, 300)]}, "rows"),
        ({"octaves": [[0, 128], *POSITION_RANGES[1:]]}, "octaves"),
        ({"identity": "f" * 16, "length": 65536}, "bytes and length"),
    ],
)
def test_a_text_that_was_read_otherwise_at_one_seed_is_refused(made: Make, changes: dict[str, Any], what: str) -> None:
    runs = [
        made("one", 0),
        made("one", 1),
        make_dense(made, 0),
        make_dense(made, 1, lambda e: e["texts"]["long"].update(changes)),
    ]
    found = compare(*runs)
    assert [text.text for text in found.texts] == ["held-out text"]
    told = f"long, one less other: not compared: {runs[0].name} and {runs[3].name} read other {what} under this name"
    assert any(line.startswith(told) for line in found.not_compared)


def test_a_text_that_one_run_did_not_read_or_that_holds_no_numbers_is_refused(made: Make) -> None:
    def spoil(found: dict[str, Any]) -> None:
        found["texts"].clear()
        found["positions"]["octaves"][1]["windows"][2] = math.nan

    runs = [made("one", 0), make_dense(made, 0, spoil)]
    found = compare(*runs)
    told = "\n".join(found.not_compared)
    assert found.texts == [] and f"not compared: {runs[1].name} did not read it" in told
    assert f"held-out text, one less other: not compared: {runs[1].name} has losses that are no numbers" in told


def test_an_evaluation_from_before_windows_were_recorded_is_read(made: Make) -> None:
    def older(found: dict[str, Any]) -> None:
        del found["texts"]
        for octave in found["positions"]["octaves"]:
            del octave["windows"]
        for part in found["selection"]:
            del part["depths"]
            for effect in part["interventions"]:
                del effect["right"]

    runs = [made("one", 0), made("one", 1), make_dense(made, 0, older), make_dense(made, 1, older)]
    runs += [made("old", seed, older, train__lr=3e-3) for seed in (0, 1)]
    found = compare(*runs)
    for text in found.texts:
        assert text.text == "held-out text" and all(place.over_windows is place.windows is None for place in text.places)
        assert text.places[0].over_seeds is not None
    assert "held-out text, one less other: intervals over windows are not known" in "\n".join(found.not_compared)
    assert [one.far for one in found.interventions if one.model == "old"] == [None, None]


def test_what_was_asked_otherwise_is_told(made: Make) -> None:
    def otherwise(found: dict[str, Any]) -> None:
        found.update(seed=4, dtype="float32", not_asked=[])
        found["retrieval"] = [
            {**cell, "sequences": 3} if cell["task"] == "needle" else cell
            for cell in found["retrieval"]
            if cell["length"] > 260
        ]

    one, other = made("one", 0), make_dense(made, 0, otherwise)
    told = "\n".join(compare(one, other).not_compared)
    assert f"the evaluations differ in the seed of their questions: 0 ({one.name}); 4 ({other.name})" in told
    assert f"differ in dtype: bfloat16 ({one.name}); float32 ({other.name})" in told and "in device" not in told
    counts = f"7 at depths 0, 0.3, 0.9 ({one.name}); 3 at depths 0, 0.3, 0.9 ({other.name})"
    assert f"needle at 4,096: not asked alike: {counts}" in told and "multi_query at 4,096" not in told
    assert f"needle at 260: the evaluation was not to ask it ({other.name})" in told
    assert f"multi_key at 260: not asked: too short ({one.name})" in told
    assert f"interventions at 4,096: dense attention has neither blocks nor branches ({other.name})" in told


def test_records_that_say_little_are_told_with_gaps(made: Make, tmp_path: Path) -> None:
    def spoil(events: list[Event]) -> list[Event]:
        kept = [event for event in events if event["kind"] in ("step", "end")]
        return [{key: value for key, value in event.items() if key not in ("dt_s", "tokens_per_s")} for event in kept]

    bare = write_run(tmp_path / "outputs", make_config(train__seed=0).model_copy(update={"name": "bare"}), spoil)
    write_evaluation(bare, {"v": 1, "step": 200})
    found = compare(bare, make_dense(made, 0))
    cost = found.costs[0]
    assert (cost.runs[0].parameters, cost.runs[0].seconds, cost.seconds_share) == (None, None, None)
    assert found.texts == [] and "| bare | 0 | – | 819,200 | – | – | – | – | – |" in format_markdown(found)
    told = "\n".join(found.not_compared)
    assert (
        f"needle at 260: the evaluation was not to ask it ({bare.name})" in told and f"{bare.name} did not read it" in told
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """command(*arguments) -> exit code, standard output and standard error of nsa-lab compare."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["nsa-lab", "compare", *arguments, "--outputs", str(tmp_path / "outputs")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run


def parse_tables(text: str) -> dict[str, list[list[str]]]:
    """The cells of each table of a Markdown page, by the heading before it; several under one heading together."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        if line.startswith("|"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_command_writes_tables_that_hold_the_numbers_of_its_json(made: Make, command: Callable[..., Any]) -> None:
    for seed in (0, 1, 2):
        made("one", seed), make_dense(made, seed)
    code, page, _ = command("one-*", "other-*")
    again, data, _ = command("one-*", "other-*", "--json")
    assert code == again == 0
    found, shown = json.loads(data), parse_tables(page)
    assert {len({len(row) for row in rows}) for rows in shown.values() if rows} <= {1, 2}
    place = next(text for text in found["texts"] if text["text"] == "long")["places"][3]
    row = next(row for row in shown["long: one less other, seeds 0, 1, 2"] if row[0] == place["place"])
    low, high = place["over_seeds"]
    assert row[3] == f"{place['difference']:+.4f}" and row[6] == f"[{low:+.4f}, {high:+.4f}]" and row[5] == str(WINDOWS)
    needles = next(one for one in found["needles"] if [*one.values()][:3] == ["other", "needle", 4096])
    each = " / ".join(f"{100 * share['share']:.1f}" for share in needles["by_seed"].values())
    row = next(row for row in shown["Needles"] if row[:2] == ["needle", "4,096"])
    assert row[3].startswith(f"{each}: {100 * needles['every']['share']:.1f} [") and row[3].endswith("of 63")
    assert shown["Models"][2][0] == "one" and shown["Models"][2][5] == f"{found['costs'][0]['seconds_share']:.3f}"
    assert [row[1] for row in shown["one"][2:]] == ["chosen", "random"] and "other" not in shown
    assert found["v"] == 1 and all(f"* {line}" in page.splitlines() for line in found["not_compared"])


def test_runs_are_named_by_id_folder_and_pattern_and_models_by_hand(made: Make, command: Callable[..., Any]) -> None:
    one, other = made("one", 0), make_dense(made, 0)
    assert command(one.name, str(other))[0] == command(str(one.parent / "o*"))[0] == 0
    code, page, _ = command(f"a={one.name}", "b=other-*", "--against", "a")
    assert code == 0 and "### long: b less a, seed 0" in page and "none: one seed" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["one-*"], "here 0 of 1 models are dense"),
        (["one-*", "other-*", "--against", "three"], "--against three: there is no such model"),
        (["none-*"], "'none-*' matches no run in"),
        (["none"], "'none': no such run in"),
        (["=one-*"], "=one-*: expected a model's name and its runs"),
    ],
)
def test_what_is_wrong_is_one_line(made: Make, command: Callable[..., Any], arguments: list[str], said: str) -> None:
    made("one", 0), make_dense(made, 0)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and err.startswith("nsa-lab: ") and said in err and err.count("\n") == 1


def test_a_named_run_is_of_the_named_model_alone(tmp_path: Path) -> None:
    made = make_run_factory(tmp_path)
    runs = [made("long", 0), made("long", 1)]
    models = group_runs(runs, {"mine": [runs[1]]}, lambda line: None)
    assert [(model.name, [*model.runs]) for model in models] == [("mine", [1]), ("long", [0])]


def test_of_two_dense_models_the_baseline_has_to_be_named(tmp_path: Path) -> None:
    made = make_run_factory(tmp_path)
    runs = [made("long", 0), made("twin", 0, model__attention="dense"), made("other", 0, model__attention="dense")]
    with pytest.raises(ConfigError, match="2 of 3 models are dense"):
        find_baseline(group_runs(runs, {}, lambda line: None), None)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data_identity": "e" * 64}, "bytes"),
        ({"positions": {"length": 8192}}, "length"),
        ({"positions": {"windows": 4}}, "windows"),
    ],
)
def test_held_out_text_that_was_read_otherwise_is_refused(made: Make, changes: dict[str, Any], what: str) -> None:
    def otherwise(found: dict[str, Any]) -> None:
        found["positions"].update(changes.get("positions", {}))
        found.update({key: value for key, value in changes.items() if key != "positions"})

    one, other = made("one", 0), make_dense(made, 0, otherwise)
    found = compare(one, other)
    told = f"held-out text, one less other: not compared: {one.name} and {other.name} read other {what} under this name"
    assert [text.text for text in found.texts] == ["long"] and any(line.startswith(told) for line in found.not_compared)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "a GPU"}, "device: cpu ({}); a GPU ({})"),
        ({"code": {"source": "def"}}, "code: abc ({}); def ({})"),
        ({"data_identity": "e" * 64}, f"the text of their questions: {'d' * 64} ({{}}); {'e' * 64} ({{}})"),
        ({"recall": {"value_length": 9}}, "the data.value_length of their questions: 7 ({}); 9 ({})"),
    ],
)
def test_what_evaluations_should_have_in_common_is_told_where_they_have_not(
    made: Make, changes: dict[str, Any], said: str
) -> None:
    one, other = made("one", 0), make_dense(made, 0, lambda found: found.update(changes))
    told = compare(one, other).not_compared
    assert [line for line in told if line.startswith("the evaluations differ")] == [
        f"the evaluations differ in {said.format(one.name, other.name)}"
    ]


def test_a_share_of_time_is_of_all_seeds_or_not_told(made: Make) -> None:
    ours, theirs = [made("one", seed) for seed in (0, 1)], [make_dense(made, seed) for seed in (0, 1)]
    record = ours[1] / "events.jsonl"
    events = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps({k: v for k, v in e.items() if k != "dt_s"}) + "\n" for e in events))
    cost = compare(*ours, *theirs).costs[0]
    assert cost.runs[0].seconds and cost.runs[1].seconds is None and cost.seconds_share is None and cost.wall_share


def test_a_share_of_answers_is_rounded_to_whole_ones(made: Make) -> None:
    """Of 29 right in 100 the share is .29, and 100 times that a little less than 29."""

    def many(found: dict[str, Any]) -> None:
        (part,) = found["selection"]
        part.update(sequences=100, depths=[0.5] * 100)
        for effect in part["interventions"]:
            effect.update(accuracy=0.29, right=[1.0] * 29 + [0.0] * 71)

    found = compare(made("one", 0, many), make_dense(made, 0)).interventions
    assert found and all(one.every == one.far == Proportion.from_counts(29, 100) for one in found)


def test_far_needles_are_told_where_every_run_counted_them(made: Make) -> None:
    def counted(found: dict[str, Any]) -> None:
        for cell in found["retrieval"]:
            cell["right_at_depth"] = 5

    found = compare(made("one", 0, counted), made("one", 1), make_dense(made, 0)).needles
    assert [one.far for one in found if (one.model, one.task, one.length) == ("one", "multi_query", 4096)] == [None]


@pytest.mark.parametrize("state", ["HALTED", "PREEMPTED"])
def test_a_run_that_is_not_done_is_told_of(made: Make, state: str) -> None:
    runs = [made("one", 0), make_dense(made, 0)]
    status = json.loads((runs[0] / "status.json").read_text())
    (runs[0] / "status.json").write_text(json.dumps({**status, "status": state}))
    assert f"{runs[0].name} is {state}: what it cost is told of 200 of 200 steps" in compare(*runs).not_compared


def test_every_column_of_the_tables_is_its_own_number(made: Make) -> None:
    found = compare(*(made("one", seed) for seed in (0, 1)), *(make_dense(made, seed) for seed in (0, 1)))
    shown = parse_tables(format_markdown(found))
    place = next(text for text in found.texts if text.text == "long").places[2]
    row = next(row for row in shown["long: one less other, seeds 0, 1"] if row[0] == place.place)
    assert row[1:3] == [f"{place.bits:.4f}", f"{place.baseline_bits:.4f}"] and row[1] != row[2]
    assert place.over_windows and row[4] == "[{:+.4f}, {:+.4f}]".format(*place.over_windows)
    cost = found.costs[0]
    assert shown["Models"][2][5] == f"{cost.seconds_share:.3f}" != shown["Models"][2][7] == f"{cost.wall_share:.3f}"
    needles = next(one for one in found.needles if (one.model, one.task, one.length) == ("one", "needle", 4096))
    row = next(row for row in shown["Needles"] if row[:2] == ["needle", "4,096"])
    unlike = [replace(run, tokens_per_s=[speed]) for run, speed in zip(cost.runs, (1000.0, 3000.0), strict=True)]
    told = parse_tables(format_markdown(replace(found, costs=[replace(cost, runs=unlike)])))
    assert told["Models"][2][8] == "2,000"
    assert needles.every and row[2].endswith(f"[{100 * needles.every.low:.1f}, {100 * needles.every.high:.1f}] of 42")
