"""What the commands share: the options, the exit codes, and the line that refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nsa_lab.runs import directory, lifecycle

ConfigName = Annotated[
    str, typer.Argument(metavar="NAME", help="a file of params/, without .yaml, or the path of a YAML file")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="a run's folder, its id, the beginning of its id, or latest")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="a model that ships, by its name; or a run, by its folder, id or latest")
]
Overrides = Annotated[list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="e.g. -p train.steps=50; repeat")]
Outputs = Annotated[Path | None, typer.Option("--outputs", metavar="DIR", help="where run directories are kept [outputs/]")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="processes on this host, one per device")]


def get_exit_code(run_dir: Path, problem: str | None = None) -> int:
    """What a run's state means for a shell: the run first, and the notebook's `problem` only where the run is fine."""
    state = lifecycle.get_state(run_dir)
    if state == directory.HALTED:
        return directory.read_status(run_dir).get("exit_code") or directory.EXIT_HALTED
    if problem == "interrupted" or (state == directory.PREEMPTED and not problem):
        return directory.EXIT_STOPPED
    return directory.EXIT_DONE if state == directory.DONE and not problem else directory.EXIT_BUG


def exit_with_usage_error(error: Exception) -> None:
    for line in str(error).splitlines():
        typer.echo(f"nsa-lab: {line}", err=True)
    sys.exit(directory.EXIT_USAGE)
