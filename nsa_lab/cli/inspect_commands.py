"""Commands that inspect runs without changing them: status, follow, health, compare, report, export."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nsa_lab.cli.common import (
    Outputs,
    PlainConsole,
    Run,
    check_output_option,
    echo,
    get_exit_code,
    parse_path,
    print_usage_error,
    read_each,
)
from nsa_lab.config import ConfigError
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError
from nsa_lab.runs.tables import Styled, Table
from nsa_lab.runs.text_output import dump_json, make_one_line

if TYPE_CHECKING:
    from nsa_lab.health import Health

app = typer.Typer()


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]")] = None,
    outputs: Outputs = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object, or a list with one object per run")
    ] = False,
    recorded: Annotated[bool, typer.Option("--recorded", help="List the recorded runs instead of your own")] = False,
) -> None:
    """Show progress, loss and verdict of one run or all. Without RUN, prints a table, newest first."""
    from nsa_lab.cli import status_table

    folder = resolve.get_readable_outputs_dir(outputs)
    if as_json:
        summary = (
            status_table.summarize_run(resolve.find_run(run, folder))
            if run is not None
            else status_table.summarize_runs(folder, recorded=recorded)
        )
        echo(dump_json(summary))
        return
    console = PlainConsole()
    if run is not None:
        table, advice = status_table.build_run_table(resolve.find_run(run, folder))
        console.print(table)
        for line in advice:
            echo(line)  # not wrapped, so that commands can be copied
        return
    lines, console.width = status_table.render_runs(folder, console.width, recorded=recorded)
    console.print(*lines, sep="\n", soft_wrap=False)


@app.command()
def follow(run: Run, outputs: Outputs = None) -> None:
    """Follow a run until its trainer exits. Ctrl-C stops following; the run continues."""
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    from nsa_lab.health.next_actions import list_next_actions
    from nsa_lab.runs.history import History
    from nsa_lab.runs.live_view import watch

    try:
        watch(run_dir, lambda: not lifecycle.is_alive(run_dir), PlainConsole())
    except KeyboardInterrupt:
        echo(f"the trainer continues; nsa-lab stop {run_dir.name} stops it")
        return
    # A killed trainer records no reason.
    why = directory.read_status(run_dir).get("reason") or " ".join(list_next_actions(History.read(run_dir)))
    echo(f"{run_dir.name} is {lifecycle.get_state(run_dir)}: {why}")
    raise typer.Exit(get_exit_code(run_dir))


@app.command()
def health(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, run ids, or latest")],
    outputs: Outputs = None,
) -> None:
    """Check the record of runs. Writes verdict.json. Exit code 3 if a check fails; warnings exit with 0.

    A run that cannot be read has one line on stderr, and the exit code is 2; the others are shown. Recorded runs and runs
    in folders without write permission are only shown.
    """
    folder, console = resolve.get_outputs_dir(outputs), PlainConsole()
    problems = list[str]()
    # Before numpy is imported, so that a wrong name is refused at once.
    run_dirs = list(read_each(lambda run: resolve.find_run(run, folder), runs, problems))
    if not run_dirs:
        raise typer.Exit(directory.EXIT_USAGE)
    from nsa_lab.health import examine
    from nsa_lab.health.verdict_file import to_record, write_verdict
    from nsa_lab.runs.history import History

    def judge(run_dir: Path) -> tuple[History, Health, dict[str, Any]]:
        history = History.read(run_dir)
        result = examine(history)
        return history, result, to_record(history, result)

    levels = []
    for history, result, record in read_each(judge, run_dirs, problems):
        run_dir = history.run_dir
        levels.append(result.level)
        console.print(*_render_health(result, record["description"], record["summary"]), sep="\n")
        if not directory.is_recorded(run_dir):
            try:
                write_verdict(history, result)
            except OSError as error:
                echo(f"{run_dir / directory.VERDICT}: not written ({error.strerror})")
    if problems:  # not all runs were judged
        raise typer.Exit(directory.EXIT_USAGE)
    raise typer.Exit(directory.EXIT_HALTED if "failed" in levels else directory.EXIT_DONE)


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run directories, ids or patterns such as 'smoke-*'; NAME=RUN names the model"
        ),
    ],
    against: Annotated[
        str | None, typer.Option("--against", metavar="NAME", help="Baseline model [default: the only dense model]")
    ] = None,
    outputs: Outputs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown")] = False,
) -> None:
    """Compare evaluated runs with a baseline, by seed. Prints tables of cost, needles, RULER, text loss and ablations.

    Runs that differ only in train.seed or in how they were computed count as one model. A run that cannot be read has one
    line on stderr, and the exit code is 2; the others are compared if they belong to at least two models.
    """
    from nsa_lab.health.comparison import compare_models
    from nsa_lab.health.comparison_tables import format_markdown
    from nsa_lab.health.model_runs import find_baseline, group_runs

    folder, notes, problems = resolve.get_outputs_dir(outputs), list[str](), list[str]()

    def find(named_run: tuple[str | None, str]) -> tuple[str | None, list[Path]]:
        return named_run[0], resolve.find_runs(named_run[1], folder)

    named: dict[str | None, list[Path]] = {}
    for name, run_dirs in read_each(find, [_parse_named_run(run) for run in runs], problems):
        named.setdefault(name, []).extend(run_dirs)
    named_models = {name: run_dirs for name, run_dirs in named.items() if name}
    models = group_runs(named.get(None, []), named_models, notes.append, partial(read_each, problems=problems))
    if problems and len(models) < 2:
        for model in models:
            print_usage_error(ConfigError(f"expected at least two models with a readable run, got only {model.name}"))
        raise typer.Exit(directory.EXIT_USAGE)
    comparison = compare_models(models, find_baseline(models, against), [*problems, *notes])
    echo(dump_json({"v": 1, **asdict(comparison)}) if as_json else format_markdown(comparison))
    if problems:  # not all runs were compared
        raise typer.Exit(directory.EXIT_USAGE)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="One run, or several runs to compare")],
    outputs: Outputs = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            metavar="FILE",
            parser=parse_path,
            callback=check_output_option,
            help="Write only FILE, and nothing into the run directory",
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Build the page from the records instead of the executed notebook")
    ] = False,
) -> None:
    """Write the report of a run, or of several runs. Also writes the index of runs, and prints the path of the page.

    With --page only that file is written, without links to other pages; use it to share a page or for read-only runs. A run
    that cannot be read has one line on stderr, and the exit code is 2; the page shows the others, or is the report of the
    only other one.
    """
    folder, problems = resolve.get_outputs_dir(outputs), list[str]()
    # Before nbconvert is imported, so that a wrong name is refused at once.
    run_dirs = list(read_each(lambda run: resolve.find_run(run, folder), runs, problems))
    if not run_dirs:
        raise typer.Exit(directory.EXIT_USAGE)
    from nsa_lab.report import write_comparison, write_index, write_report
    from nsa_lab.runs.history import History

    histories = list(read_each(History.read, run_dirs, problems))
    if not histories:
        raise typer.Exit(directory.EXIT_USAGE)
    try:
        page_path = (
            write_report(histories[0], page, record_only=record)
            if len(histories) == 1
            else write_comparison(histories, page or folder / "comparison.html")
        )
        if folder.is_dir() and page is None:
            write_index(folder)
    except OSError as error:
        raise RunDirectoryError(f"{error}; write the page elsewhere: nsa-lab report {' '.join(runs)} --page FILE") from None
    echo(page_path)
    if problems:  # the page does not show all runs
        raise typer.Exit(directory.EXIT_USAGE)


@app.command()
def export(
    run: Run,
    csv: Annotated[bool, typer.Option("--csv", help="Write comma-separated values, one row per logged step")] = False,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="FILE",
            parser=parse_path,
            callback=check_output_option,
            help="Output file [default: standard output]",
        ),
    ] = None,
    outputs: Outputs = None,
) -> None:
    """Export the metrics of a run as a table. It has losses, learning rates, speeds, layer statistics, evaluations."""
    if not csv:
        raise ConfigError("export: no format given; use --csv")
    from nsa_lab.runs.csv_export import write_csv
    from nsa_lab.runs.history import History

    history = History.read(resolve.find_run(run, resolve.get_outputs_dir(outputs)))
    if not len(history.steps) and not len(history.evaluations):
        raise RunDirectoryError(f"{history.run}: no step is recorded, so there is nothing to export")
    if into is None:
        write_csv(history, sys.stdout)
        return
    try:
        with open(into, "w", encoding="utf-8", newline="") as file:
            rows = write_csv(history, file)
    except OSError as error:
        raise ConfigError(
            f"--into {into}: cannot be written ({error.strerror}); give a file in an existing folder"
        ) from None
    echo(f"{into}: {rows:,} rows")


def _parse_named_run(text: str) -> tuple[str | None, str]:
    """Split `dense=long_64k_dense-*` into (name, run). Without `=`, or with a slash before it, the name is None."""
    name, equals, run = text.partition("=")
    if not equals or "/" in name:
        return None, text
    if not (name and run):
        raise ConfigError(f"{text}: expected NAME=RUN, for example 'dense=long_64k_dense-*'")
    return name, run


def _render_health(result: Health, description: str, summary: str) -> Iterator[Any]:
    style = {"failed": "bold red", "warning": "bold yellow", "passed": "bold green"}[result.level]
    yield from (Text(line, overflow="fold") for line in (description, summary) if line)
    yield Text(make_one_line(f"{result.run}: {result.headline}"), style=style, overflow="fold")
    styles = {"passed": "green", "warning": "bold yellow", "failed": "bold red", "unknown": "yellow"}
    rows = [(verdict.name, Styled(verdict.mark, styles[verdict.level]), verdict.text) for verdict in result.verdicts]
    yield Table(("verdict", "", "measured values"), rows)
