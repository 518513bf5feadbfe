"""Commands that read runs and change none: status, follow, health, report, export."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_lab.cli.common import Outputs, Run, exit_code
from nsa_lab.config import ConfigError
from nsa_lab.runs import directory, launch, names
from nsa_lab.runs.directory import RunDirectoryError

if TYPE_CHECKING:
    from nsa_lab.health import Health

app = typer.Typer()


@app.command()
def status(run: Annotated[str | None, typer.Argument(metavar="[RUN]")] = None, outputs: Outputs = None) -> None:
    """What one run is doing, or a line for each run there is."""
    folder = names.outputs_folder(outputs)
    if run is None:
        Console().print(*_runs_view(folder))
        return
    from nsa_lab.runs.history import History
    from nsa_lab.runs.summary import shown_facts

    history = History.read(names.find_run(run, folder))
    table = Table("", history.run, show_header=True, box=None)
    for name, value in [("state", launch.state(history.run_dir)), *shown_facts(history), ("folder", str(history.run_dir))]:
        table.add_row(name, value)
    for attempt in history.attempts():
        told = f"steps {attempt.from_step:,} to {attempt.last_step:,}, {attempt.ending}"
        table.add_row(f"attempt {attempt.number}", told)
    Console().print(table)


@app.command()
def follow(run: Run, outputs: Outputs = None) -> None:
    """Watch a run until its trainer ends; Ctrl-C leaves it running."""
    from nsa_lab.runs.live import watch

    run_dir = names.find_run(run, names.outputs_folder(outputs))
    try:
        watch(run_dir, lambda: not launch.is_alive(run_dir), Console())
    except KeyboardInterrupt:
        typer.echo(f"the trainer goes on; nsa-lab stop {run_dir.name} ends it")
        return
    typer.echo(f"{run_dir.name} is {launch.state(run_dir)}: {directory.read_status(run_dir).get('reason')}")
    raise typer.Exit(exit_code(run_dir))


@app.command()
def health(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="folders, ids, or latest")], outputs: Outputs = None
) -> None:
    """Verdicts on runs; exit code 3 if one is not healthy."""
    from nsa_lab.health import examine

    folder, console = names.outputs_folder(outputs), Console()
    found = [examine(names.find_run(run, folder)) for run in runs]
    for one in found:
        console.print(*_health_view(one))
    raise typer.Exit(directory.EXIT_DONE if all(one.ok for one in found) else directory.EXIT_HALTED)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="one run, or several to compare")],
    outputs: Outputs = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="write there, and nothing into a run's folder")
    ] = None,
) -> None:
    """Write report.html of a run again, or one page that compares several, and the list of runs; prints the page's path.

    With --page that file alone is written, as for runs on a medium that nothing can be written to.
    """
    from nsa_lab.report import compare, write_index, write_report

    folder = names.outputs_folder(outputs)
    found = [names.find_run(run, folder) for run in runs]
    try:
        written = write_report(found[0], page) if len(found) == 1 else compare(found, page or folder / "comparison.html")
        if folder.is_dir() and page is None:
            write_index(folder)
    except OSError as error:
        raise RunDirectoryError(
            f"{error}; name a page that can be written: nsa-lab report {' '.join(runs)} --page FILE"
        ) from None
    typer.echo(written)


@app.command()
def export(
    run: Run,
    csv: Annotated[bool, typer.Option("--csv", help="as comma-separated values, one row per logged step")] = False,
    into: Annotated[Path | None, typer.Option("--into", metavar="FILE", help="where to [standard output]")] = None,
    outputs: Outputs = None,
) -> None:
    """The numbers of a run as a table: losses, rates, speeds, statistics of every layer, evaluations."""
    if not csv:
        raise ConfigError("nsa-lab export: say in which form; there is one, --csv")
    from nsa_lab.runs.export import write_csv
    from nsa_lab.runs.history import History

    history = History.read(names.find_run(run, names.outputs_folder(outputs)))
    if into is None:
        write_csv(history, sys.stdout)
        return
    with open(into, "w", encoding="utf-8", newline="") as file:
        rows = write_csv(history, file)
    typer.echo(f"{into}: {rows:,} rows")


def _health_view(found: Health) -> Iterator[Any]:
    yield Text(f"{found.run}: {found.headline}", style="bold red" if found.failed else "bold green", overflow="fold")
    table = Table("verdict", "", "what was found", box=None, pad_edge=False)
    styles = {True: "green", False: "bold red", None: "yellow"}
    for verdict in found.verdicts:
        table.add_row(verdict.name, Text(verdict.mark, style=styles[verdict.ok]), Text(verdict.text, overflow="fold"))
    yield table


def _runs_view(folder: Path) -> Iterator[Any]:
    table, problems = Table("run", "state", "step", "tokens", box=None), []
    for run_dir in names.run_directories(folder):
        try:
            state = launch.state(run_dir)
        except (RunDirectoryError, OSError) as error:
            table.add_row(run_dir.name, "?", "", "")
            problems.append(Text(str(error), style="yellow", overflow="fold"))
            continue
        said = directory.read_status(run_dir)
        table.add_row(run_dir.name, state, f"{said.get('step', 0):,}", f"{said.get('tokens', 0):,}")
    yield table if table.row_count else f"no runs in {folder}; nsa-lab run smoke makes one"
    yield from problems
