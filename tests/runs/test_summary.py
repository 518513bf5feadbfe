"""What a reader is told of a run, in words."""

from __future__ import annotations

from pathlib import Path

import fake_run
import pytest

from nsa_lab.config import RunConfig, TrainConfig
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import guards_of, settings_of, shown_facts

HALTS = "halts on a number that is not finite"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, HALTS + "; off: train.spike_sigma, train.min_tokens_per_s, train.stall_action"),
        (
            {"spike_sigma": 8.0, "stall_action": "halt"},
            HALTS + ", a loss 8 deviations over its window, a stall; off: train.min_tokens_per_s",
        ),
        (
            {"spike_sigma": 12.0, "min_tokens_per_s": 20_000.0, "stall_action": "halt"},
            HALTS + ", a loss 12 deviations over its window, fewer than 20,000 tokens/s, a stall",
        ),
    ],
)
def test_it_is_said_which_guards_were_on(settings: dict, told: str) -> None:
    assert guards_of(TrainConfig(**settings)) == told


def test_a_report_says_so_and_the_production_run_has_all_of_them_on(tmp_path: Path) -> None:
    assert dict(shown_facts(History.read(fake_run.write_run(tmp_path))))["guards"].startswith("halts on")
    production = RunConfig.from_yaml(Path(__file__).parents[2] / "params/production_50k.yaml")
    assert "off:" not in guards_of(production.train)


def test_numbers_of_four_digits_have_a_comma(tmp_path: Path) -> None:
    run = History.read(fake_run.write_run(tmp_path, fake_run.configuration(train__seq_len=2048)))
    assert "× 2,048 tokens" in settings_of(run.config)
    assert "2,048 tokens per sequence" in dict(shown_facts(run))["text"]


def test_a_loss_that_was_read_before_the_first_step_alone_has_not_come_from_anywhere(tmp_path: Path) -> None:
    def large(events: list[dict]) -> list[dict]:
        return [event | ({"bpb": 58690.294} if event["kind"] == "step" else {}) for event in events if event["step"] <= 1]

    told = dict(shown_facts(History.read(fake_run.write_run(tmp_path / "begun", spoil=large))))
    assert told["validation, bits per byte"].endswith(", untrained")
    assert told["training, bits per byte"] == "58,690.294"
    whole = dict(shown_facts(History.read(fake_run.write_run(tmp_path / "whole"))))
    assert "→" in whole["validation, bits per byte"]
