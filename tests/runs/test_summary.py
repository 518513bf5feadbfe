"""Formatted numbers and settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_run
import pytest

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.runs.history import History, collect_facts, compute_cumulative_step_time
from nsa_lab.runs.summary import format_duration, format_facts, format_guards, format_settings

YEARS = 1000 * 365 * 86_400
HALTS = "halts on a non-finite number"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, HALTS + "; disabled: train.spike_sigma, train.min_tokens_per_s, train.stall_action"),
        (
            {"spike_sigma": 8.0, "stall_action": "halt"},
            HALTS + ", a loss 8 standard deviations above its window, a stall; disabled: train.min_tokens_per_s",
        ),
        (
            {"spike_sigma": 12.0, "min_tokens_per_s": 20_000.0, "stall_action": "halt"},
            HALTS + ", a loss 12 standard deviations above its window, fewer than 20,000 tokens/s, a stall",
        ),
    ],
)
def test_guards_are_listed_as_enabled_or_disabled(settings: dict, text: str) -> None:
    assert format_guards(TrainConfig(**settings)) == text


def test_production_run_has_all_guards_enabled(tmp_path: Path) -> None:
    assert dict(format_facts(History.read(fake_run.write_run(tmp_path))))["guards"].startswith("halts on")
    production = RunConfig.from_yaml(Path(__file__).parents[2] / "params/production_50k.yaml")
    assert "disabled:" not in format_guards(production.train)


def test_lengths_have_thousands_separators(tmp_path: Path) -> None:
    run = History.read(fake_run.write_run(tmp_path, fake_run.make_config(train__seq_len=2048)))
    assert "× 2,048 tokens" in format_settings(run.config)
    assert "2,048 tokens per sequence" in dict(format_facts(run))["text"]


def test_validation_before_training_is_marked_untrained(tmp_path: Path) -> None:
    def large(events: list[dict]) -> list[dict]:
        return [event | ({"bpb": 58690.294} if event["kind"] == "step" else {}) for event in events if event["step"] <= 1]

    facts = dict(format_facts(History.read(fake_run.write_run(tmp_path / "started", spoil=large))))
    assert facts["validation, bits per byte"].endswith(", untrained")
    assert facts["training, bits per byte"] == "58,690.294"
    whole = dict(format_facts(History.read(fake_run.write_run(tmp_path / "whole"))))
    assert "→" in whole["validation, bits per byte"]


STAGES = [
    {"steps": 100, "seq_len": 1024, "batch_size": 4, "lr": 1e-3},
    {"steps": 100, "seq_len": 2048, "batch_size": 2, "lr": 1e-3},
]


def make_staged_history(folder: Path, spoil: Any) -> History:
    train = {"stages": STAGES, "log_every": 10, "eval_every": 50, "save_every": 100}
    config = RunConfig.from_dict({**fake_run.make_config().to_dict(), "train": train})
    return History.read(fake_run.write_run(folder, config, spoil))


def test_first_step_of_a_stage_is_excluded_from_step_time(tmp_path: Path) -> None:
    """It includes compilation or the capture of a CUDA graph."""

    def spoil(events: list[fake_run.Event]) -> None:
        at = next(i for i, event in enumerate(events) if event["kind"] == "step" and event["step"] == 110)
        fake_run.set_constant_times(events)
        events.insert(at, {**events[at], "step": 101, "dt_s": 60.0})

    steps, seconds = compute_cumulative_step_time(make_staged_history(tmp_path, spoil))
    assert 101 not in steps and seconds[-1] == pytest.approx(100.0)


def test_speed_of_a_run_is_that_of_its_last_stage(tmp_path: Path) -> None:
    def spoil(events: list[fake_run.Event]) -> None:
        for event in events:
            if event["kind"] == "step":
                event["tokens_per_s"] = 1000.0 if event["step"] <= 100 else 400.0

    assert collect_facts(make_staged_history(tmp_path, spoil)).tokens_per_s == 400.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.4, "12 s"),
        (185, "3 min 05 s"),
        (3720, "1 h 02 min"),
        (YEARS, f"{YEARS // 3600} h 00 min"),
        (1e300, "over 1,000 years"),
        (float("inf"), "over 1,000 years"),
    ],
)
def test_durations_of_any_size_are_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
