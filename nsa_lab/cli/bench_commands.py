"""Commands that measure: bench attention, tune, decode, train, curves and trainer; and limits and stands, of records."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_lab.cli.common import Ranks
from nsa_lab.config import Backend, ConfigError
from nsa_lab.runs import directory, resolve

app = typer.Typer(no_args_is_help=True, help="Measure kernels, or training steps, against dense attention.")


def _check_output_file(file: Path | None) -> Path | None:
    """Asked before minutes are measured."""
    if file and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{file} cannot be written; name a file in a folder that is there")
    return file


Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", callback=_check_output_file, help="draw the result there")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=_check_output_file, help="write the numbers there")
]


@app.command("attention")
def bench_attention(
    json_file: JsonFile = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="TOKENSxSEQS", help="one shape, 2048x8 or 4096x1xH64xG4xD192xV128; repeat")
    ] = None,
    picture: Picture = None,
    backend: Annotated[Backend, typer.Option(help="what computes it")] = "auto",
    packed: Annotated[bool, typer.Option("--packed", help="documents in one row instead, beside batched calls")] = False,
    parts: Annotated[bool, typer.Option("--parts", help="also each part's share of what the device allows")] = False,
) -> None:
    """Time and memory of every part of NSA, forward and backward, against dense attention; parity first."""
    from nsa_lab.bench.attention_speed import parse_shape, run_attention_bench

    if packed:
        if shape or picture or parts:
            raise typer.BadParameter(
                "it has shapes of its own, no parts, and draws no picture; leave --shape, --parts and --picture out",
                param_hint="--packed",
            )
        from nsa_lab.bench.packed_attention import run_packed_bench

        run_packed_bench(json_file, backend=backend)
        return
    shapes = _parse_values(parse_shape, shape, "--shape")
    run_attention_bench(shapes, json_file, backend=backend, picture=picture, parts=parts)


@app.command("limits")
def bench_limits(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="what bench attention wrote")],
    picture: Picture = None,
    flops: Annotated[float | None, typer.Option(min=1.0, help="FLOP/s of a large product [the record's]")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1.0, help="bytes per second of the memory [the record's]")] = None,
) -> None:
    """How near each part of a record comes to what its device allows, and the roofline as a picture."""
    from rich.console import Console

    from nsa_lab.bench import records
    from nsa_lab.bench import roofline as limits
    from nsa_lab.bench.attention_speed import TABLE_WIDTH

    found = records.read(record)
    rows, rates = limits.read_rows(found, flops, bandwidth)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    console.print(limits.make_table(rows, rates))
    if picture:
        limits.plot_roofline(rows, rates, f"{found['device']}, {found['when'][:10]}", picture)


@app.command("tune")
def bench_tune(
    json_file: JsonFile = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="TOKENSxSEQS", help="one shape, 2048x8 or 4096x1xH64xG4xD192xV128; repeat")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help='one kernel, e.g. "band_dq, window"; repeat [all]')
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="tiles of each kernel at most")] = 40,
) -> None:
    """Time other tiles of the kernels than those of the launch table; parity first, and nothing is changed."""
    from nsa_lab.bench.attention_speed import parse_shape
    from nsa_lab.bench.tune_tiles import parse_kernel, run_tune

    kernels = _parse_values(parse_kernel, kernel, "--kernel")
    run_tune(_parse_values(parse_shape, shape, "--shape"), json_file, kernels=kernels, max_tiles=most)


@app.command("decode")
def bench_decode(
    json_file: JsonFile = None,
    length: Annotated[
        list[int] | None, typer.Option(min=512, help="tokens before the new one; repeat [4096 to 131072]")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="sequences at once; repeat [1]")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="of the model [2; on a GPU 12]")] = None,
    backend: Annotated[
        str | None, typer.Option(help="of attention over a cache: torch or triton [torch; on a GPU triton]")
    ] = None,
    picture: Picture = None,
) -> None:
    """Time of one more token against context, of NSA and of dense attention; parity first."""
    from nsa_lab.bench.decode_speed import run_decode_bench

    run_decode_bench(length, json_file, batches=batch or (1,), layers=layers, backend=backend, picture=picture)


@app.command("train")
def bench_train(
    json_file: JsonFile = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="TOKENSxMICRO", help="one shape, e.g. 2048x32; repeat")] = None,
    picture: Picture = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="the model of params/NAME.yaml, or of a file"),
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="NSA alone, with documents masked beside one text")
    ] = False,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="PATH", help="for --documents: a file, folder or glob of text")
    ] = None,
) -> None:
    """Tokens per second of NSA and of its dense twin, training, at each length."""
    from nsa_lab.bench.training_speed import parse_shape, run_train_bench

    if documents:
        if picture:
            raise typer.BadParameter("it draws no picture; leave --picture out", param_hint="--documents")
        if preset:
            raise typer.BadParameter("it times the production model; leave --preset out", param_hint="--documents")
        from nsa_lab.bench.document_masking import run_documents_bench

        run_documents_bench(_parse_values(parse_shape, shape, "--shape"), json_file, text=text)
        return
    if text:
        raise typer.BadParameter("it is read with --documents alone", param_hint="--text")
    model = resolve.load_config(preset, []).model if preset else None
    run_train_bench(_parse_values(parse_shape, shape, "--shape"), json_file, model=model, picture=picture)


@app.command("curves")
def bench_curves(
    json_file: JsonFile = None,
    picture: Picture = None,
    steps: Annotated[int, typer.Option(min=10, help="optimiser steps of each curve")] = 300,
) -> None:
    """Loss curves of one configuration, computed in every way this machine has; exit code 3 if they are not one curve."""
    from nsa_lab.bench.loss_curves import run_curves

    found = run_curves(steps, json_file, picture, log=typer.echo)
    for name, apart in found["apart_nats"].items():
        typer.echo(f"{name:<26} {apart:.4f} nats from the first at most (allowed {found['band_nats']:g})")
    raise typer.Exit(directory.EXIT_DONE if found["ok"] else directory.EXIT_HALTED)


@app.command("trainer")
def bench_trainer(
    json_file: JsonFile = None,
    ranks: Ranks = 1,
    steps: Annotated[int | None, typer.Option(min=2, help="length of a timed stretch, optimiser steps")] = None,
) -> None:
    """What telemetry, a save and a resume take; with --ranks, tokens per second of that many GPUs against one's."""
    from nsa_lab.bench.trainer_overhead import run_trainer_bench

    run_trainer_bench(json_file, ranks=ranks, steps=steps)


@app.command("stands")
def bench_stands(
    record: Annotated[list[Path], typer.Argument(metavar="FILE...", help="records that --json wrote")],
) -> None:
    """Of which code records are, and whether that is still this code; exit code 3 if one is not known to be."""
    from nsa_lab.bench import records

    found = {file: records.read(file) for file in record}
    for file, one in found.items():
        typer.echo(f"{file.name}: {records.standing(one)} ({records.code_text(one)})")
    stand = all(records.standing(one) == records.STANDS for one in found.values())
    raise typer.Exit(directory.EXIT_DONE if stand else directory.EXIT_HALTED)


def _parse_values(parse: Callable[[str], Any], texts: list[str] | None, option: str) -> tuple[Any, ...] | None:
    try:
        return tuple(parse(text) for text in texts or []) or None
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
