"""The command line. Every command is a few lines around a function of the library.

Invariants
* Exit codes: 0 done, 3 halted by a guard (or not healthy), 75 stopped on request, 2 wrong usage, 1 a bug.
* A wrong setting, path or file is one line on stderr with the remedy, found before anything is written.
* Starting is quick: torch, papermill and matplotlib are imported by the commands that need them.
"""

from __future__ import annotations

import os
from typing import Annotated

from nsa_lab.config.optional_deps import require

require("typer", "rich")

import typer

from nsa_lab import __version__
from nsa_lab.cli import bench_commands, inspect_commands, model_commands, sweep_command, training_commands
from nsa_lab.cli.common import exit_with_usage_error, get_exit_code
from nsa_lab.config import UsageError
from nsa_lab.runs.environment import set_openmp_wait_policy

__all__ = ["app", "get_exit_code", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Native Sparse Attention: train, follow, judge and report runs.",
)
for commands in (training_commands, sweep_command, inspect_commands, model_commands):  # in the order of the help
    app.add_typer(commands.app)
app.add_typer(bench_commands.app, name="bench")


def main() -> None:
    """The console script: what a user did wrong is one line and exit code 2."""
    # For torch, which is loaded after this, and for the processes that we start.
    set_openmp_wait_policy(os.environ)
    try:
        app()
    except (UsageError, NotImplementedError) as error:  # the second: a shape that a backend does not take
        exit_with_usage_error(error)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"nsa-lab {__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="say which version this is, and end")
    ] = False,
) -> None:
    """What stands before a command."""
