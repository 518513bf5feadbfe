"""What a sweep says: means over seeds with their intervals, differences seed by seed, and nothing of different texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import Event, write_run
from matplotlib.figure import Figure

from nsa_lab.figures.loss import plot_sweep
from nsa_lab.health.sweep_results import SeedMean, VariantResult, collect_results
from nsa_lab.report import write_sweep_plot
from nsa_lab.runs.history import History, compute_cumulative_step_time
from nsa_lab.runs.sweep_runner import Sweep

FAKE = """
model: {dim: 32, n_layers: 3, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16}
train: {steps: 200, seq_len: 2048, batch_size: 2, lr: 1.0e-3, warmup_steps: 20, log_every: 10, eval_every: 50}
"""
Found = Callable[..., tuple[VariantResult, VariantResult]]
# By hand, of the values in `test_the_interval_is_that_of_a_hand`: .0026 and .0014 / 3 are sums of squares about the means.
HALF_BASELINE = 4.303 * math.sqrt(0.0026 / 2 / 3)
HALF_DIFFERENCE = 4.303 * math.sqrt(0.0014 / 3 / 2 / 3)


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """found(baseline, other, repeats=1, spoil=None): the results of runs that ended at these bits per byte.

    The values are those of seeds 0, 1, ...; with repeats a list for each seed. None: the run is not there. `spoil` takes
    the events of the second variant's runs.
    """

    def make(*values: list[object], repeats: int = 1, spoil: Callable[[list[Event]], None] | None = None):
        (tmp_path / "fake.yaml").write_text(FAKE)
        seeds = list(range(max(map(len, values))))
        text = f"preset: {tmp_path / 'fake.yaml'}\nrepeats: {repeats}\nseeds: {seeds}\nvariants: {{a: , b: train.lr=2e-3}}"
        (tmp_path / "s.yaml").write_text(text)
        sweep = Sweep.load(str(tmp_path / "s.yaml"), tmp_path / "outputs")
        of = {"a": values[0], "b": values[1]}
        for run in sweep.runs:
            told = of[run.variant][run.seed] if run.seed < len(of[run.variant]) else None
            bpb = told[run.repeat - 1] if isinstance(told, list) else told
            if bpb is not None:
                write_run(
                    sweep.outputs, run.config, _end_at(bpb, spoil if run.variant == "b" else None), name=run.config.name
                )
        return tuple(collect_results(sweep))

    return make


def _end_at(bpb: float, spoil: Callable[[list[Event]], None] | None) -> Callable[[list[Event]], None]:
    def change(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event |= {"text": "one text", "bpb": bpb + (200 - event["step"]) / 100}
        if spoil:
            spoil(events)

    return change


def test_the_interval_is_that_of_a_hand(found: Found) -> None:
    baseline, other = found([2.00, 2.02, 2.07], [1.97, 1.98, 2.06])
    assert baseline.bpb == SeedMean(pytest.approx(2.03), pytest.approx(HALF_BASELINE, rel=1e-12), 3)
    assert other.less_baseline == SeedMean(pytest.approx(-0.08 / 3), pytest.approx(HALF_DIFFERENCE, rel=1e-12), 3)
    assert abs(HALF_BASELINE - 0.089574) < 1e-6 and abs(HALF_DIFFERENCE - 0.037949) < 1e-6
    assert baseline.less_baseline is None and baseline.apart is None and not baseline.notes
    assert other.notes == ["no difference to the baseline can be told"]
    assert (baseline.n_done, len(baseline.runs), baseline.parameters, baseline.tokens) == (3, 3, 123_456, 200 * 2 * 2048)


def test_a_difference_beyond_its_interval_is_one(found: Found) -> None:
    """Seeds scatter by more than the difference, and every seed says the same of it."""
    baseline, other = found([2.0, 2.2, 2.4], [1.9, 2.1, 2.31])
    assert baseline.bpb.half > abs(other.less_baseline.mean) > other.less_baseline.half and not other.notes


def test_runs_of_one_seed_are_one_seed(found: Found) -> None:
    """Twice as many runs of the same seeds say nothing new of other seeds."""
    baseline, other = found([[2.00, 2.04], [2.03, 2.03]], [[1.9, 2.1], [2.0, 2.0]], repeats=2)
    assert baseline.bpb == SeedMean(pytest.approx(2.025), pytest.approx(12.706 * 0.005), 2)
    assert baseline.apart == pytest.approx(math.sqrt(0.0008 / 2))
    assert other.less_baseline == SeedMean(pytest.approx(-0.025), pytest.approx(12.706 * 0.005), 2)
    assert baseline.curve.low[-1] == 2.00 and baseline.curve.high[-1] == 2.04 and baseline.curve.seeds == 2


def test_a_single_seed_has_no_interval_and_says_so(found: Found) -> None:
    baseline, other = found([2.0, 2.1, 2.2], [None, 1.9])
    assert other.bpb == SeedMean(1.9, None, 1) and other.notes == ["a single seed has no interval"]
    assert other.less_baseline == SeedMean(pytest.approx(-0.2), None, 1), "with the baseline of that seed"
    assert (other.n_done, len(other.runs), baseline.bpb.seeds) == (1, 3, 3)


def test_what_is_not_there_yet_has_no_numbers(found: Found, tmp_path: Path) -> None:
    assert write_sweep_plot(found([None], [None]), "rates", tmp_path / "none.png") is None
    baseline, other = found([None, None], [None, 2.0])
    assert baseline.bpb is None and baseline.curve is None and baseline.seconds is None and not baseline.notes
    assert other.bpb is not None and other.less_baseline is None and other.curve is not None


def test_different_texts_are_not_compared(found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_text(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another text"

    baseline, other = found([2.0, 2.1], [1.9, 2.0], spoil=other_text)
    assert other.less_baseline is None and other.curve is None and other.bpb is not None and baseline.curve is not None
    assert other.notes == ["evaluated on another text than the baseline, or at another length: not compared"]
    drawn: list[str] = []
    monkeypatch.setattr("nsa_lab.report.plot_sweep", lambda curves, title: drawn.append(title) or Figure())
    assert write_sweep_plot([baseline, other], "rates", tmp_path / "rates.png") == tmp_path / "rates.png"
    assert drawn == ["rates: validation (evaluated on another text, and not here: b)"]


def test_runs_of_a_variant_on_different_texts_have_no_mean(found: Found) -> None:
    texts = iter(("one text", "another text"))

    def each_its_own(events: list[Event]) -> None:
        text = next(texts)
        for event in events:
            if event["kind"] == "eval":
                event["text"] = text

    _, other = found([2.0, 2.1], [1.9, 2.0], spoil=each_its_own)
    assert other.bpb is None and other.less_baseline is None and "different texts, which have no mean" in other.notes[0]


def test_a_run_that_was_not_evaluated_at_its_end_is_left_out(found: Found) -> None:
    def without_last(events: list[Event]) -> None:
        events[:] = [event for event in events if event["kind"] != "eval" or event["step"] < 200]

    _, other = found([2.0, 2.1], [1.9, 2.0], spoil=without_last)
    assert other.bpb is None and other.n_done == 2 and other.notes[0].startswith("not evaluated at their end")


def test_the_curve_is_over_tokens_and_over_seconds_of_steps(found: Found) -> None:
    baseline, other = found([2.0, 2.2], [1.9, 2.0])
    assert baseline.curve.tokens == [step * 2 * 2048 for step in (50, 100, 150, 200)]
    assert baseline.curve.seconds == [25.0, 50.0, 75.0, 100.0] and baseline.seconds == 100.0
    assert baseline.curve.mean == pytest.approx([3.6, 3.1, 2.6, 2.1]) and baseline.curve.low[-1] == 2.0
    figure = plot_sweep([baseline.curve, other.curve], title="rates")
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens", "seconds of optimiser steps"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a (2 seeds)", "b (2 seeds)"]
    assert list(figure.axes[1].lines[0].get_xdata()) == baseline.curve.seconds


def test_seconds_leave_out_what_compiles_and_count_a_step_that_was_done_again_once(tmp_path: Path) -> None:
    def resumed(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "step" and event["step"] == 1:
                event["dt_s"] = 60.0
        again = next(index for index, event in enumerate(events) if event["kind"] == "step" and event["step"] == 110)
        later = [{**event, "attempt": 2} for event in events[again:]]
        later[0]["dt_s"] = 30.0
        begin = {**events[0], "kind": "resume", "attempt": 2, "step": 100, "from_step": 100}
        lost = [event for event in events[again:] if event["step"] <= 120]
        events[again:] = [*lost, begin, *later]

    steps, seconds = compute_cumulative_step_time(History.read(write_run(tmp_path, spoil=resumed)))
    assert dict(zip(steps.tolist(), seconds.tolist(), strict=True))[100] == 50.0
    assert 110 not in steps and seconds[-1] == 100.0 and steps[-1] == 200


def test_every_variant_is_compared_with_the_first(tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").write_text(FAKE)
    variants = "{a: , b: train.lr=2e-3, c: train.lr=3e-3}"
    (tmp_path / "s.yaml").write_text(f"preset: {tmp_path / 'fake.yaml'}\nseeds: [0, 1]\nvariants: {variants}")
    sweep = Sweep.load(str(tmp_path / "s.yaml"), tmp_path / "outputs")
    for run in sweep.runs:
        bpb = {"a": 2.0, "b": 1.5, "c": 1.9}[run.variant] + run.seed / 10
        write_run(sweep.outputs, run.config, _end_at(bpb, None), name=run.config.name)
    assert [less and less.mean for less in (one.less_baseline for one in collect_results(sweep))] == [
        None,
        pytest.approx(-0.5),
        pytest.approx(-0.1),
    ]


def test_a_curve_is_a_mean_over_seeds_of_the_text_that_was_read_last(found: Found) -> None:
    """Two runs of one seed weigh as much as the single one of the other; what was of another text is left out."""

    def another_at_first(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval" and event["step"] == 50:
                event["text"] = "another text"

    _, other = found([[2.0, 2.0], [2.0, 2.0]], [[1.0, 1.2], [2.0, None]], repeats=2, spoil=another_at_first)
    assert other.curve is not None and other.curve.mean == pytest.approx([2.55, 2.05, 1.55])
    assert other.curve.tokens == [step * 2 * 2048 for step in (100, 150, 200)]
