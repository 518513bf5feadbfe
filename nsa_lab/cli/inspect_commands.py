"""Commands that read runs and change none: status, follow, health, compare, report, export."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_lab.cli.common import Outputs, Run, get_exit_code
from nsa_lab.config import ConfigError
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError

if TYPE_CHECKING:
    from nsa_lab.health import Health

app = typer.Typer()


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]")] = None,
    outputs: Outputs = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON: an object, or a list of one for each run")] = False,
) -> None:
    """What one run is doing, or a line for each run there is: how far, loss, speed, verdict."""
    from nsa_lab.cli import status_table

    folder = resolve.get_outputs_dir(outputs)
    if as_json:
        told = status_table.summarize_run(resolve.find_run(run, folder)) if run else status_table.summarize_runs(folder)
        typer.echo(json.dumps(told, indent=1, ensure_ascii=False))
        return
    console = Console()
    if run:
        table, advice = status_table.build_run_table(resolve.find_run(run, folder))
        console.print(table)
        for line in advice:
            typer.echo(line)  # as long as it is: a command is to be copied whole
        return
    console.width = max(console.width, status_table.MIN_TABLE_WIDTH)
    console.print(*status_table.render_runs(folder))


@app.command()
def follow(run: Run, outputs: Outputs = None) -> None:
    """Watch a run until its trainer ends; Ctrl-C leaves it running."""
    from nsa_lab.health.next_actions import list_next_actions
    from nsa_lab.runs.history import History
    from nsa_lab.runs.live_view import watch

    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    try:
        watch(run_dir, lambda: not lifecycle.is_alive(run_dir), Console())
    except KeyboardInterrupt:
        typer.echo(f"the trainer goes on; nsa-lab stop {run_dir.name} ends it")
        return
    # A trainer that was killed gave no reason.
    why = directory.read_status(run_dir).get("reason") or " ".join(list_next_actions(History.read(run_dir)))
    typer.echo(f"{run_dir.name} is {lifecycle.get_state(run_dir)}: {why}")
    raise typer.Exit(get_exit_code(run_dir))


@app.command()
def health(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="folders, ids, or latest")], outputs: Outputs = None
) -> None:
    """Verdicts on runs; exit code 3 if one is not healthy."""
    from nsa_lab.health import examine

    folder, console = resolve.get_outputs_dir(outputs), Console()
    found = [examine(resolve.find_run(run, folder)) for run in runs]
    for one in found:
        console.print(*_render_health(one))
    raise typer.Exit(directory.EXIT_DONE if all(one.ok for one in found) else directory.EXIT_HALTED)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="folders, ids, or patterns like 'smoke-*'; NAME=RUN: a model of that name"),
    ],
    against: Annotated[
        str | None, typer.Option("--against", metavar="NAME", help="the model to compare with [the one dense model]")
    ] = None,
    outputs: Outputs = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same numbers as JSON")] = False,
) -> None:
    """Tables of evaluated runs, in Markdown: cost, needles, text and interventions, beside one model, seed by seed.

    Runs that differ in train.seed alone, or in how they were computed, are one model.
    """
    from nsa_lab.health.comparison import compare_models
    from nsa_lab.health.comparison_tables import format_markdown
    from nsa_lab.health.model_runs import find_baseline, group_runs

    folder, notes = resolve.get_outputs_dir(outputs), list[str]()
    named: dict[str | None, list[Path]] = {}
    for name, run in map(_parse_named_run, runs):
        named.setdefault(name, []).extend(resolve.find_runs(run, folder))
    models = group_runs(named.pop(None, []), {name: own for name, own in named.items() if name}, notes.append)
    found = compare_models(models, find_baseline(models, against), notes)
    typer.echo(json.dumps({"v": 1, **asdict(found)}, indent=1, ensure_ascii=False) if as_json else format_markdown(found))


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="one run, or several to compare")],
    outputs: Outputs = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="write there, and nothing into a run's folder")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="from the record, not from the executed notebook")] = False,
) -> None:
    """Write report.html of a run again, or one page that compares several, and the list of runs; prints the page's path.

    With --page that file alone is written, with no link to others: a page to share, or of a run that cannot be written to.
    """
    from nsa_lab.report import write_comparison, write_index, write_report

    folder = resolve.get_outputs_dir(outputs)
    found = [resolve.find_run(run, folder) for run in runs]
    try:
        alone = len(found) == 1
        written = (
            write_report(found[0], page, record_only=record)
            if alone
            else write_comparison(found, page or folder / "comparison.html")
        )
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
        raise ConfigError("export: say in which form; there is one, --csv")
    from nsa_lab.runs.csv_export import write_csv
    from nsa_lab.runs.history import History

    history = History.read(resolve.find_run(run, resolve.get_outputs_dir(outputs)))
    if into is None:
        write_csv(history, sys.stdout)
        return
    try:
        with open(into, "w", encoding="utf-8", newline="") as file:
            rows = write_csv(history, file)
    except OSError as error:
        raise ConfigError(
            f"--into {into}: cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from None
    typer.echo(f"{into}: {rows:,} rows")


def _parse_named_run(text: str) -> tuple[str | None, str]:
    """`dense=long_64k_dense-*` -> the name and the run; without a name, None. A name is no path."""
    name, equals, run = text.partition("=")
    if not equals or "/" in name:
        return None, text
    if not (name and run):
        raise ConfigError(f"{text}: expected a model's name and its runs, for example 'dense=long_64k_dense-*'")
    return name, run


def _render_health(result: Health) -> Iterator[Any]:
    yield Text(f"{result.run}: {result.headline}", style="bold red" if result.failed else "bold green", overflow="fold")
    table = Table("verdict", "", "what was found", box=None, pad_edge=False)
    styles = {True: "green", False: "bold red", None: "yellow"}
    for verdict in result.verdicts:
        table.add_row(verdict.name, Text(verdict.mark, style=styles[verdict.ok]), Text(verdict.text, overflow="fold"))
    yield table
