"""A run compared with its plan."""

import pytest
from fake_run import make_config, write_run
from looping import looped

from nsa_lab import figures
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_facts
from nsa_lab.train.estimate import estimate_resources
from nsa_lab.workbook.plan_vs_actual import compare_plan_with_run


def run_on_gpu(folder, memory, **changes):
    """Return a run that recorded a GPU and a peak memory of `memory` bytes."""

    def spoil(events):
        for event in events:
            event.update({"device": "NVIDIA X"} if event["kind"] == "start" else {})
            event.update({"mem_peak_bytes": memory} if event["kind"] == "step" else {})

    return History.read(write_run(folder, make_config(**changes), spoil))


@looped
@pytest.mark.parametrize("off, ok", [(-0.14, True), (0.14, True), (-0.16, False), (0.16, False)])
def test_memory_is_compared_with_the_plan(off, ok, tmp_path):
    planned = estimate_resources(make_config()).memory_bytes
    memory, _ = compare_plan_with_run(run_on_gpu(tmp_path, round((1 + off) * planned))).verdicts
    assert memory.ok is ok and memory.value == pytest.approx(off, abs=1e-6)


@looped
@pytest.mark.parametrize("off, ok", [(-0.24, True), (0.24, True), (-0.26, False), (0.26, False)])
def test_time_is_compared_with_the_plan(off, ok, tmp_path):
    history = History.read(write_run(tmp_path))
    known = collect_facts(history)
    memory, time = compare_plan_with_run(history, known.tokens * (1 + off) / known.wall_s).verdicts
    assert time.ok is ok and time.value == pytest.approx(off)
    assert memory.ok is None and "on a CPU" in memory.text


def test_memory_note_for_cpu_runs(tmp_path):
    """A process with Python and torch needs several times the memory of a small model's tensors."""
    cpu, gpu = History.read(write_run(tmp_path / "cpu")), run_on_gpu(tmp_path / "gpu", 2 * 10**9)
    (line,) = (line for line in compare_plan_with_run(cpu).lines if line.startswith("peak memory"))
    assert "tensors only" in line and "the whole process" in line
    assert not [line for line in compare_plan_with_run(gpu).lines if "whole process" in line]
    assert dict(format_facts(cpu))["peak memory counts"] == "the whole process, with Python and torch"
    assert dict(format_facts(gpu))["peak memory counts"] == "tensors on the GPU"


def test_unknown_throughput_or_unfinished_run_is_not_checked(tmp_path):
    history = History.read(write_run(tmp_path / "a"))
    assert "the plan has no throughput" in str(compare_plan_with_run(history))
    gate = History.read(write_run(tmp_path / "b", make_config(train__min_tokens_per_s=2000.0)))
    assert compare_plan_with_run(gate).verdicts[1].ok is not None
    half = History.read(
        write_run(
            tmp_path / "c", spoil=lambda events: [e for e in events if e["step"] <= 100], status={"status": "PREEMPTED"}
        )
    )
    assert "step 100 of 200: not finished" in str(compare_plan_with_run(half, 8192.0))
    empty = History.read(write_run(tmp_path / "d", spoil=lambda events: events[:1]))
    assert [verdict.ok for verdict in compare_plan_with_run(empty, 8192.0).verdicts[:1]] == [None]


def test_preflight_throughput_is_used(tmp_path):
    def spoil(events):
        next(event for event in events if event["kind"] == "preflight")["numbers"] = {"tokens_per_s": 4096.0}

    history = History.read(write_run(tmp_path, make_config(train__min_tokens_per_s=2000.0), spoil))
    assert compare_plan_with_run(history).plan.tokens_per_s == 4096.0
    assert compare_plan_with_run(history, 5000.0).plan.tokens_per_s == 5000.0


def test_validation_gap_plot(tmp_path):
    nsa = write_run(tmp_path / "nsa")
    dense = write_run(tmp_path / "dense", make_config(model__attention="dense", train__eval_every=100))
    figure = figures.plot_validation_gap(nsa, dense)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 100, 200]
