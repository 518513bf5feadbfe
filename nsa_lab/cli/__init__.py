"""The command line. Every command is a few lines around a function of the library.

Invariants
* Exit codes: 0 done, 3 halted by a guard (or not healthy), 75 stopped on request, 2 wrong usage, 1 a bug.
* A wrong setting, path or file is one line on stderr with the remedy, found before anything is written.
* Starting is quick: torch, papermill and matplotlib are imported by the commands that need them.
"""

from __future__ import annotations

import os
from typing import Annotated

from nsa_lab.config.extras import require

require("typer", "rich")

import typer

from nsa_lab import __version__
from nsa_lab.cli import benches, models, reading, sweeps, training
from nsa_lab.cli.common import exit_code, refuse
from nsa_lab.config import UsageError
from nsa_lab.runs.environment import let_threads_sleep

__all__ = ["app", "exit_code", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Native Sparse Attention: train, follow, judge and report runs.",
)
for commands in (training, sweeps, reading, models):  # in the order of the help
    app.add_typer(commands.app)
app.add_typer(benches.app, name="bench")


def main() -> None:
    """The console script: what a user did wrong is one line and exit code 2."""
    # For torch, which is loaded after this, and for the processes that we start.
    let_threads_sleep(os.environ)
    try:
        app()
    except (UsageError, NotImplementedError) as error:  # the second: a shape that a backend does not take
        refuse(error)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nsa-lab {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="say which version this is, and end")
    ] = False,
) -> None:
    """What stands before a command."""
