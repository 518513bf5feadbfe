"""The sweep command: train variants of one preset with several seeds each, and tabulate the results."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nsa_lab.cli.common import Outputs, PlainConsole, echo
from nsa_lab.config import ConfigError, RunConfig, UsageError
from nsa_lab.config.optional_deps import MissingPackage
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.atomic_io import write_json
from nsa_lab.runs.tables import Table
from nsa_lab.runs.text_output import dump_json

if TYPE_CHECKING:
    from nsa_lab.health.sweep_results import SeedMean, VariantResult
    from nsa_lab.runs.sweep_runner import Sweep, SweepRunState

app = typer.Typer()
MIN_TABLE_WIDTH = 120  # names of runs are not truncated; a narrower terminal wraps the line


@app.command("sweep")
def sweep_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Sweep (a file in params/sweeps/ without .yaml) or path of a YAML file")
    ],
    outputs: Outputs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs without training")] = False,
    table: Annotated[bool, typer.Option("--table", help="Show the results so far without training")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON")] = False,
) -> None:
    """Train variants of a preset over several seeds. One run per GPU; shows a table. Run again to continue."""
    if dry_run and (table or as_json):
        raise ConfigError("nsa-lab sweep: --dry-run lists runs and shows no table; omit --table and --json")
    from nsa_lab.runs.sweep_runner import Sweep

    folder = resolve.get_outputs_dir(outputs)
    sweep = Sweep.load(file, folder, functools.partial(_describe_source, folder))
    if dry_run:
        _show_plan(sweep)
        return
    if table:
        _show_results(sweep, as_json)
        return

    def log(line: str) -> None:
        echo(line, err=True)

    gpus = _find_gpus(sweep)
    with sweep.lock():
        # A stop signal to this process also stops its runs.
        for stop_signal in directory.STOP_SIGNALS:
            signal.signal(stop_signal, signal.default_int_handler)
        try:
            attempted = sweep.run_all(gpus, log, lambda: _write_results(sweep, lambda _: None))
        except KeyboardInterrupt:
            log(f"stopped; continue with nsa-lab sweep {file}")
            raise typer.Exit(directory.EXIT_STOPPED) from None
        _write_results(sweep, log)
    _show_results(sweep, as_json)
    raise typer.Exit(_report_unfinished(attempted, file, log))


def _describe_source(folder: Path, source: str) -> dict[str, Any]:
    """Return the settings of runs that convert `source`, as `nsa-lab convert` does."""
    from nsa_lab.convert import describe_source  # needs the extra hf

    return describe_source(source, folder)


def _find_gpus(sweep: Sweep) -> list[str | None]:
    """Return one device per concurrent run: GPU ids, or [None] for the CPU.

    Raises ConfigError for variants whose data, device, size or backend cannot be used.
    """
    config_by_variant = {
        run.requested.variant: run.requested.config for run in reversed(sweep.get_run_states()) if run.needs_training
    }
    if not config_by_variant:
        return [None]
    # In a separate process: a CUDA context uses GPU memory until its process exits.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems, n_gpus = pool.submit(_check_variants, config_by_variant).result()
    if problems:
        raise ConfigError("\n".join(problems))
    use_gpu = any(run.config.runtime.device != "cpu" for run in sweep.runs)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    available = [gpu.strip() or str(number) for number, gpu in zip(range(n_gpus), visible + [""] * n_gpus, strict=False)]
    available = available if use_gpu else []
    if missing := [gpu for gpu in map(str, sweep.config.gpus) if gpu not in available]:
        remedy = f"available: {', '.join(available)}" if available else "no run of this sweep uses a GPU here; remove gpus"
        raise ConfigError(f"gpus = {list(sweep.config.gpus)}: GPU {missing[0]} is not available; {remedy}")
    return [str(gpu) for gpu in sweep.config.gpus] or list(available) or [None]


def _check_variants(config_by_variant: dict[str, RunConfig]) -> tuple[list[str], int]:
    """Return the problems that prevent a variant from starting, one line each, and the number of GPUs."""
    import torch

    from nsa_lab.train.preflight.startup_checks import check_startable

    problems = []
    for variant, config in config_by_variant.items():
        try:
            check_startable(config)
        except (UsageError, NotImplementedError) as error:
            problems += [f"variant {variant}: {line}" for line in str(error).splitlines()]
    return problems, torch.cuda.device_count()


def _show_plan(sweep: Sweep) -> None:
    from nsa_lab.runs.summary import format_steps

    console = PlainConsole()
    console.width = max(console.width, MIN_TABLE_WIDTH)
    run_states = sweep.get_run_states()
    rows = [
        (run.name, str(run.requested.seed), run.state or "to start", format_steps(run.requested.config.train))
        for run in run_states
    ]
    console.print(Table(("run", "seed", "state", "training"), rows))
    echo(
        f"{len(run_states)} runs, {sum(run.needs_training for run in run_states)} to train; "
        f"the baseline is {sweep.config.baseline}"
    )


def _write_results(sweep: Sweep, log: Callable[[str], None]) -> None:
    """Write the table and the figure of all finished runs into the sweep's folder."""
    from nsa_lab.health.sweep_results import collect_results
    from nsa_lab.runs.sweep_runner import PICTURE_FILE, TABLE_FILE

    results = collect_results(sweep)
    write_json(sweep.folder / TABLE_FILE, _build_json(sweep, results))
    log(str(sweep.folder / TABLE_FILE))
    try:
        from nsa_lab.report import write_sweep_plot
    except MissingPackage as error:
        log(f"no figure: {error}")
        return
    if picture := write_sweep_plot(results, sweep.config.name, sweep.folder / PICTURE_FILE):
        log(str(picture))


def _show_results(sweep: Sweep, as_json: bool) -> None:
    from nsa_lab.health.sweep_results import collect_results
    from nsa_lab.runs.summary import format_duration

    results = collect_results(sweep)
    if as_json:
        echo(dump_json(_build_json(sweep, results)))
        return
    console = PlainConsole()
    console.width = max(console.width, MIN_TABLE_WIDTH)
    columns = ("variant", "runs", "bits per byte", "minus baseline", "repeat std", "parameters", "training", "tokens")
    rows = [
        (
            result.name,
            f"{result.n_done} of {len(result.runs)}",
            _format_interval(result.bpb, "{:.4f}"),
            "baseline" if result.name == sweep.config.baseline else _format_interval(result.less_baseline, "{:+.4f}"),
            None if result.repeat_std is None else f"{result.repeat_std:.4f}",
            result.parameters,
            None if result.seconds is None else format_duration(result.seconds),
            result.tokens,
        )
        for result in results
    ]
    console.print(Table(columns, rows))
    for line in _format_legend(sweep, results):
        console.print(Text(line, overflow="fold"))


def _format_legend(sweep: Sweep, results: list[VariantResult]) -> list[str]:
    n_seeds = len(sweep.config.seeds)
    lines = [f"final validation: mean ± 95% interval over seeds ({n_seeds} requested); differences are paired by seed"]
    if any(result.repeat_std is not None for result in results):
        lines.append("repeat std: standard deviation over repeated runs with equal settings and seed")
    return lines + [f"{result.name}: {note}" for result in results for note in result.notes]


def _format_interval(estimate: SeedMean | None, number_format: str) -> str:
    if estimate is None:
        return "–"
    return number_format.format(estimate.mean) + (f" ± {estimate.half:.4f}" if estimate.half is not None else " (one seed)")


def _build_json(sweep: Sweep, results: list[VariantResult]) -> dict[str, Any]:
    config = sweep.config
    settings = {"preset": config.preset, "common": config.common, "seeds": list(config.seeds), "repeats": config.repeats}
    return {
        "v": 1,
        "sweep": config.name,
        **settings,
        "baseline": config.baseline,
        "variants": [asdict(result) for result in results],
    }


def _report_unfinished(attempted: list[SweepRunState], file: str, log: Callable[[str], None]) -> int:
    """Log the reason and the remedy for each run that is not done. Return the exit code."""
    unfinished = [run for run in attempted if run.state != directory.DONE]
    for run in unfinished:
        remedy = f"continue with nsa-lab sweep {file}"
        if run.state == directory.HALTED:
            remedy = f"continue with nsa-lab resume {run.name}, or delete its directory and the sweep starts it again"
        default_reason = "no reason recorded in its status" if run.run_dir else "it could not be started"
        reason = run.status.get("reason") or default_reason
        log(f"{run.name} is {run.state or 'missing'}: {reason}; {remedy}")
    codes = {run.status.get("exit_code") for run in unfinished}
    if directory.EXIT_HALTED in codes and codes <= {directory.EXIT_HALTED, directory.EXIT_STOPPED}:
        return directory.EXIT_HALTED
    if codes <= {directory.EXIT_STOPPED}:
        return directory.EXIT_STOPPED if unfinished else directory.EXIT_DONE
    return directory.EXIT_BUG
