"""Results of a sweep: means over seeds with intervals, differences paired by seed, no comparison of different texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import Event, set_constant_times, write_run
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
GetResults = Callable[..., tuple[VariantResult, VariantResult]]
# Computed by hand for `test_interval_matches_hand_calculation`: 0.0026 and 0.0014 / 3 are sums of squares about the means.
HALF_BASELINE = 4.303 * math.sqrt(0.0026 / 2 / 3)
HALF_DIFFERENCE = 4.303 * math.sqrt(0.0014 / 3 / 2 / 3)


@pytest.fixture
def get_results(tmp_path: Path) -> GetResults:
    """get_results(baseline, other, repeats=1, spoil=None): results of runs with these final bits per byte.

    The values belong to seeds 0, 1, ...; with repeats there is a list per seed. None: the run does not exist. `spoil`
    changes the events of the second variant's runs.
    """

    def make(*values: list[object], repeats: int = 1, spoil: Callable[[list[Event]], None] | None = None):
        (tmp_path / "fake.yaml").write_text(FAKE)
        seeds = list(range(max(map(len, values))))
        text = f"preset: {tmp_path / 'fake.yaml'}\nrepeats: {repeats}\nseeds: {seeds}\nvariants: {{a: , b: train.lr=2e-3}}"
        (tmp_path / "s.yaml").write_text(text)
        sweep = Sweep.load(str(tmp_path / "s.yaml"), tmp_path / "outputs")
        bpb_of = {"a": values[0], "b": values[1]}
        for run in sweep.runs:
            value = bpb_of[run.variant][run.seed] if run.seed < len(bpb_of[run.variant]) else None
            bpb = value[run.repeat - 1] if isinstance(value, list) else value
            if bpb is not None:
                write_run(
                    sweep.outputs, run.config, _end_at(bpb, spoil if run.variant == "b" else None), name=run.config.name
                )
        return tuple(collect_results(sweep))

    return make


def _end_at(bpb: float, spoil: Callable[[list[Event]], None] | None) -> Callable[[list[Event]], None]:
    def change(events: list[Event]) -> None:
        set_constant_times(events)
        for event in events:
            if event["kind"] == "eval":
                event |= {"text": "one text", "bpb": bpb + (200 - event["step"]) / 100}
        if spoil:
            spoil(events)

    return change


def test_interval_matches_hand_calculation(get_results: GetResults) -> None:
    baseline, other = get_results([2.00, 2.02, 2.07], [1.97, 1.98, 2.06])
    assert baseline.bpb == SeedMean(pytest.approx(2.03), pytest.approx(HALF_BASELINE, rel=1e-12), 3)
    assert other.less_baseline == SeedMean(pytest.approx(-0.08 / 3), pytest.approx(HALF_DIFFERENCE, rel=1e-12), 3)
    assert abs(HALF_BASELINE - 0.089574) < 1e-6 and abs(HALF_DIFFERENCE - 0.037949) < 1e-6
    assert baseline.less_baseline is None and baseline.repeat_std is None and not baseline.notes
    assert other.notes == ["difference to the baseline not significant"]
    assert (baseline.n_done, len(baseline.runs), baseline.parameters, baseline.tokens) == (3, 3, 123_456, 200 * 2 * 2048)


def test_significant_difference_has_no_note(get_results: GetResults) -> None:
    """Seeds scatter more than the difference, but the difference is similar for every seed."""
    baseline, other = get_results([2.0, 2.2, 2.4], [1.9, 2.1, 2.31])
    assert baseline.bpb.half > abs(other.less_baseline.mean) > other.less_baseline.half and not other.notes


def test_repeated_runs_of_a_seed_are_averaged(get_results: GetResults) -> None:
    """Repeated runs of the same seeds do not narrow the interval over seeds."""
    baseline, other = get_results([[2.00, 2.04], [2.03, 2.03]], [[1.9, 2.1], [2.0, 2.0]], repeats=2)
    assert baseline.bpb == SeedMean(pytest.approx(2.025), pytest.approx(12.706 * 0.005), 2)
    assert baseline.repeat_std == pytest.approx(math.sqrt(0.0008 / 2))
    assert other.less_baseline == SeedMean(pytest.approx(-0.025), pytest.approx(12.706 * 0.005), 2)
    assert baseline.curve.low[-1] == 2.00 and baseline.curve.high[-1] == 2.04 and baseline.curve.seeds == 2


def test_single_seed_has_no_interval(get_results: GetResults) -> None:
    baseline, other = get_results([2.0, 2.1, 2.2], [None, 1.9])
    assert other.bpb == SeedMean(1.9, None, 1) and other.notes == ["single seed: no interval"]
    assert other.less_baseline == SeedMean(pytest.approx(-0.2), None, 1), "paired with the baseline of that seed"
    assert (other.n_done, len(other.runs), baseline.bpb.seeds) == (1, 3, 3)


def test_missing_runs_have_no_numbers(get_results: GetResults, tmp_path: Path) -> None:
    assert write_sweep_plot(get_results([None], [None]), "rates", tmp_path / "none.png") is None
    baseline, other = get_results([None, None], [None, 2.0])
    assert baseline.bpb is None and baseline.curve is None and baseline.seconds is None and not baseline.notes
    assert other.bpb is not None and other.less_baseline is None and other.curve is not None


def test_other_texts_are_not_compared(get_results: GetResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_text(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval":
                event["text"] = "another text"

    baseline, other = get_results([2.0, 2.1], [1.9, 2.0], spoil=other_text)
    assert other.less_baseline is None and other.curve is None and other.bpb is not None and baseline.curve is not None
    assert other.notes == ["evaluated on another text or at another length than the baseline: not compared"]
    titles: list[str] = []
    monkeypatch.setattr("nsa_lab.report.plot_sweep", lambda curves, title: titles.append(title) or Figure())
    assert write_sweep_plot([baseline, other], "rates", tmp_path / "rates.png") == tmp_path / "rates.png"
    assert titles == ["rates: validation (not shown, because evaluated on other text: b)"]


def test_variant_on_different_texts_has_no_mean(get_results: GetResults) -> None:
    texts = iter(("one text", "another text"))

    def use_different_texts(events: list[Event]) -> None:
        text = next(texts)
        for event in events:
            if event["kind"] == "eval":
                event["text"] = text

    _, other = get_results([2.0, 2.1], [1.9, 2.0], spoil=use_different_texts)
    assert other.bpb is None and other.less_baseline is None and "different texts: no mean" in other.notes[0]


def test_run_without_final_evaluation_is_omitted(get_results: GetResults) -> None:
    def without_last(events: list[Event]) -> None:
        events[:] = [event for event in events if event["kind"] != "eval" or event["step"] < 200]

    _, other = get_results([2.0, 2.1], [1.9, 2.0], spoil=without_last)
    assert other.bpb is None and other.n_done == 2 and other.notes[0].startswith("not evaluated at the end")


def test_curve_over_tokens_and_step_time(get_results: GetResults) -> None:
    baseline, other = get_results([2.0, 2.2], [1.9, 2.0])
    assert baseline.curve.tokens == [step * 2 * 2048 for step in (50, 100, 150, 200)]
    assert baseline.curve.seconds == pytest.approx([25.0, 50.0, 75.0, 100.0]) and baseline.seconds == pytest.approx(100.0)
    assert baseline.curve.mean == pytest.approx([3.6, 3.1, 2.6, 2.1]) and baseline.curve.low[-1] == 2.0
    figure = plot_sweep([baseline.curve, other.curve], title="rates")
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens", "step time, seconds"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a (2 seeds)", "b (2 seeds)"]
    assert list(figure.axes[1].lines[0].get_xdata()) == baseline.curve.seconds


def test_step_time_excludes_compilation_and_repeated_steps(tmp_path: Path) -> None:
    def resume(events: list[Event]) -> None:
        set_constant_times(events)
        for event in events:
            if event["kind"] == "step" and event["step"] == 1:
                event["dt_s"] = 60.0
        first = next(index for index, event in enumerate(events) if event["kind"] == "step" and event["step"] == 110)
        later = [{**event, "attempt": 2} for event in events[first:]]
        later[0]["dt_s"] = 30.0
        start = {**events[0], "kind": "resume", "attempt": 2, "step": 100, "from_step": 100}
        lost = [event for event in events[first:] if event["step"] <= 120]
        events[first:] = [*lost, start, *later]

    steps, seconds = compute_cumulative_step_time(History.read(write_run(tmp_path, spoil=resume)))
    assert dict(zip(steps.tolist(), seconds.tolist(), strict=True))[100] == pytest.approx(50.0)
    assert 110 not in steps and seconds[-1] == pytest.approx(100.0) and steps[-1] == 200


def test_all_variants_are_compared_with_the_first(tmp_path: Path) -> None:
    (tmp_path / "fake.yaml").write_text(FAKE)
    variants = "{a: , b: train.lr=2e-3, c: train.lr=3e-3}"
    (tmp_path / "s.yaml").write_text(f"preset: {tmp_path / 'fake.yaml'}\nseeds: [0, 1]\nvariants: {variants}")
    sweep = Sweep.load(str(tmp_path / "s.yaml"), tmp_path / "outputs")
    for run in sweep.runs:
        bpb = {"a": 2.0, "b": 1.5, "c": 1.9}[run.variant] + run.seed / 10
        write_run(sweep.outputs, run.config, _end_at(bpb, None), name=run.config.name)
    assert [result.less_baseline and result.less_baseline.mean for result in collect_results(sweep)] == [
        None,
        pytest.approx(-0.5),
        pytest.approx(-0.1),
    ]


def test_curve_is_a_mean_over_seeds_on_the_last_text(get_results: GetResults) -> None:
    """Two runs of one seed weigh as much as one run of another seed. Evaluations on another text are omitted."""

    def use_another_text_first(events: list[Event]) -> None:
        for event in events:
            if event["kind"] == "eval" and event["step"] == 50:
                event["text"] = "another text"

    _, other = get_results([[2.0, 2.0], [2.0, 2.0]], [[1.0, 1.2], [2.0, None]], repeats=2, spoil=use_another_text_first)
    assert other.curve is not None and other.curve.mean == pytest.approx([2.55, 2.05, 1.55])
    assert other.curve.tokens == [step * 2 * 2048 for step in (100, 150, 200)]
