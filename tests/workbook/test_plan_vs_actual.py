"""A run beside its plan, beside the reports that the project began from, and its decoding beside its model."""

import pytest
import torch
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save

from nsa_lab import figures
from nsa_lab.inference import NoCheckpoint
from nsa_lab.inference.cache import attention_cache
from nsa_lab.model import NSATransformer
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_facts
from nsa_lab.train.estimate import estimate_resources
from nsa_lab.workbook import earlier_reports, samples
from nsa_lab.workbook.plan_vs_actual import compare_plan_with_run

SMALL = {"train__seq_len": 64, "nsa__l": 8, "nsa__d": 4, "nsa__l_sel": 8, "nsa__n_sel": 4, "nsa__w": 8}


def run_on_gpu(folder, memory, **changes):
    """A run that says that it was on a GPU and held `memory` bytes."""

    def spoil(events):
        for event in events:
            event.update({"device": "NVIDIA X"} if event["kind"] == "start" else {})
            event.update({"mem_peak_bytes": memory} if event["kind"] == "step" else {})

    return History.read(write_run(folder, make_config(**changes), spoil))


@pytest.fixture
def with_checkpoint(tmp_path):
    """A run with weights that nobody trained."""
    run = write_run(tmp_path, make_config(**SMALL))
    model = NSATransformer(make_config(**SMALL).model, seed=3)
    write_checkpoint(run, 200, save({name: value.contiguous() for name, value in model.state_dict().items()}))
    return run


@pytest.mark.parametrize("off, ok", [(-0.14, True), (0.14, True), (-0.16, False), (0.16, False)])
def test_memory_is_held_against_the_plan(off, ok, tmp_path):
    planned = estimate_resources(make_config()).memory_bytes
    memory, _ = compare_plan_with_run(run_on_gpu(tmp_path, round((1 + off) * planned))).verdicts
    assert memory.ok is ok and memory.value == pytest.approx(off, abs=1e-6)


@pytest.mark.parametrize("off, ok", [(-0.24, True), (0.24, True), (-0.26, False), (0.26, False)])
def test_the_clock_is_held_against_the_plan(off, ok, tmp_path):
    history = History.read(write_run(tmp_path))
    known = collect_facts(history)
    memory, time = compare_plan_with_run(history, known.tokens * (1 + off) / known.wall_s).verdicts
    assert time.ok is ok and time.value == pytest.approx(off)
    assert memory.ok is None and "on a CPU" in memory.text


def test_a_reader_is_told_what_each_memory_counts(tmp_path):
    """A process with Python and torch in it is several times the tensors of a small model."""
    cpu, gpu = History.read(write_run(tmp_path / "cpu")), run_on_gpu(tmp_path / "gpu", 2 * 10**9)
    assert "of tensors (state" in str(estimate_resources(make_config())) and "on a CPU Python and torch" in str(
        estimate_resources(make_config())
    )
    (line,) = (line for line in compare_plan_with_run(cpu).lines if line.startswith("memory at the peak"))
    assert "tensors alone" in line and "the whole process" in line
    assert not [line for line in compare_plan_with_run(gpu).lines if "whole process" in line]
    assert dict(format_facts(cpu))["peak memory counts"] == "the whole process, with Python and torch"
    assert dict(format_facts(gpu))["peak memory counts"] == "tensors on the GPU"


def test_a_plan_without_a_speed_or_a_run_without_an_end_is_not_judged(tmp_path):
    history = History.read(write_run(tmp_path / "a"))
    assert "the plan named no speed" in str(compare_plan_with_run(history))
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


def test_the_speed_that_preflight_measured_is_reckoned_with(tmp_path):
    def spoil(events):
        events[2]["numbers"] = {"tokens_per_s": 4096.0}

    history = History.read(write_run(tmp_path, make_config(train__min_tokens_per_s=2000.0), spoil))
    assert compare_plan_with_run(history).plan.tokens_per_s == 4096.0
    assert compare_plan_with_run(history, 5000.0).plan.tokens_per_s == 5000.0


def rows(text):
    return {
        tuple(map(str.strip, line.strip("|").split("|")))[:3]: line.strip("| ").split(" | ")[-1]
        for line in text.splitlines()
        if line.startswith("|")
    }


def test_ours_is_read_from_the_record(tmp_path):
    config = make_config(train__steps=2000, train__eval_every=500, train__save_every=1000)
    history = History.read(write_run(tmp_path / "nsa", config))
    dense = History.read(write_run(tmp_path / "dense", make_config(model__attention="dense")))
    found = rows(earlier_reports.table(history, dense))
    assert found["tokens per second", "9,200–9,400, peak 9,546", "S4"] == "8,195 median, 8,198 peak, on cpu"
    assert found["steps finished", "“successful 50k training run”", "S4"].startswith("2,000 of 2,000 optimiser steps, DONE")
    assert found["gate entropy", "1.098 (“healthy, no collapse”)", "S4"].startswith("0.900 to 0.900 by layer at step 2,000")
    assert found["loss at step 1,740", "5.73 → 2.64 nats = 8.27 → 3.81 bits per byte", "S4"].endswith("at step 1,740")
    assert found["the same after as many tokens", "7.12 M tokens", "S4"].endswith("at step 1,730")
    assert found["parameters", "“125m” in the configuration's name", "S4"] == "123,456"
    assert found["first NaN", "at step 1", "S2"] == "never, in 2,000 steps"
    assert found["against dense", "“3–4× speedup”", "S4"].startswith("1.00 of the dense twin's")
    assert found["GPU utilisation", "68–73 %", "S4"] == found["selected keys", "721 mean, 1024 max", "S4"] == "not recorded"


def test_of_a_step_that_a_run_did_not_get_to_nothing_is_told(tmp_path):
    found = rows(earlier_reports.table(History.read(write_run(tmp_path))))
    told = [found[key] for key in found if key[0] in ("loss at step 1,740", "learning rate at step 1,740")]
    assert told == ["not recorded"] * 2


def test_the_time_between_two_attempts_is_no_silence(tmp_path):
    def resumed(events):
        for index, event in enumerate(events):
            later = index >= len(events) // 2
            event.update(attempt=1 + later, t=1000.0 + 2 * index + 5000 * later)

    found = rows(earlier_reports.table(History.read(write_run(tmp_path, spoil=resumed))))
    assert found["hang", "“hung at step 5”", "S3"] == "no stalls; the record was silent for 2.0 s at most"


def test_a_run_that_recorded_nothing_says_so_in_every_row(tmp_path):
    history = History.read(write_run(tmp_path, spoil=lambda events: events[-1:]))
    ours = list(rows(earlier_reports.table(history)).values())[2:]
    assert len(ours) == len(earlier_reports.NUMBERS) and ours.count("not recorded") >= len(ours) - 2


def test_a_bad_number_and_a_stall_show(tmp_path):
    def spoil(events):
        next(e for e in events if e["kind"] == "step" and e["step"] == 50)["nonfinite"] = ["loss"]
        events.insert(-1, {"kind": "stall", "attempt": 1, "step": 60, "phase": "data", "phase_age_s": 130.0})

    found = rows(earlier_reports.table(History.read(write_run(tmp_path, spoil=spoil))))
    assert found["first NaN", "at step 1", "S2"] == "step 50: loss"
    assert found["hang", "“hung at step 5”", "S3"].startswith("1 stall;")


def test_decoding_is_the_model(with_checkpoint):
    verdict = samples.check_decoding(with_checkpoint)
    assert verdict.ok is True and verdict.value < 1e-12 and "32 tokens at once, 32 one by one" in verdict.text


def test_decoding_that_is_not_the_model_is_found(with_checkpoint, monkeypatch):
    right = attention_cache.cached_attention

    def a_token_late(q, gates, layer, lengths, nsa, **index):
        return right(q, gates, layer, lengths - 1, nsa, **index)

    monkeypatch.setattr(attention_cache, "cached_attention", a_token_late)
    assert samples.check_decoding(with_checkpoint).ok is False


def test_without_a_checkpoint_decoding_is_not_judged(tmp_path):
    run = write_run(tmp_path)
    assert samples.check_decoding(run).ok is None
    with pytest.raises(NoCheckpoint):
        samples.count_selected_keys(run)


def test_selected_keys_are_counted(with_checkpoint):
    nsa, blocks = make_config(**SMALL).nsa, samples.observe_blocks(with_checkpoint)
    counted = [
        sum(len([s for s in range(b * nsa.l_sel, (b + 1) * nsa.l_sel) if s <= t]) for b in row if b >= 0)
        for layer in blocks
        for t in range(64)
        for row in layer[0, t].tolist()
    ]
    mean, most = samples.count_selected_keys(with_checkpoint)
    assert mean == pytest.approx(sum(counted) / len(counted)) and most == max(counted) == 32
    assert torch.stack(blocks).dtype == torch.int32


def test_the_gap_to_the_twin_is_drawn_where_both_were_evaluated(tmp_path):
    nsa = write_run(tmp_path / "nsa")
    dense = write_run(tmp_path / "dense", make_config(model__attention="dense", train__eval_every=100))
    figure = figures.plot_validation_gap(nsa, dense)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 100, 200]
