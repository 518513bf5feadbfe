"""Names that users, checkpoints and recorded runs depend on do not change.

tests/data/frozen_contracts.json was written with the code of ffda75b: schemas of the torch operators, commands with their
options, configuration hashes and state dicts of the presets. Additions are allowed, changes and removals are not.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from nsa_lab import NSATransformer, cli
from nsa_lab.config import RunConfig
from nsa_lab.runs import directory

ROOT = Path(__file__).parents[1]
FROZEN = json.loads((ROOT / "tests" / "data" / "frozen_contracts.json").read_text("utf-8"))
OPERATOR_MODULES = ("nsa_operator", "gating", "band.launch", "selected.launch", "decoding.launch", "block_topk")


def list_commands(command: Any, path: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """The options of every command, by its words."""
    if hasattr(command, "commands"):
        nested = [list_commands(child, (*path, name)) for name, child in command.commands.items()]
        return {words: options for commands in nested for words, options in commands.items()}
    return {" ".join(path): {o for p in command.params for o in getattr(p, "opts", []) if o.startswith("-")}}


def test_operator_schemas() -> None:
    pytest.importorskip("triton")
    for module in OPERATOR_MODULES:
        importlib.import_module(f"nsa_lab.attention.kernels.{module}")
    schemas = {name: str(getattr(torch.ops.nsa_lab, name).default._schema) for name in FROZEN["operators"]}
    assert schemas == FROZEN["operators"]


def test_commands_and_their_options() -> None:
    commands = list_commands(typer.main.get_command(cli.app))
    missing = {words: set(options) - commands.get(words, set()) for words, options in FROZEN["commands"].items()}
    assert not {words: options for words, options in missing.items() if options or words not in commands}


def test_hashes_of_presets_and_recorded_runs() -> None:
    hashes = {name: RunConfig.from_yaml(ROOT / "params" / f"{name}.yaml").hash() for name in FROZEN["config_hashes"]}
    assert hashes == FROZEN["config_hashes"]
    recorded = [path for path in (ROOT / "outputs").iterdir() if directory.is_recorded(path)]
    for run_dir in recorded:
        environment = json.loads((run_dir / directory.ENVIRONMENT).read_text("utf-8"))
        assert RunConfig.from_yaml(run_dir / directory.CONFIG).hash() == environment["config_hash"], run_dir.name
    assert len(recorded) == 6


def test_state_dicts_of_presets() -> None:
    for name, frozen in FROZEN["state_dicts"].items():
        with torch.device("meta"):
            model = NSATransformer(RunConfig.from_yaml(ROOT / "params" / f"{name}.yaml").model)
        assert {key: list(value.shape) for key, value in model.state_dict().items()} == frozen, name
