"""Benchmark commands: bench attention, tune, decode, train, curves, trainer, ranks; limits reads a recorded result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nsa_lab.cli.common import MAX_RANKS, MAX_TOKENS, Ranks, check_output_option, check_picture_option, echo, parse_path
from nsa_lab.config import MAX_COUNT, MAX_LAYERS, MAX_SIZE, Backend, ConfigError
from nsa_lab.runs import directory, resolve

app = typer.Typer(no_args_is_help=True, help="Benchmark NSA against dense attention.")


Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        metavar="FILE",
        parser=parse_path,
        callback=check_picture_option,
        help="Write a figure to FILE: png, jpg, pdf or svg",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", parser=parse_path, callback=check_output_option, help="Write the results to FILE as JSON"
    ),
]


Device = Annotated[
    str | None, typer.Option("--device", metavar="cuda|cpu", help="Device [default: cuda; without a GPU it must be cpu]")
]


def _resolve_device(device: str | None) -> str:
    """Return the device of a GPU benchmark. Raises `ConfigError` without a GPU, unless the CPU is requested."""
    if device not in (None, "cuda", "cpu"):
        raise ConfigError(f"--device {device}: expected cuda or cpu")
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            "this is a GPU benchmark, and torch finds no CUDA device; --device cpu runs it at a small size, which tests "
            "the code and measures nothing of interest; nsa-lab demo measures decoding on a CPU"
        )
    return device or "cuda"


@app.command("attention")
def bench_attention(
    json_file: JsonFile = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="TOKENSxSEQS", help="Shape, 2048x8 or 4096x1xH64xG4xD192xV128 (repeatable)")
    ] = None,
    picture: Picture = None,
    backend: Annotated[Backend, typer.Option(help="Attention backend")] = "auto",
    packed: Annotated[bool, typer.Option("--packed", help="Compare packed documents with batched calls instead")] = False,
    parts: Annotated[bool, typer.Option("--parts", help="Also report each part as a fraction of the device limit")] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME", help="Preset or YAML file whose branches, indexer and heads are timed instead"
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Benchmark NSA against dense attention, forward and backward. Measures time and memory after a parity check."""
    from nsa_lab.bench.attention_rows import parse_shape

    model = resolve.load_config(preset, []).model if preset is not None else None
    shapes = _parse_values(lambda text: parse_shape(text, model), shape, "--shape")
    if packed:
        if shape or picture or parts or preset:
            raise typer.BadParameter(
                "it uses fixed shapes and has no parts and no figure; omit --shape, --parts, --preset and --picture",
                param_hint="--packed",
            )
        device = _resolve_device(device)
        from nsa_lab.bench.packed_attention import run_packed_bench

        run_packed_bench(json_file, backend=backend, device=device)
        return
    device = _resolve_device(device)
    from nsa_lab.bench.attention_speed import run_attention_bench

    run_attention_bench(shapes, json_file, backend=backend, model=model, picture=picture, parts=parts, device=device)


@app.command("limits")
def bench_limits(
    record: Annotated[
        Path, typer.Argument(metavar="RECORD", parser=parse_path, help="JSON file written by bench attention")
    ],
    picture: Picture = None,
    flops: Annotated[
        float | None, typer.Option(min=1.0, help="FLOP/s of a large matrix product [default: from RECORD]")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1.0, help="Memory bandwidth in bytes per second [default: from RECORD]")
    ] = None,
) -> None:
    """Compare a recorded benchmark with the limits of its device. Prints one row per part; --picture plots the roofline."""
    from nsa_lab.bench.attention_rows import parse_record, read_record

    recorded_bench = read_record(record)
    parse_record(recorded_bench, flops, bandwidth)
    from nsa_lab.bench import harness, roofline

    rows, rates = roofline.read_rows(recorded_bench, flops, bandwidth)
    harness.Output().print(roofline.make_limit_table(rows, rates))
    if picture:
        roofline.plot_roofline(rows, rates, f"{recorded_bench['device']}, {recorded_bench['when'][:10]}", picture)


@app.command("tune")
def bench_tune(
    json_file: JsonFile = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="TOKENSxSEQS", help="Shape, 2048x8 or 4096x1xH64xG4xD192xV128 (repeatable)")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help='Kernel, e.g. "band_dq, window" (repeatable) [default: all]')
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Maximum number of tiles per kernel")] = 40,
    device: Device = None,
) -> None:
    """Time kernel tiles that are not in the launch table. Each passes a parity check first. The table is not changed."""
    from nsa_lab.bench.attention_rows import parse_shape
    from nsa_lab.bench.tuned_kernels import parse_kernel

    shapes = _parse_values(parse_shape, shape, "--shape")
    kernels = _parse_values(parse_kernel, kernel, "--kernel")
    device = _resolve_device(device)
    from nsa_lab.bench.tune_tiles import run_tune

    run_tune(shapes, json_file, kernels=kernels, max_tiles=most, device=device)


@app.command("decode")
def bench_decode(
    json_file: JsonFile = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=512, max=MAX_TOKENS, help="Context length in tokens (repeatable) [default: 4096 to 131072]"),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, max=MAX_SIZE, help="Batch size (repeatable) [default: 1]")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LAYERS, help="Number of layers [default: 2; on a GPU 12; with --preset all]"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of cached attention: torch or triton [default: torch; on a GPU triton]")
    ] = None,
    picture: Picture = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Preset or YAML file whose model is timed instead; given twice, the second is the dense baseline "
            "[default: the same model with dense attention]",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cuda|cpu", help="Device [default: cuda; without a GPU cpu]")
    ] = None,
) -> None:
    """Benchmark decode time per token by context length.

    Times NSA and dense attention after a parity check, with the bytes that a step reads and a sequence caches.
    """
    if len(preset or []) > 2:
        raise typer.BadParameter(
            f"expected a model and its baseline, got {len(preset or [])} presets", param_hint="--preset"
        )
    models = [resolve.load_config(name, []).model for name in preset or []]
    device = _resolve_device(device) if device else None
    from nsa_lab.bench.decode_speed import run_decode_bench

    run_decode_bench(
        length,
        json_file,
        batches=batch or (1,),
        layers=layers,
        backend=backend,
        device=device,
        **dict(zip(("model", "baseline"), models, strict=False)),
        picture=picture,
    )


@app.command("train")
def bench_train(
    json_file: JsonFile = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="TOKENSxMICRO", help="Shape, e.g. 2048x32 (repeatable)")
    ] = None,
    picture: Picture = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="Preset or YAML file whose model is used"),
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="Compare document masking with unmasked text, NSA only")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="PATH", parser=parse_path, help="Text for --documents: a file, folder or glob"),
    ] = None,
    device: Device = None,
) -> None:
    """Benchmark training speed of NSA and its dense baseline. Prints one row per length."""
    from nsa_lab.bench.attention_rows import parse_training_shape

    shapes = _parse_values(parse_training_shape, shape, "--shape")
    if documents:
        if picture:
            raise typer.BadParameter("it has no figure; omit --picture", param_hint="--documents")
        if preset:
            raise typer.BadParameter("it uses the production model; omit --preset", param_hint="--documents")
        device = _resolve_device(device)
        from nsa_lab.bench.document_masking import run_documents_bench

        run_documents_bench(shapes, json_file, text=text, device=device)
        return
    if text:
        raise typer.BadParameter("it needs --documents", param_hint="--text")
    model = resolve.load_config(preset, []).model if preset is not None else None
    device = _resolve_device(device)
    from nsa_lab.bench.training_speed import run_train_bench

    run_train_bench(shapes, json_file, model=model, picture=picture, device=device)


@app.command("curves")
def bench_curves(
    json_file: JsonFile = None,
    picture: Picture = None,
    steps: Annotated[int, typer.Option(min=10, max=MAX_COUNT, help="Optimizer steps per curve")] = 300,
) -> None:
    """Compare the loss curves of every backend that runs here. Exit code 3 if they differ by more than the tolerance."""
    from nsa_lab.bench.loss_curves import run_curves

    result = run_curves(steps, json_file, picture, log=echo)
    for name, difference in result["apart_nats"].items():
        echo(
            f"{name:<26} {difference:.4f} nats maximum difference from the first curve (tolerance {result['band_nats']:g})"
        )
    raise typer.Exit(directory.EXIT_DONE if result["ok"] else directory.EXIT_HALTED)


@app.command("trainer")
def bench_trainer(
    json_file: JsonFile = None,
    ranks: Ranks = 1,
    parallel: Annotated[
        Literal["ddp", "fsdp", "hsdp"], typer.Option("--parallel", help="With --ranks: runtime.parallel")
    ] = "ddp",
    steps: Annotated[int | None, typer.Option(min=2, max=MAX_COUNT, help="Optimizer steps per timed interval")] = None,
    device: Device = None,
) -> None:
    """Benchmark telemetry, saving and resuming. --ranks compares the throughput of that many GPUs with one."""
    device = _resolve_device(device)
    from nsa_lab.bench.trainer_overhead import run_trainer_bench

    run_trainer_bench(json_file, ranks=ranks, parallel=parallel, steps=steps, device=device)


@app.command("ranks")
def bench_ranks(
    json_file: JsonFile = None,
    ranks: Annotated[int, typer.Option("--ranks", min=2, max=MAX_RANKS, help="Number of GPUs that share a sequence")] = 2,
    length: Annotated[
        list[int] | None,
        typer.Option(
            min=16, max=MAX_TOKENS, help="Sequence length in tokens (repeatable) [default: 65536, 131072 and 262144]"
        ),
    ] = None,
    part: Annotated[list[str] | None, typer.Option(metavar="operator|step", help="Only this part (repeatable)")] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="Preset or YAML file whose model is used")
    ] = None,
    shared_only: Annotated[
        bool, typer.Option("--shared-only", help="Do not measure one rank, for lengths that do not fit into one GPU")
    ] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations again in the backward pass of the step")
    ] = False,
    device: Device = None,
) -> None:
    """Benchmark several GPUs that share one sequence.

    Compares attention and the training step with one rank, after a parity check (context parallelism).
    """
    if wrong := [name for name in part or () if name not in ("operator", "step")]:
        raise typer.BadParameter(f"expected operator or step, got {wrong[0]}", param_hint="--part")
    model = resolve.load_config(preset, []).model if preset is not None else None
    device = _resolve_device(device)
    from nsa_lab.bench.context_parallel import PARTS, run_ranks_bench

    run_ranks_bench(
        tuple(length) if length else None,
        json_file,
        ranks=ranks,
        model=model,
        parts=tuple(part) if part else PARTS,
        alone=not shared_only,
        gradient_checkpointing=gradient_checkpointing,
        device=device,
    )


def _parse_values(parse: Callable[[str], Any], texts: list[str] | None, option: str) -> tuple[Any, ...] | None:
    try:
        return tuple(parse(text) for text in texts or []) or None
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
