"""Options, exit codes and usage errors that the commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from nsa_lab.config import ConfigError, UsageError
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.atomic_io import UnwritableFile, check_output_file
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.run_files import find_run_of_file
from nsa_lab.runs.text_output import make_printable

Source = TypeVar("Source")
Result = TypeVar("Result")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
MAX_RANKS = 1024  # processes on one host, which has far fewer devices
MAX_TOKENS = 2**31 - 1  # positions are 32-bit integers; no text of this length fits into memory


def parse_path(text: str | Path) -> Path:
    """Return the path in the value of an option or argument; every one with a path uses this as its `parser`.

    An empty text, as of a variable that is not set, would be the working directory. `text`: a Path if it is the default.
    """
    if not str(text).strip():
        raise typer.BadParameter("expected a path, got an empty text")
    return resolve.expand_path(str(text))


ConfigName = Annotated[
    str, typer.Argument(metavar="NAME", help="Preset (a file in params/ without .yaml) or path of a YAML file")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, run id, prefix of a run id, or latest")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Name of a bundled model; or a run: its directory, id or latest")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-p", metavar="KEY=VALUE", help="Override a setting, e.g. -p train.steps=100 (repeatable)"),
]
Outputs = Annotated[
    Path | None,
    typer.Option("--outputs", metavar="DIR", parser=parse_path, help="Folder of the run directories [default: outputs/]"),
]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, max=MAX_RANKS, help="Number of processes on this host, one per device")
]


class PlainConsole(Console):
    """A console of rich that shows the control characters of a text as escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_shown = segment.control or segment.text.isprintable()
            yield segment if is_shown else segment._replace(text=make_printable(segment.text))


def get_exit_code(run_dir: Path, problem: str | None = None) -> int:
    """Return the exit code of a run. The notebook's `problem` counts only if the run itself has none."""
    state = lifecycle.get_state(run_dir)
    if state == directory.HALTED:
        return directory.read_status(run_dir).get("exit_code") or directory.EXIT_HALTED
    if problem == "interrupted" or (state == directory.PREEMPTED and not problem):
        return directory.EXIT_STOPPED
    return directory.EXIT_DONE if state == directory.DONE and not problem else directory.EXIT_BUG


def check_output_option(option: typer.CallbackParam, file: Path | None) -> Path | None:
    """Return the value of an option with an output file; every such option uses this as its `callback`.

    It runs before the command, which may take minutes. A file of a run is refused: writing it would destroy the record.
    """
    if file is not None:
        if run := find_run_of_file(file):
            raise ConfigError(f"{option.opts[0]} {file}: expected a new file, got one of the run {run}; give another path")
        try:
            check_output_file(file)
        except UnwritableFile as error:
            raise ConfigError(f"{option.opts[0]} {error}") from None
    return file


def check_picture_option(option: typer.CallbackParam, file: Path | None) -> Path | None:
    """Return the value of an option with the file of a figure, as `check_output_option`: matplotlib knows its suffix."""
    file = check_output_option(option, file)
    if file is not None and file.suffix.lower() not in PICTURE_SUFFIXES:
        expected = ", ".join(PICTURE_SUFFIXES)
        raise ConfigError(f"{option.opts[0]} {file}: expected a name with one of the suffixes {expected}; rename it")
    return file


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print plain text in the encoding of the stream. `typer.echo` would write UTF-8 to a stream that is ASCII."""
    stream = sys.stderr if err else sys.stdout
    shown = str(text) if nl is False else f"{make_printable(str(text))}\n"
    stream.write(shown)
    stream.flush()


def print_usage_error(error: Exception) -> None:
    """Print an error on stderr, without exiting."""
    text = str(error) if isinstance(error, UsageError) else directory.describe_read_error(error)
    for line in text.splitlines():
        echo(f"nsa-lab: {line}", err=True)


def read_each(read: Callable[[Source], Result], runs: Iterable[Source], problems: list[str]) -> Iterator[Result]:
    """Yield `read(run)` for each run, a directory or what names one. Skip those that cannot be read.

    A skipped run has one line on stderr with the reason, which is also appended to `problems`.
    """
    for run in runs:
        try:
            result = read(run)
        except (UsageError, OSError) as error:
            reason = (
                RunDirectoryError(f"{run.name}: {directory.describe_read_error(error)}") if isinstance(run, Path) else error
            )
            print_usage_error(reason)
            problems.append(str(reason))
        else:
            yield result


def exit_with_usage_error(error: Exception) -> None:
    print_usage_error(error)
    sys.exit(directory.EXIT_USAGE)
