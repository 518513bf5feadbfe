"""The command line. Every command is a few lines around a function of the library.

Invariants
* Exit codes: 0 done, 3 halted by a guard (or not healthy), 75 stopped on request, 2 wrong usage, 1 a bug.
* A wrong setting, path or file is one line on stderr with the remedy, found before anything is written.
* Starting is quick: torch, papermill and matplotlib are imported by the commands that need them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_lab import __version__
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.extras import MissingPackage, require
from nsa_lab.runs import directory, launch, names
from nsa_lab.runs.directory import RunDirectoryError

if TYPE_CHECKING:
    from nsa_lab.health import Health

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Native Sparse Attention: train, follow, judge and report runs.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure kernels, or training steps, against dense attention.")
app.add_typer(bench, name="bench")

Name = Annotated[str, typer.Argument(metavar="NAME", help="a file of params/, without .yaml, or the path of a YAML file")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="a run's folder, its id, the beginning of its id, or latest")]
Overrides = Annotated[list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="e.g. -p train.steps=50; repeat")]
Outputs = Annotated[Path | None, typer.Option("--outputs", metavar="DIR", help="where run directories are kept [outputs/]")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="processes on this host, one per device")]
Picture = Annotated[Path | None, typer.Option("--picture", metavar="FILE", help="draw the result there")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the numbers there")]


def main() -> None:
    """The console script: what a user did wrong is one line and exit code 2."""
    # Read by OpenMP when torch is loaded, here and in the processes that we start. Threads that spin while they wait make
    # a step up to sixteen times slower where the cores are shared with others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except (ConfigError, RunDirectoryError, MissingPackage) as error:
        _refuse(error)
    except Exception as error:
        if isinstance(error, _usage_errors()):
            _refuse(error)
        raise


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nsa-lab {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="say which version this is, and end")
    ] = False,
) -> None:
    """What stands before a command."""


@app.command()
def run(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="a file of params/, or a YAML path")] = None,
    param: Overrides = None,
    outputs: Outputs = None,
    notebook: Annotated[str | None, typer.Option(help="03_smoke_training, 04_production_run, or a path")] = None,
    into: Annotated[str | None, typer.Option(metavar="RUN", help="execute the notebook again on a run that exists")] = None,
) -> None:
    """Train in a notebook, headlessly; ends with the path of the run's report.html."""
    folder = names.outputs_folder(outputs)
    if name is not None and into is None:
        config = names.load_config(name, param or [])
        source = names.notebook_file(notebook, config)
        _check_startable(config)
        runner = _notebook_runner()
        run_dir = launch.create_run(config, folder)
    elif into is not None and name is None:
        run_dir = names.find_run(into, folder)
        if param:
            raise ConfigError("nsa-lab run --into takes no -p: a run keeps its configuration; start a new one to change it")
        source = names.notebook_file(notebook, RunConfig.from_yaml(run_dir / directory.CONFIG))
        runner = _notebook_runner()
    else:
        raise ConfigError("nsa-lab run: give the NAME of a params file, for example smoke, or --into RUN, one of the two")
    console = Console(stderr=True)
    console.print(f"{source.stem} on {run_dir}", highlight=False, soft_wrap=True)
    problem = runner.execute(source, run_dir, console)
    runner.report_on(run_dir, problem, console)
    raise typer.Exit(exit_code(run_dir, problem))


@app.command()
def train(
    name: Name,
    param: Overrides = None,
    outputs: Outputs = None,
    ranks: Ranks = 1,
    foreground: Annotated[bool, typer.Option("--foreground", help="train in this process")] = False,
) -> None:
    """Train without a notebook: a detached process, which outlives this terminal."""
    config = names.load_config(name, param or [])
    _check_startable(config, ranks)
    run_dir = launch.create_run(config, names.outputs_folder(outputs))
    if foreground:
        command = [sys.executable, "-m", "nsa_lab.train", str(run_dir)] + (["--ranks", str(ranks)] if ranks > 1 else [])
        # The trainer takes this process's place, so that signals reach it and its exit code is ours.
        os.execv(sys.executable, command)
    _say_started(run_dir, launch.start(run_dir, ranks=ranks))


@app.command()
def resume(run: Run, outputs: Outputs = None, ranks: Ranks = 1) -> None:
    """Go on with a run from its newest checkpoint, detached."""
    run_dir = names.find_run(run, names.outputs_folder(outputs))
    _say_started(run_dir, launch.resume(run_dir, ranks=ranks))


@app.command()
def stop(
    run: Run,
    outputs: Outputs = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for the trainer to save and exit")] = 120.0,
) -> None:
    """Ask a trainer to save and exit, and wait for it."""
    run_dir = names.find_run(run, names.outputs_folder(outputs))
    try:
        state = launch.stop(run_dir, timeout)
    except TimeoutError as error:
        raise RunDirectoryError(str(error)) from None
    typer.echo(
        f"{run_dir.name} is {state}; nsa-lab resume {run_dir.name} goes on"
        if state != directory.DONE
        else f"{run_dir.name} is DONE"
    )


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


@app.command()
def plan(
    name: Name,
    param: Overrides = None,
    ranks: Ranks = 1,
    tokens_per_s: Annotated[float | None, typer.Option(help="the speed to plan with, all ranks together")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="a run to compare the plan with")] = None,
    outputs: Outputs = None,
    twin: Annotated[bool, typer.Option("--twin", help="the dense twin with as many parameters, and what differs")] = False,
) -> None:
    """What a run will take: parameters, tokens, FLOPs, memory, disk, hours; with --run, beside what that run took."""
    config = names.load_config(name, param or [])
    run_dir = names.find_run(run, names.outputs_folder(outputs)) if run else None

    from nsa_lab.train.measured import recorded_speed
    from nsa_lab.train.plan import plan as plan_of
    from nsa_lab.train.twin import twin_of

    # A measurement of this very shape says more than the gate, which is the slowest that a run accepts.
    known = recorded_speed(config) if not tokens_per_s and ranks == 1 else None
    typer.echo(plan_of(config, known[0] if known else tokens_per_s, ranks))
    if known:
        typer.echo(f"  (that speed was measured on one {known[1]}; for another GPU give --tokens-per-s)")
    elif config.train.min_tokens_per_s and not tokens_per_s:
        typer.echo("  (that speed is train.min_tokens_per_s, the slowest that the run accepts; give --tokens-per-s)")
    if twin:
        typer.echo(f"\n{twin_of(config)}")
    if run_dir:
        from nsa_lab.runs.history import History
        from nsa_lab.workbook.planned import outcome

        typer.echo(f"\n{run_dir.name}, planned with the speed that its preflight measured:")
        typer.echo(outcome(History.read(run_dir), tokens_per_s))


@app.command()
def preflight(name: Name, param: Overrides = None, outputs: Outputs = None) -> None:
    """Every check before a run, one line each, without a run; exit code 3 if one fails."""
    config = names.load_config(name, param or [])
    _check_startable(config)

    from nsa_lab.data import FillPace, FillProgress
    from nsa_lab.runs.summary import filling_text
    from nsa_lab.train.preflight.checks import preflight_alone

    pace = FillPace()

    def filling(progress: FillProgress) -> None:
        pace.observe(progress)
        if told := pace.due():
            typer.echo(filling_text(told), err=True)

    failed = 0
    for check in preflight_alone(config, names.outputs_folder(outputs), progress=filling):
        failed += not check.ok
        mark = typer.style("ok  ", fg="green") if check.ok else typer.style("FAIL", fg="red")
        typer.echo(f"{mark} {check.name:14} {check.value}  [limit: {check.limit}]  {check.seconds:.1f} s")
    raise typer.Exit(directory.EXIT_HALTED if failed else directory.EXIT_DONE)


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="the text to go on from")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens to add")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="draw from this many likeliest tokens")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="draw from the likeliest tokens that have this probability together"),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    step: Annotated[int | None, typer.Option(help="which checkpoint [the newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Let a run's model go on from a prompt."""
    run_dir = names.find_run(run, names.outputs_folder(outputs))

    from nsa_lab.inference import Sampling, complete

    try:
        chosen = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(f"nsa-lab generate: {error}") from None
    for piece in complete(run_dir, prompt, tokens, chosen, seed=seed, step=step):
        typer.echo(piece, nl=False)
    typer.echo()


@app.command()
def evaluate(
    run: Run,
    length: Annotated[
        list[int] | None,
        typer.Option(min=64, help="of a sequence with facts, bytes; repeat [the run's own, and twice that]"),
    ] = None,
    per_depth: Annotated[int, typer.Option(min=1, help="sequences at each length and depth")] = 20,
    windows: Annotated[int, typer.Option(min=1, help="windows of held-out text, for the loss by position")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="of the facts, and of random blocks")] = 0,
    step: Annotated[int | None, typer.Option(help="which checkpoint [the newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Ask a run's model for facts in long texts, and find out what its selection does; writes evaluation.json."""
    run_dir = names.find_run(run, names.outputs_folder(outputs))

    from nsa_lab.evaluate import evaluate_run
    from nsa_lab.runs.evaluation import EVALUATION

    evaluate_run(run_dir, step=step, lengths=length or (), per_depth=per_depth, windows=windows, seed=seed, say=typer.echo)
    typer.echo(run_dir / EVALUATION)


@bench.command("attention")
def bench_attention(
    json_file: JsonFile = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="TOKENSxSEQS", help="one shape, e.g. 2048x8; repeat")] = None,
    picture: Picture = None,
    backend: Annotated[str, typer.Option(help="auto, reference, torch, triton or flash")] = "auto",
) -> None:
    """Time and memory of every part of NSA, forward and backward, against dense attention; parity first."""
    from nsa_lab.bench.attention import parse_shape, run_attention_bench

    run_attention_bench(_shapes(parse_shape, shape), json_file, backend=backend, picture=picture)


@bench.command("train")
def bench_train(
    json_file: JsonFile = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="TOKENSxMICRO", help="one shape, e.g. 2048x32; repeat")] = None,
    picture: Picture = None,
) -> None:
    """Tokens per second of NSA and of its dense twin, training, at each length."""
    from nsa_lab.bench.train import parse_shape, run_train_bench

    run_train_bench(_shapes(parse_shape, shape), json_file, picture=picture)


@bench.command("curves")
def bench_curves(
    json_file: JsonFile = None,
    picture: Picture = None,
    steps: Annotated[int, typer.Option(min=10, help="optimiser steps of each curve")] = 300,
) -> None:
    """Loss curves of one configuration, computed in every way this machine has; exit code 3 if they are not one curve."""
    from nsa_lab.bench.curves import run_curves

    found = run_curves(steps, json_file, picture, say=typer.echo)
    for name, apart in found["apart_nats"].items():
        typer.echo(f"{name:<26} {apart:.4f} nats from the first at most (allowed {found['band_nats']:g})")
    raise typer.Exit(directory.EXIT_DONE if found["ok"] else directory.EXIT_HALTED)


@bench.command("trainer")
def bench_trainer(
    json_file: JsonFile = None,
    ranks: Ranks = 1,
    steps: Annotated[int | None, typer.Option(min=2, help="length of a timed stretch, optimiser steps")] = None,
) -> None:
    """What telemetry, a save and a resume take; with --ranks, tokens per second of that many GPUs against one's."""
    from nsa_lab.bench.trainer import run_trainer_bench

    run_trainer_bench(json_file, ranks=ranks, steps=steps)


@bench.command("stands")
def bench_stands(
    record: Annotated[list[Path], typer.Argument(metavar="FILE...", help="records that --json wrote")],
) -> None:
    """Of which code records are, and whether that is still this code; exit code 3 if one is not known to be."""
    from nsa_lab.bench import records

    read = {file: records.read(file) for file in record}
    for file, found in read.items():
        typer.echo(f"{file.name}: {records.standing(found)} ({records.code_text(found)})")
    stand = all(records.standing(found) == records.STANDS for found in read.values())
    raise typer.Exit(directory.EXIT_DONE if stand else directory.EXIT_HALTED)


def _shapes(parse: Callable[[str], Any], texts: list[str] | None) -> tuple[Any, ...] | None:
    try:
        return tuple(parse(text) for text in texts or []) or None
    except ValueError as error:
        raise ConfigError(f"--shape: {error}") from None


def exit_code(run_dir: Path, problem: str | None = None) -> int:
    """What a run's state means for a shell: the run first, and the notebook's `problem` only where the run is fine."""
    state = launch.state(run_dir)
    if state == directory.HALTED:
        return directory.read_status(run_dir).get("exit_code") or directory.EXIT_HALTED
    if problem == "interrupted" or (state == directory.PREEMPTED and not problem):
        return directory.EXIT_STOPPED
    return directory.EXIT_DONE if state == directory.DONE and not problem else directory.EXIT_BUG


def _notebook_runner() -> ModuleType:
    try:
        require("papermill", "nbclient", "nbconvert")
    except MissingPackage as error:
        raise ConfigError(f"nsa-lab run: {error}, or use nsa-lab train, which needs no notebook") from None
    from nsa_lab.workbook import runner

    return runner


def _check_startable(config: RunConfig, ranks: int = 1) -> None:
    """Raise what is wrong with the data, the device, the model's size or the backend, before anything is written."""
    import torch

    from nsa_lab.attention import resolve_backend
    from nsa_lab.data import check
    from nsa_lab.train.distributed import World
    from nsa_lab.train.parts import choose_device

    check(config.data, config.model.vocab_size)
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    resolve_backend(choose_device(config, World(size=ranks)), dtype, config.nsa, config.model, config.runtime.backend)


def _usage_errors() -> tuple[type[Exception], ...]:
    """Errors that the user can put right; imported once one has happened, since their packages are slow to import."""
    from nsa_lab.attention import BackendError
    from nsa_lab.data import DataError
    from nsa_lab.inference import NoCheckpoint

    return DataError, BackendError, NotImplementedError, NoCheckpoint


def _refuse(error: Exception) -> None:
    for line in str(error).splitlines():
        typer.echo(f"nsa-lab: {line}", err=True)
    sys.exit(directory.EXIT_USAGE)


def _say_started(run_dir: Path, pid: int) -> None:
    run = run_dir.name
    typer.echo(f"process {pid} trains {run}; nsa-lab follow {run} shows it, nsa-lab stop {run} ends it")
    typer.echo(run_dir)


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


if __name__ == "__main__":
    main()
