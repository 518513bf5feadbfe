"""Runs that resume: equal to uninterrupted runs, or refused with the setting that differs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_checks import Make, Train, final_weights, kinds, rewind, same
from safetensors.torch import load_file, save_file

from nsa_lab.config import RunConfig
from nsa_lab.data import DataError
from nsa_lab.health import examine
from nsa_lab.runs import directory, events, lifecycle
from nsa_lab.runs.checkpoint_files import MANIFEST, format_manifest, read_manifest_entry
from nsa_lab.runs.history import History
from nsa_lab.train import trainer
from nsa_lab.train.signals import StopRequested


def edit(run_dir: Path, section: str, **changes: Any) -> None:
    sections = yaml.safe_load((run_dir / "config.yaml").read_text())
    sections[section] |= changes
    (run_dir / "config.yaml").write_text(yaml.safe_dump(sections))


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    expected, losses = final_weights(run_dir), [e["loss"] for e in events.get_step_events(events.read_events(run_dir))]
    rewind(run_dir, 5)
    assert train(run_dir) == 0
    (resume,) = kinds(run_dir, "resume")
    assert resume["from_step"] == 5 and resume["attempt"] == 2 and resume["probe_difference"] == 0.0
    assert same(final_weights(run_dir), expected)
    assert [e["loss"] for e in events.get_step_events(events.read_events(run_dir))] == losses


@pytest.mark.slow
def test_a_run_with_muon_resumes_only_with_muon(new_run: Make, train: Train) -> None:
    run_dir = new_run(optimizer="muon")
    assert train(run_dir) == 0
    last = run_dir / "checkpoints/step-00000012/optimizer.pt"
    expected, moments = final_weights(run_dir), torch.load(last, weights_only=True)["moments"]
    rewind(run_dir, 5)
    edit(run_dir, "train", optimizer="adamw")
    assert train(run_dir) == directory.EXIT_USAGE
    assert "train.optimizer: 'muon' in the checkpoint, 'adamw' now" in directory.read_status(run_dir)["reason"]
    edit(run_dir, "train", optimizer="muon")
    assert train(run_dir) == 0
    assert same(final_weights(run_dir), expected)
    again = torch.load(last, weights_only=True)["moments"]
    assert again.keys() == moments.keys() and all(same(again[name], moments[name]) for name in moments)
    assert moments["blocks.0.mlp.up.weight"].keys() == {"momentum_buffer"}
    assert moments["head.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.slow
def test_a_run_without_an_optimizer_setting_resumes_only_with_adamw(finished_run: Path, train: Train) -> None:
    rewind(finished_run, 5)
    edit(finished_run, "train", optimizer="muon")
    assert train(finished_run) == directory.EXIT_USAGE
    assert "train.optimizer: 'adamw' in the checkpoint, 'muon' now" in directory.read_status(finished_run)["reason"]
    edit(finished_run, "train", optimizer="adamw")
    assert train(finished_run) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"lr": 1e-3}),
        ("train", {"steps": 20}),
        ("train", {"seed": 1}),
        ("nsa", {"w": 8}),
        ("model", {"mlp": "gated"}),
        ("data", {"val_fraction": 0.4}),
        ("runtime", {"precision": "bf16"}),
    ],
)
def test_resuming_on_another_trajectory_is_refused_with_the_setting(
    finished_run: Path, train: Train, section: str, change: dict
) -> None:
    run_dir = finished_run
    rewind(run_dir, 5)
    edit(run_dir, section, **change)
    assert train(run_dir) == directory.EXIT_USAGE
    (key,) = change
    assert key in directory.read_status(run_dir)["reason"] or section == "model"
    assert kinds(run_dir, "error")[0]["type"] in ("ResumeRefused", "DataError")


def test_weights_of_other_code_are_refused_with_a_message(finished_run: Path, train: Train) -> None:
    """For example, weights saved before the model had convolutions."""
    rewind(finished_run, 5)
    checkpoint = finished_run / "checkpoints/step-00000005"
    save_file({k: v for k, v in load_file(checkpoint / "model.safetensors").items() if "gate" not in k}, checkpoint / "new")
    (checkpoint / "new").rename(checkpoint / "model.safetensors")
    files = {path.name: read_manifest_entry(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    (checkpoint / MANIFEST).write_text(format_manifest(5, files))
    assert train(finished_run) == directory.EXIT_USAGE
    reason = directory.read_status(finished_run)["reason"]
    assert "blocks.0.attention.gate.weight, blocks.1.attention.gate.weight" in reason


@pytest.mark.slow
def test_a_run_resumed_with_other_intervals_is_checked_per_attempt(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    began = RunConfig.from_yaml(run_dir / "config.yaml")
    rewind(run_dir, 5)
    edit(run_dir, "train", log_every=5, stats_every=6, eval_every=5, save_every=7)
    assert train(run_dir) == 0
    history = History.read(run_dir)
    assert history.config_of_attempt(1) == began and history.config_of_attempt(2) == history.config != began
    assert [(stretch.first, stretch.last) for stretch in history.step_ranges()] == [(1, 5), (6, 12)]
    found = {verdict.name: verdict for verdict in examine(history).verdicts}
    assert all(
        found[name].ok for name in ("evaluations", "statistics", "every step once", "checkpoints", "record unchanged")
    ), found


@pytest.mark.slow
@pytest.mark.parametrize("cut_off", ["evaluate_held_out", "measure_run_selection_benefit"])
def test_an_interrupted_evaluation_is_done_after_the_resume(
    new_run: Make, train: Train, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    run_dir, reference_run = new_run(), new_run()
    assert train(reference_run) == 0
    real, asked = getattr(trainer, cut_off), []

    def stopped(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise StopRequested("SIGTERM")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, cut_off, stopped)
        assert train(run_dir) == directory.EXIT_STOPPED
    assert [event["step"] for event in kinds(run_dir, "eval")] == [0]
    assert train(run_dir) == 0
    assert [event["step"] for event in kinds(run_dir, "reach")] == [0, 6, 12]
    recorded, expected = ([(e["step"], e["loss"]) for e in kinds(run, "eval")] for run in (run_dir, reference_run))
    assert recorded == expected and [step for step, _ in recorded] == [0, 6, 12]
    assert train(run_dir) == 0 and len(kinds(run_dir, "eval")) == 3, "what is there is not done again"


@pytest.mark.slow
def test_monitoring_settings_may_change_on_resume(finished_run: Path, train: Train) -> None:
    run_dir = finished_run
    expected = final_weights(run_dir)
    rewind(run_dir, 5)
    edit(run_dir, "train", log_every=3, save_every=4, spike_sigma=50.0, eval_every=0)
    assert train(run_dir) == 0
    assert same(final_weights(run_dir), expected)


@pytest.mark.slow
def test_code_that_computes_other_logits_is_refused_and_the_checkpoint_stays(
    finished_run: Path, train: Train, make_hooked_builders: Callable
) -> None:
    run_dir = finished_run
    rewind(run_dir, 5)
    other = make_hooked_builders(
        lambda model: model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.001)
    )
    assert train(run_dir, builders=other) == directory.EXIT_USAGE
    assert "probe" in directory.read_status(run_dir)["reason"]
    assert (run_dir / "checkpoints/step-00000005").is_dir() and train(run_dir) == 0


@pytest.mark.slow
def test_a_run_resumes_without_its_source_if_the_cache_is_complete(new_run: Make, train: Train, tmp_path: Path) -> None:
    text_file = tmp_path / "texts"
    text_file.mkdir()
    for number in range(40):
        (text_file / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall. " * 20)
    source = {"source": "local", "path": str(text_file), "max_tokens": None}
    run_dir = new_run(data=source)
    assert train(run_dir) == 0
    expected = final_weights(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-00000012")
    for leftover in (".status.json.4711-1", ".status.json.12-140"):
        (run_dir / leftover).write_text("{")
    text_file.rename(tmp_path / "away")
    assert train(run_dir) == 0
    assert same(final_weights(run_dir), expected)
    assert "nothing at" in kinds(run_dir, "resume")[0]["source_missing"]
    assert not list(run_dir.glob(".status*")), "what a kill left of a status is swept"
    fresh = RunConfig.from_yaml(run_dir / "config.yaml")
    with pytest.raises(DataError):
        lifecycle.create_run(fresh, tmp_path)
