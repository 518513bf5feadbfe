"""The command that trains one preset in several variants, at several seeds each, and says what came out: sweep."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_lab.cli.common import Outputs
from nsa_lab.config import ConfigError, RunConfig, UsageError
from nsa_lab.config.optional_deps import MissingPackage
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.atomic_io import write_json

if TYPE_CHECKING:
    from nsa_lab.health.sweep_results import SeedMean, VariantResult
    from nsa_lab.runs.sweep_runner import Sweep, SweepRunState

app = typer.Typer()


@app.command("sweep")
def sweep_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="a file of params/sweeps/, or the path of a YAML file")],
    outputs: Outputs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be trained, and train nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="what is known by now, and train nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the table as JSON")] = False,
) -> None:
    """Train one preset in variants, several seeds each, one run per GPU; ends with a table. Again: it goes on."""
    if dry_run and (table or as_json):
        raise ConfigError("nsa-lab sweep: --dry-run says what would be trained, and no table; leave --table and --json out")
    from nsa_lab.runs.sweep_runner import Sweep

    sweep = Sweep.load(file, resolve.get_outputs_dir(outputs))
    if dry_run:
        _show_plan(sweep)
        return
    if table:
        _show_results(sweep, as_json)
        return

    def say(line: str) -> None:
        typer.echo(line, err=True)

    gpus = _find_gpus(sweep)
    with sweep.lock():
        # Whatever asks this process to stop asks its runs.
        for stop in directory.STOP_SIGNALS:
            signal.signal(stop, signal.default_int_handler)
        try:
            ended = sweep.run_all(gpus, say, lambda: _write_results(sweep, lambda _: None))
        except KeyboardInterrupt:
            say(f"stopped; nsa-lab sweep {file} goes on")
            raise typer.Exit(directory.EXIT_STOPPED) from None
        _write_results(sweep, say)
    _show_results(sweep, as_json)
    raise typer.Exit(_report_unfinished(ended, file, say))


def _find_gpus(sweep: Sweep) -> list[str | None]:
    """What to give a run each; the CPU is None. Raises what is wrong with any variant's data, device, size or backend."""
    first = {run.requested.variant: run.requested.config for run in reversed(sweep.get_run_states()) if run.needs_training}
    if not first:
        return [None]
    # In a process of its own, since asking a GPU takes memory of it for as long as the process lives.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        wrong, count = pool.submit(_check_variants, first).result()
    if wrong:
        raise ConfigError("\n".join(wrong))
    on_gpu = any(run.config.runtime.device != "cpu" for run in sweep.runs)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    there = [gpu.strip() or str(number) for number, gpu in zip(range(count), visible + [""] * count, strict=False)]
    there = there if on_gpu else []
    if missing := [gpu for gpu in map(str, sweep.config.gpus) if gpu not in there]:
        instead = f"there is {', '.join(there)}" if there else "no run of this sweep takes one here; remove gpus"
        raise ConfigError(f"gpus = {list(sweep.config.gpus)}: {missing[0]} is none that can be used; {instead}")
    return [str(gpu) for gpu in sweep.config.gpus] or list(there) or [None]


def _check_variants(config_by_variant: dict[str, RunConfig]) -> tuple[list[str], int]:
    """What stands in the way of each variant, a line per problem; and how many GPUs there are."""
    import torch

    from nsa_lab.train.startable import check_startable

    wrong = []
    for variant, config in config_by_variant.items():
        try:
            check_startable(config)
        except (UsageError, NotImplementedError) as error:
            wrong += [f"variant {variant}: {line}" for line in str(error).splitlines()]
    return wrong, torch.cuda.device_count()


def _show_plan(sweep: Sweep) -> None:
    from nsa_lab.cli.status_table import MIN_TABLE_WIDTH
    from nsa_lab.runs.summary import format_steps

    console, rows = Console(), Table("run", "seed", "state", "training", box=None)
    console.width = max(console.width, MIN_TABLE_WIDTH)
    standing = sweep.get_run_states()
    for run in standing:
        rows.add_row(run.name, str(run.requested.seed), run.state or "to start", format_steps(run.requested.config.train))
    console.print(rows)
    typer.echo(
        f"{len(standing)} runs, {sum(run.needs_training for run in standing)} to train; the baseline is {sweep.config.baseline}"
    )


def _write_results(sweep: Sweep, say: Callable[[str], None]) -> None:
    """The table and the picture of what is finished by now, into the sweep's folder."""
    from nsa_lab.health.sweep_results import collect_results
    from nsa_lab.runs.sweep_runner import PICTURE_FILE, TABLE_FILE

    found = collect_results(sweep)
    write_json(sweep.folder / TABLE_FILE, _build_json(sweep, found))
    say(str(sweep.folder / TABLE_FILE))
    try:
        from nsa_lab.report.sweep import write_sweep_plot
    except MissingPackage as error:
        say(f"no picture: {error}")
        return
    if picture := write_sweep_plot(found, sweep.config.name, sweep.folder / PICTURE_FILE):
        say(str(picture))


def _show_results(sweep: Sweep, as_json: bool) -> None:
    from nsa_lab.cli.status_table import MIN_TABLE_WIDTH
    from nsa_lab.health.sweep_results import collect_results
    from nsa_lab.runs.summary import format_duration

    found = collect_results(sweep)
    if as_json:
        typer.echo(json.dumps(_build_json(sweep, found), indent=1, ensure_ascii=False))
        return
    console = Console()
    console.width = max(console.width, MIN_TABLE_WIDTH)
    columns = ("variant", "runs", "bits per byte", "less the baseline", "apart", "parameters", "training", "tokens")
    rows = Table(*columns, box=None)
    for one in found:
        seconds, parameters = ("–" if value is None else value for value in (one.seconds, one.parameters))
        rows.add_row(
            one.name,
            f"{one.n_done} of {len(one.runs)}",
            _format_interval(one.bpb, "{:.4f}"),
            "baseline" if one.name == sweep.config.baseline else _format_interval(one.less_baseline, "{:+.4f}"),
            "–" if one.apart is None else f"{one.apart:.4f}",
            parameters if isinstance(parameters, str) else f"{parameters:,}",
            seconds if isinstance(seconds, str) else format_duration(seconds),
            f"{one.tokens:,}",
        )
    console.print(rows)
    for line in _format_legend(sweep, found):
        console.print(Text(line, overflow="fold"))


def _format_legend(sweep: Sweep, results: list[VariantResult]) -> list[str]:
    seeds = len(sweep.config.seeds)
    lines = [f"validation at the end: mean ± 95 % interval over seeds ({seeds} asked); differences are seed by seed"]
    if any(one.apart is not None for one in results):
        lines.append("apart: the standard deviation of runs of one seed, which differ in nothing that was asked for")
    return lines + [f"{one.name}: {note}" for one in results for note in one.notes]


def _format_interval(estimate: SeedMean | None, number_format: str) -> str:
    if estimate is None:
        return "–"
    return number_format.format(estimate.mean) + (f" ± {estimate.half:.4f}" if estimate.half is not None else " (one seed)")


def _build_json(sweep: Sweep, results: list[VariantResult]) -> dict[str, Any]:
    config = sweep.config
    asked = {"preset": config.preset, "common": config.common, "seeds": list(config.seeds), "repeats": config.repeats}
    return {
        "v": 1,
        "sweep": config.name,
        **asked,
        "baseline": config.baseline,
        "variants": [asdict(one) for one in results],
    }


def _report_unfinished(attempted: list[SweepRunState], file: str, say: Callable[[str], None]) -> int:
    """Say of each run that is not done why, and what to do; the exit code."""
    left = [run for run in attempted if run.state != directory.DONE]
    for run in left:
        again = f"nsa-lab sweep {file} goes on with it"
        if run.state == directory.HALTED:
            again = f"nsa-lab resume {run.name} goes on with it; without its folder the sweep starts it anew"
        unsaid = "its status does not say why" if run.run_dir else "it could not be started"
        why = run.status.get("reason") or unsaid
        say(f"{run.name} is {run.state or 'not there'}: {why}; {again}")
    codes = {run.status.get("exit_code") for run in left}
    if directory.EXIT_HALTED in codes and codes <= {directory.EXIT_HALTED, directory.EXIT_STOPPED}:
        return directory.EXIT_HALTED
    if codes <= {directory.EXIT_STOPPED}:
        return directory.EXIT_STOPPED if left else directory.EXIT_DONE
    return directory.EXIT_BUG
