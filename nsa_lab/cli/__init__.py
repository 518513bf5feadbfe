"""Command line. Every command is a thin wrapper around a library function.

Invariants
* Exit codes: 0 done, 3 halted by a guard (or a failed check), 75 stopped on request, 2 wrong usage, 1 a bug.
* A wrong setting, path or file gives one line with the remedy on stderr, before anything is written.
* Startup is fast: torch, papermill and matplotlib are imported inside the commands that need them.
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
from nsa_lab.config.errors import describe_memory_error, describe_os_error, has_working_dir
from nsa_lab.runs.environment import set_openmp_wait_policy
from nsa_lab.runs.text_output import allow_any_text

__all__ = ["app", "get_exit_code", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Native Sparse Attention: train, monitor, check and report runs.",
)
for commands in (training_commands, sweep_command, inspect_commands, model_commands):  # order in --help
    app.add_typer(commands.app)
app.add_typer(bench_commands.app, name="bench")


def main() -> None:
    """Run the console script. A usage error, or one of rights or files, gives one line on stderr and exit code 2."""
    # Must be set before torch is imported; child processes inherit it.
    set_openmp_wait_policy(os.environ)
    allow_any_text()
    try:
        app()
    except (UsageError, NotImplementedError) as error:  # NotImplementedError: a shape that a backend does not support
        exit_with_usage_error(error)
    except OSError as error:
        text = describe_os_error(error)
        if text is None:
            raise
        exit_with_usage_error(UsageError(text))
    except (RuntimeError, MemoryError) as error:
        text = describe_memory_error(error)
        if text is None:
            raise
        exit_with_usage_error(UsageError(text))


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"nsa-lab {__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit")
    ] = False,
) -> None:
    """Handle options that precede a command."""
    if not has_working_dir():
        # Even torch cannot be loaded there.
        raise UsageError("the working directory was deleted; change to another folder")
