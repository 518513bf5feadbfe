"""Commands that train: run, train, resume, stop, and what to ask before: plan, preflight."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from nsa_lab.cli.common import ConfigName, Outputs, Overrides, Ranks, Run, get_exit_code
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.optional_deps import MissingPackage, require
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError

app = typer.Typer()


@app.command()
def run(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="a file of params/, or a YAML path")] = None,
    param: Overrides = None,
    outputs: Outputs = None,
    notebook: Annotated[str | None, typer.Option(help="03_smoke_training, 04_production_run, or a path")] = None,
    into: Annotated[str | None, typer.Option(metavar="RUN", help="execute the notebook again on a run that exists")] = None,
) -> None:
    """Train in a notebook, headlessly; ends with the path of the run's report.html."""
    folder = resolve.get_outputs_dir(outputs)
    if name is not None and into is None:
        config = resolve.load_config(name, param or [])
        source = resolve.find_notebook(notebook, config)

        from nsa_lab.train.startable import check_startable

        check_startable(config)
        runner = _import_notebook_runner()
        run_dir = lifecycle.create_run(config, folder)
    elif into is not None and name is None:
        run_dir = resolve.find_run(into, folder)
        if param:
            raise ConfigError("nsa-lab run --into takes no -p: a run keeps its configuration; start a new one to change it")
        source = resolve.find_notebook(notebook, RunConfig.from_yaml(run_dir / directory.CONFIG))
        runner = _import_notebook_runner()
    else:
        raise ConfigError("nsa-lab run: give the NAME of a params file, for example smoke, or --into RUN, one of the two")
    console = Console(stderr=True)
    console.print(f"{source.stem} on {run_dir}", highlight=False, soft_wrap=True)
    problem = runner.execute(source, run_dir, console)
    runner.report_on(run_dir, problem, console)
    raise typer.Exit(get_exit_code(run_dir, problem))


@app.command()
def train(
    name: ConfigName,
    param: Overrides = None,
    outputs: Outputs = None,
    ranks: Ranks = 1,
    foreground: Annotated[bool, typer.Option("--foreground", help="train in this process")] = False,
) -> None:
    """Train without a notebook: a detached process, which outlives this terminal."""
    config = resolve.load_config(name, param or [])

    from nsa_lab.train.startable import check_startable

    check_startable(config, ranks)
    run_dir = lifecycle.create_run(config, resolve.get_outputs_dir(outputs))
    if foreground:
        command = [sys.executable, "-m", "nsa_lab.train", str(run_dir)] + (["--ranks", str(ranks)] if ranks > 1 else [])
        # The trainer takes this process's place, so that signals reach it and its exit code is ours.
        os.execv(sys.executable, command)
    _print_started(run_dir, lifecycle.start(run_dir, ranks=ranks))


@app.command()
def resume(run: Run, outputs: Outputs = None, ranks: Ranks = 1) -> None:
    """Go on with a run from its newest checkpoint, detached; a trainer that is at it already is left alone."""
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    does = "already trains" if lifecycle.is_alive(run_dir) else "trains"
    _print_started(run_dir, lifecycle.resume(run_dir, ranks=ranks), does)


@app.command()
def stop(
    run: Run,
    outputs: Outputs = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for the trainer to save and exit")] = 120.0,
) -> None:
    """Ask a trainer to save and exit, and wait for it."""
    if not 0 <= timeout < math.inf:
        raise ConfigError(f"--timeout {timeout:g}: expected a number of seconds, 0 or more; leave it out to wait 120")
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    try:
        state = lifecycle.stop(run_dir, timeout)
    except TimeoutError as error:
        raise RunDirectoryError(str(error)) from None
    typer.echo(
        f"{run_dir.name} is {state}; nsa-lab resume {run_dir.name} goes on"
        if state != directory.DONE
        else f"{run_dir.name} is DONE"
    )


@app.command()
def plan(
    name: ConfigName,
    param: Overrides = None,
    ranks: Ranks = 1,
    tokens_per_s: Annotated[float | None, typer.Option(help="the speed to plan with, all ranks together")] = None,
    # Named, since typer 0.27.0 loses an option called --run that is not.
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="a run to compare the plan with")] = None,
    outputs: Outputs = None,
    show_baseline: Annotated[
        bool, typer.Option("--twin", help="the dense twin with as many parameters, and what differs")
    ] = False,
    show_decoding: Annotated[
        bool, typer.Option("--decode", help="what generating takes, and how many sequences fit here")
    ] = False,
) -> None:
    """What a run will take: parameters, tokens, FLOPs, memory, disk, hours; with --run, beside what that run took."""
    config = resolve.load_config(name, param or [])
    # Of the run, not of this machine: a plan is made anywhere.
    config.train.check_ranks(ranks)
    if tokens_per_s is not None and not 0 < tokens_per_s < math.inf:
        raise ConfigError(
            f"--tokens-per-s {tokens_per_s:g}: expected a number above 0; leave it out where no speed is known"
        )
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs)) if run else None

    from nsa_lab.train.estimate import estimate_resources as plan_of
    from nsa_lab.train.matched_baseline import build_matched_baseline
    from nsa_lab.train.reference_throughput import find_reference_speed

    # A measurement of this very shape says more than the gate, which is the slowest that a run accepts.
    known = find_reference_speed(config) if not tokens_per_s and ranks == 1 else None
    if known:
        speed, whence = known[0], f"measured on one {known[1]}; for another GPU give --tokens-per-s"
    elif not tokens_per_s and (run_before := _find_measured_run(config, resolve.get_outputs_dir(outputs))):
        speed, whence = run_before[1], f"that of {run_before[0]}, a run of this very configuration"
    else:
        speed, whence = tokens_per_s, None if tokens_per_s else _describe_missing_speed(config)
    typer.echo(plan_of(config, speed, ranks))
    if whence:
        typer.echo(f"  (the speed: {whence})")
    if show_baseline:
        typer.echo(f"\n{build_matched_baseline(config)}")
    if show_decoding:
        typer.echo(f"\n{_format_decoding_estimate(config)}")
    if run_dir:
        from nsa_lab.runs.history import History
        from nsa_lab.workbook.plan_vs_actual import compare_plan_with_run

        typer.echo(f"\n{run_dir.name}, planned with the speed that its preflight measured:")
        typer.echo(compare_plan_with_run(History.read(run_dir), tokens_per_s))


def _format_decoding_estimate(config: RunConfig) -> str:
    import torch

    from nsa_lab.inference import kv_cache_size
    from nsa_lab.train.estimate import build_meta_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return kv_cache_size.format_decoding_estimate(
        config.model, build_meta_model(config.model).parameter_count(), kv_cache_size.get_free_bytes(device)
    )


def _find_measured_run(config: RunConfig, folder: Path) -> tuple[str, float] | None:
    """The newest run of exactly this configuration in the folder that recorded a speed: its name, tokens per second."""
    from nsa_lab.runs.history import History, compute_median_speeds

    for run_dir in reversed(resolve.list_run_dirs(folder)):
        try:
            history = History.read(run_dir)
        except (ConfigError, RunDirectoryError):
            continue  # the list of runs names it; a plan does without
        if history.config.hash() == config.hash() and (speeds := compute_median_speeds(history)):
            return history.run, speeds[-1]
    return None


def _describe_missing_speed(config: RunConfig) -> str:
    if config.train.min_tokens_per_s:
        return "train.min_tokens_per_s, the slowest that the run accepts; give --tokens-per-s"
    return f"not known before one was measured: nsa-lab preflight {config.name} does, or give --tokens-per-s"


@app.command()
def preflight(name: ConfigName, param: Overrides = None, outputs: Outputs = None) -> None:
    """Every check before a run, one line each, without a run; exit code 3 if one fails."""
    config = resolve.load_config(name, param or [])

    from nsa_lab.train.preflight.startup_checks import run_preflight_without_run
    from nsa_lab.train.startable import check_startable

    check_startable(config)
    failed = 0
    for check in run_preflight_without_run(
        config, resolve.get_outputs_dir(outputs), report=lambda line: typer.echo(line, err=True)
    ):
        failed += not check.ok
        mark = typer.style("ok  ", fg="green") if check.ok else typer.style("FAIL", fg="red")
        typer.echo(f"{mark} {check.name:14} {check.value}  [limit: {check.limit}]  {check.seconds:.1f} s")
    raise typer.Exit(directory.EXIT_HALTED if failed else directory.EXIT_DONE)


@app.command()
def warmup(
    name: ConfigName,
    param: Overrides = None,
    threads: Annotated[int | None, typer.Option(min=1, help="kernels compiled at once [the cores of this machine]")] = None,
) -> None:
    """Compile a run's GPU kernels ahead, in parallel, into Triton's cache; nothing is trained."""
    config = resolve.load_config(name, param or [])

    from nsa_lab.train.precompile import precompile_kernels

    warmed = precompile_kernels(config, threads)
    typer.echo(f"{warmed.n_kernels} kernels for {config.name} compiled in {warmed.seconds:.1f} s, {warmed.threads} at once")


def _import_notebook_runner() -> ModuleType:
    try:
        require("papermill", "nbclient", "nbconvert")
    except MissingPackage as error:
        raise ConfigError(f"nsa-lab run: {error}, or use nsa-lab train, which needs no notebook") from None
    from nsa_lab.report import notebook_runner

    return notebook_runner


def _print_started(run_dir: Path, pid: int, verb: str = "trains") -> None:
    home = run_dir.parent
    run = run_dir.name if home == resolve.get_outputs_dir() else f"{run_dir.name} --outputs {shlex.quote(str(home))}"
    typer.echo(f"process {pid} {verb} {run_dir.name}; nsa-lab follow {run} shows it, nsa-lab stop {run} ends it")
    typer.echo(run_dir)
