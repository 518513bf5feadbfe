"""A stopped run whose config.yaml was edited: health refuses the edits that resume refuses, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_run import make_config, write_checkpoint, write_run
from looping import looped

from nsa_lab.config import apply_overrides
from nsa_lab.config.run_config import RunConfig
from nsa_lab.health import LIMITS, Verdict
from nsa_lab.health.record_checks import check_one_run
from nsa_lab.runs import directory
from nsa_lab.runs.history import History, get_monitor_settings
from nsa_lab.runs.trajectory import get_trajectory_settings
from nsa_lab.train.checkpoint_state import ResumeRefused, check_same_trajectory

CONFIG = make_config()


def make_stopped_run(folder: Path, status: str = directory.PREEMPTED, has_state: bool = True) -> Path:
    def stop(events: list[Any]) -> list[Any]:
        events[0]["settings"] = get_monitor_settings(CONFIG)
        end = {"kind": "end", "attempt": 1, "step": 100, "status": status, "exit_code": 75, "reason": "stopped"}
        return [*(event for event in events if event["step"] <= 100), end]

    run_dir = write_run(folder, CONFIG, spoil=stop, status={"status": status, "reason": "stopped", "step": 100})
    checkpoint = write_checkpoint(run_dir, 100)
    if has_state:
        state = {"trajectory": get_trajectory_settings(CONFIG), "data_identity": "d" * 64}
        (checkpoint / "state.json").write_text(json.dumps(state))
    return run_dir


def edit_config(run_dir: Path, key: str, value: Any) -> Verdict:
    config = RunConfig.from_dict(apply_overrides(CONFIG.to_dict(), {key: value}))
    (run_dir / directory.CONFIG).write_text(config.to_yaml())
    return check_one_run(History.read(run_dir), LIMITS)


@looped
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("train.log_every", 5), ("train.eval_batches", 3), ("train.micro_batch_size", 1), ("train.keep_last", 9)),
        *(("runtime.backend", "reference"), ("runtime.device", "cuda"), ("data.timeout_s", 7.0), ("name", "another")),
        *(("train.steps", 400), ("train.lr", 2e-3), ("train.seed", 4), ("model.dim", 64), ("nsa.w", 256)),
        ("runtime.precision", "bf16"),
    ],
)
def test_health_judges_an_edit_as_resume_does(tmp_path: Path, key: str, value: Any) -> None:
    run_dir = make_stopped_run(tmp_path)
    assert check_one_run(History.read(run_dir), LIMITS).ok is not False
    verdict = edit_config(run_dir, key, value)
    state = json.loads((run_dir / "checkpoints/step-00000100/state.json").read_text())
    try:
        check_same_trajectory(state, RunConfig.from_yaml(run_dir / directory.CONFIG), state["data_identity"])
    except ResumeRefused:
        assert verdict.ok is False and f"{key}: " in verdict.text, verdict
        assert "nsa-lab resume refuses this: restore these settings, or create a new run" in verdict.text
    else:
        assert verdict.ok is not False, verdict
        # Monitor settings are recorded in the first event of an attempt.
        assert key == "train.log_every" or f"nsa-lab resume {run_dir.name} trains with them" in verdict.text


def test_an_edit_fails_if_the_run_cannot_resume(tmp_path: Path) -> None:
    """It is DONE, or no checkpoint has the settings."""
    for name, run in (("done", {"status": directory.DONE}), ("no state", {"has_state": False})):
        verdict = edit_config(make_stopped_run(tmp_path / name, **run), "train.eval_batches", 3)
        assert verdict.ok is False and "restore the file that was trained" in verdict.text, verdict


def test_an_edit_hides_no_other_problem(tmp_path: Path) -> None:
    run_dir = make_stopped_run(tmp_path)
    (run_dir / directory.ENVIRONMENT).write_text(json.dumps({"config_hash": "0" * 16}))
    verdict = edit_config(run_dir, "runtime.backend", "reference")
    assert verdict.ok is False and "environment.json belongs to configuration" in verdict.text
