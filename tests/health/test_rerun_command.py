"""The rerun command, when executed, gives exactly the intended configuration."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.health.divergence import build_rerun_command
from nsa_lab.runs import directory, resolve

STAGES = [{"steps": 9, "seq_len": 64, "batch_size": 2, "lr": rate} for rate in (0.5, 1e-4)]


def lower_lr(config: RunConfig, rate: float) -> RunConfig:
    sections = config.to_dict()
    for stage in sections["train"].get("stages") or [sections["train"]]:
        stage["lr"] = rate
    return RunConfig.from_dict(sections)


def run_command(command: str) -> RunConfig:
    """Return the configuration that the command line gives."""
    program, run, name, *options = shlex.split(command)
    assert (program, run) == ("nsa-lab", "run") and set(options[::2]) <= {"-p"}
    return resolve.load_config(name, options[1::2])


@looped
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.warmup_steps=3", "train.seed=3"],
        ["train.lr=0.5", "data.documents=mask", "train.token_budget=null"],
        ["data.source=local", "data.path=my texts/*.txt", 'data.text_column="1e3"', "runtime.gradient_checkpointing=true"],
        ["train.lr=7", "nsa.phi=mlp", 'model.silent=["win"]'],
    ],
    ids=["none", "numbers", "keys that are not written", "texts", "a list"],
)
def test_all_overrides_of_the_run_are_repeated(overrides: list[str], tmp_path: Path) -> None:
    config = resolve.load_config("ci", overrides)
    new_config = lower_lr(config, 1e-3)
    command = build_rerun_command(tmp_path / "ci-1", config, new_config)
    assert command.startswith("nsa-lab run ci -p train.lr=0.001")
    assert run_command(command).hash() == new_config.hash()
    expected = [option for option in overrides if not option.startswith("train.lr") and not option.endswith("null")]
    assert set(shlex.split(command)[5:]) - {"-p"} == set(expected)


@pytest.mark.parametrize("name", ["no_preset", "smoke"])
def test_own_config_file_is_used_if_the_preset_cannot_express_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options cannot remove the keys of stages."""
    config = RunConfig.from_dict({"name": name, "train": {"stages": STAGES, "seed": 7}})
    run_dir = tmp_path / "outputs" / f"{name}-1"
    run_dir.mkdir(parents=True)
    (run_dir / directory.CONFIG).write_text(config.to_yaml(), encoding="utf-8")
    new_config = lower_lr(config, 1e-3)
    command = build_rerun_command(run_dir, config, new_config)
    assert command.startswith(f"nsa-lab run outputs/{name}-1/config.yaml -p ")
    monkeypatch.chdir(tmp_path)
    assert run_command(command).hash() == new_config.hash()
