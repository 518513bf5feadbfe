"""Each option and argument of the command line reaches its function. A new one without a test fails.

The library functions that a command calls are replaced by recorders. A case is a command line and the value that must
arrive; the test sees to it that each option of each command has a case.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import bench_options  # noqa: F401
import model_options  # noqa: F401
import pytest
import run_options  # noqa: F401
import torch
import training_options  # noqa: F401
import typer
from option_cases import CASES, OUT, Recorder, Stopped, Workspace, stop

from nsa_lab import cli
from nsa_lab.cli.common import parse_path
from nsa_lab.evaluate import NEEDLE_FORMS, RULER_TASKS, TASKS
from nsa_lab.runs import lifecycle
from nsa_lab.runs.evaluation import NEEDLE_FORM_NAMES, RULER_NAMES, TASK_NAMES

torch.set_num_threads(1)


@dataclass
class SimpleComparison:
    models: tuple[str, ...] = ()


def list_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


COMMANDS = dict(list_commands(typer.main.get_command(cli.app)))


def test_every_option_of_every_command_has_a_case() -> None:
    declared = {(name, p.name) for name, command in COMMANDS.items() for p in command.params if p.name != "help"}
    tested = {(command, name.partition(":")[0]) for command, cases in CASES.items() for name in cases}
    assert not declared - tested, "add a case to the file of its group in tests/cli"
    assert not tested - declared, "no such option"


def test_every_path_refuses_an_empty_text_and_expands_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `parse_path`, an empty text is the working directory, and `--outputs=~/runs` a folder that is called ~."""
    functions = [
        command.callback for group in cli.app.registered_groups for command in group.typer_instance.registered_commands
    ]
    n_paths = 0
    for function in functions:
        for name, hint in get_type_hints(function, include_extras=True).items():
            kind, *infos = get_args(hint) or (hint,)
            if Path in (kind, *get_args(kind)):
                assert infos[0].parser is parse_path, f"{function.__name__}: {name}: add parser=parse_path"
                n_paths += 1
    assert n_paths > 30
    monkeypatch.setenv("HOME", "/home/somebody")
    with pytest.raises(typer.BadParameter, match="got an empty text"):
        parse_path("")
    assert parse_path("~/runs") == Path("/home/somebody/runs")


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_values_arrive(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = Workspace(tmp_path)
    (tmp_path / "x.ipynb").write_text("{}")
    (tmp_path / "t.txt").write_text("some text " * 9)
    record = {"when": "2026", "device": "d", "rows": [], "nsa": {}, "dtype": "torch.float32", "rates": {"flops": 1}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    for name, (line, function, result, check) in CASES[command].items():
        with monkeypatch.context() as patch:
            recorder = Recorder(result)
            allow_everything(patch, command)
            patch.setattr(function, recorder)
            patch.setattr(sys, "argv", ["nsa-lab", *shlex.split(workspace.format(line))])
            with pytest.raises((SystemExit, Stopped)) as ended:
                cli.main()
            assert recorder.calls, f"{line}: {name} never arrives ({ended.value!r})"
            given, named = recorder.calls[-1]
            assert check(*given, **named), f"{line}: {given} {named}"


def allow_everything(patch: pytest.MonkeyPatch, command: str) -> None:
    """Replace the checks and results that a command needs in addition to the function under test."""
    patch.setattr(lifecycle, "check_text", lambda config: None)
    patch.setattr("nsa_lab.train.preflight.startup_checks.check_startable", lambda *_: None)
    patch.setattr("nsa_lab.train.matched_baseline.build_matched_baseline", lambda config: "")
    if command == "plan":
        patch.setattr("nsa_lab.train.estimate.estimate_resources", lambda *_: "")
    if command in ("train", "convert"):
        patch.setattr(lifecycle, "create_run", lambda config, folder: folder / "fake")
        patch.setattr("nsa_lab.convert.describe_source", lambda source, folder: {})
    if command in ("ship", "export-adapter"):
        for name in ("read_final_evaluation", "find_checkpoint"):
            patch.setattr(f"nsa_lab.cli.model_commands.{name}", lambda *_: Path("step-00000001"))
    if command == "convert-checkpoint":
        patch.setattr("nsa_lab.inference.load.find_checkpoint", lambda *_: Path("step-00000001"))
    if command == "sweep":
        patch.setattr("nsa_lab.cli.sweep_command._find_gpus", lambda _: [None])
        patch.setattr("nsa_lab.cli.sweep_command._write_results", lambda *_: None)
        patch.setattr("nsa_lab.runs.sweep_runner.Sweep.run_all", lambda *_: [])
    if command == "compare":
        patch.setattr("nsa_lab.health.model_runs.group_runs", lambda *_: [])
        patch.setattr("nsa_lab.health.model_runs.find_baseline", lambda *_: "a")
        patch.setattr("nsa_lab.health.comparison.compare_models", lambda *_: SimpleComparison())
    if command == "bench limits":
        patch.setattr("nsa_lab.bench.roofline.read_rows", lambda *_: ([], None))
        patch.setattr("nsa_lab.bench.roofline.make_limit_table", lambda *_: "")


def test_several_ranks_in_the_foreground_replace_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has created a CUDA context, which a supervisor of ranks would keep."""
    monkeypatch.chdir(tmp_path)
    workspace, execute = Workspace(tmp_path), Recorder(stop)
    allow_everything(monkeypatch, "train")
    monkeypatch.setattr("os.execv", execute)
    line = workspace.format(f"train {{params}} {OUT} --foreground --ranks 2")
    monkeypatch.setattr(sys, "argv", ["nsa-lab", *shlex.split(line)])
    with pytest.raises(Stopped):
        cli.main()
    ((_, command),) = [given for given, _ in execute.calls]
    assert command[1:3] == ["-m", "nsa_lab.train"] and command[-2:] == ["--ranks", "2"]


def test_global_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--version"], "nsa-lab "),
        (["-h"], "Usage"),
        (["--help"], "Usage"),
        (["run", "-h"], "Usage"),
    ):
        monkeypatch.setattr(sys, "argv", ["nsa-lab", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code and expected in capsys.readouterr().out


def test_task_names_of_the_command_line_are_those_of_the_evaluation() -> None:
    assert list(TASKS) == list(TASK_NAMES) and list(NEEDLE_FORMS) == list(NEEDLE_FORM_NAMES)
    assert list(RULER_TASKS) == list(RULER_NAMES)
