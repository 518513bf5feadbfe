"""Commands for models: generate, export-*, ship, convert-checkpoint, evaluate; and demo, which measures decoding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nsa_lab.cli.common import MAX_TOKENS, Model, Outputs, Run, check_picture_option, echo, parse_path
from nsa_lab.config import ConfigError
from nsa_lab.config.errors import shorten
from nsa_lab.runs import resolve
from nsa_lab.runs.atomic_io import read_bounded
from nsa_lab.runs.evaluation import NEEDLE_FORM_NAMES, RULER_NAMES, TASK_NAMES
from nsa_lab.runs.model_files import (
    check_byte_model,
    check_evaluable,
    check_new_folder,
    find_checkpoint,
    read_final_evaluation,
)

app = typer.Typer()
MAX_SEED = 2**63 - 1  # limit of torch.manual_seed
MAX_TEXT_BYTES = 1 << 24  # of a prompt or a description
TASK_HELP = f"{', '.join(TASK_NAMES)}, another form of facts ({', '.join(NEEDLE_FORM_NAMES)}), or all (repeatable)"


@app.command()
def generate(
    run: Model,
    prompt: Annotated[str | None, typer.Option(help="Text to continue [default: a newline]")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=parse_path, help="File with the text to continue, used exactly, with its final newline"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Number of tokens to generate")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 selects the most likely token")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the K most likely tokens")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the smallest set of tokens with at least this total probability"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Random seed")] = 0,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint [default: newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Generate text from a prompt. The speed is printed at the end, on stderr."""
    run_dir = resolve.find_model(run, resolve.get_outputs_dir(outputs))
    text = _read_prompt(prompt, prompt_file)
    find_checkpoint(run_dir, step)

    from nsa_lab.inference import Sampling, SpeedMeter, complete_prompt

    try:
        sampling = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(f"nsa-lab generate: {error}") from None
    speed_meter = SpeedMeter()
    for piece in complete_prompt(run_dir, text, tokens, sampling, seed=seed, step=step, speed_meter=speed_meter):
        echo(piece, nl=False)
    echo()
    echo(speed_meter, err=True)


@app.command("export-hf")
def export_hf(
    run: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=parse_path, help="New output folder")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint [default: newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Export a model to transformers. Writes a folder for from_pretrained, with the tokenizer; needs nsa-lab[hf]."""
    run_dir = resolve.find_model(run, resolve.get_outputs_dir(outputs))
    find_checkpoint(run_dir, step)
    check_new_folder(folder)

    from nsa_lab.inference import hf

    echo(hf.export(run_dir, folder, step=step))
    echo("load it with AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)", err=True)


@app.command("export-adapter")
def export_adapter(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, help="New output folder; its name becomes the model name")
    ],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint [default: newest]")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "int8"], typer.Option(help="Type of the stored weights")
    ] = "bfloat16",
    about: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=parse_path, help="Markdown file on data, license and limitations, for the model card"
        ),
    ] = None,
    outputs: Outputs = None,
) -> None:
    """Export the indexer of a conversion run as an adapter. Writes a model card too, but not the pretrained weights.

    Evaluate the run first with nsa-lab evaluate RUN --blocks N; the model card then has its losses.
    """
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    text = _read_text(about, "--about") if about else ""
    find_checkpoint(run_dir, step)
    check_new_folder(folder)

    from nsa_lab import convert
    from nsa_lab.runs.evaluation import read_conversion

    evaluation = read_conversion(run_dir)
    info = convert.export_adapter(run_dir, folder, step=step, dtype=dtype, evaluation=evaluation, about=text)
    echo(folder.resolve())
    echo(f"{info.n_bytes:,} bytes of {info.dtype} weights for {info.base_model}; load it with load_model(FOLDER)", err=True)


@app.command()
def ship(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, help="New output folder; its name becomes the model name")
    ],
    about: Annotated[
        Path,
        typer.Option(
            metavar="FILE", parser=parse_path, help="Markdown file on data, license and limitations, for the model card"
        ),
    ],
    outputs: Outputs = None,
) -> None:
    """Package the model of a finished, evaluated run. Writes bfloat16 weights, configuration, evaluation and model card.

    Evaluate the run first with nsa-lab evaluate RUN.
    """
    from nsa_lab.runs.checkpoint_files import parse_step
    from nsa_lab.runs.history import History

    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    text = _read_text(about, "--about")
    read_final_evaluation(History.read(run_dir), parse_step(find_checkpoint(run_dir)))
    check_new_folder(folder)

    from nsa_lab import inference

    echo(inference.ship(run_dir, folder, text))


@app.command("convert-checkpoint")
def convert_checkpoint(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, help="New output folder; gets config.yaml and checkpoints/")
    ],
    form: Annotated[
        Literal["single", "sharded"],
        typer.Option(help="single: one file each for weights and optimizer; sharded: as several ranks write them"),
    ] = "single",
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint [default: newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Convert a checkpoint for other programs. Training, evaluation and export read both forms."""
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))

    from nsa_lab.inference.load import find_checkpoint
    from nsa_lab.inference.package import check_new_folder
    from nsa_lab.train import checkpoint_convert

    checkpoint = find_checkpoint(run_dir, step)
    echo(checkpoint_convert.convert_checkpoint(checkpoint, check_new_folder(folder), form))


@app.command()
def evaluate(
    run: Model,
    length: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS[:N]",
            help="Sequence length, and N sequences per depth (repeatable) [default: run's lengths, and twice the longest]",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=TASK_HELP),
    ] = None,
    ruler: Annotated[
        bool,
        typer.Option(
            "--ruler",
            help=f"Only tasks of RULER, in ruler.json, for any tokenizer; --task selects of {', '.join(RULER_NAMES)}",
        ),
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Named documents to measure the loss on: txt, jsonl, parquet (repeatable)"),
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Converted models: compare N selected blocks with dense attention, in conversion.json (repeatable)",
        ),
    ] = None,
    control: Annotated[
        str | None, typer.Option(metavar="RUN", help="With --blocks: dense run with the same training to compare with")
    ] = None,
    per_depth: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Sequences per length and depth; RULER: questions per length")
    ] = 20,
    windows: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Windows of held-out text for loss by position")] = 16,
    intervened: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_TOKENS, help="Sequences per length for the ablations; the slowest part on a CPU; 0 skips them"
        ),
    ] = 10,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Random seed of the facts and of random block selection")
    ] = 0,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Use bfloat16 weights and attention for speed [default: float32]")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint [default: newest]")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=parse_path, help="Output folder of evaluation.json [default: the run directory]"
        ),
    ] = None,
    outputs: Outputs = None,
) -> None:
    """Evaluate retrieval, loss and block selection. Writes evaluation.json; --blocks: conversion.json; --ruler: ruler.json.

    Without --blocks and --ruler, prints an estimate of its duration first.
    """
    from nsa_lab.data.sources.local import LocalSource

    run_dir = resolve.find_model(run, resolve.get_outputs_dir(outputs))
    counts, texts = dict(map(_parse_length, length or ())), dict(map(_parse_named_path, text or ()))
    known = list(RULER_NAMES) if ruler else [*TASK_NAMES, *NEEDLE_FORM_NAMES]
    for name in task or ():
        if name not in (*known, "all"):
            hint = "; add --ruler for this task" if name in RULER_NAMES else ""
            raise ConfigError(f"--task {name}: unknown task; available: {', '.join(known)}, all{hint}")
    for path in texts.values():
        LocalSource(path, label="text")
    if blocks:
        if length or task or ruler:
            raise ConfigError("--blocks: no facts are evaluated; omit --length, --task and --ruler, or --blocks")
        control_dir = resolve.find_run(control, resolve.get_outputs_dir(outputs)) if control is not None else None
        _evaluate_conversion(
            run_dir, control_dir, out=out, step=step, blocks=blocks, texts=texts, windows=windows, use_bf16=bf16
        )
        return
    if control is not None:
        raise ConfigError("--control: only losses with selected blocks are compared; add --blocks, or omit --control")
    if not ruler:
        check_byte_model(run_dir)
    elif texts:
        raise ConfigError("--text: RULER's haystacks are the run's held-out text; omit --text, or --ruler")
    check_evaluable(run_dir, out, step)

    import torch

    from nsa_lab.evaluate import evaluate_run, evaluate_run_with_ruler
    from nsa_lab.runs.evaluation import EVALUATION, RULER

    tasks = known if "all" in (task or []) else task or (known if ruler else list(TASK_NAMES))
    count_at = {length: count for length, count in counts.items() if count}
    dtype = torch.bfloat16 if bf16 else torch.float32
    if ruler:
        evaluate_run_with_ruler(
            run_dir,
            out=out,
            step=step,
            lengths=list(counts),
            tasks=list(dict.fromkeys(tasks)),
            questions=per_depth,
            questions_at=count_at,
            seed=seed,
            dtype=dtype,
            log=echo,
        )
    else:
        evaluate_run(
            run_dir,
            out=out,
            step=step,
            lengths=list(counts),
            tasks=list(dict.fromkeys(tasks)),
            texts=texts,
            per_depth=per_depth,
            per_depth_at=count_at,
            windows=windows,
            ablation_sequences=intervened,
            seed=seed,
            dtype=dtype,
            log=echo,
        )
    echo((out or run_dir) / (RULER if ruler else EVALUATION))


def _evaluate_conversion(
    run_dir: Path,
    control: Path | None,
    *,
    out: Path | None,
    step: int | None,
    blocks: list[int],
    texts: dict[str, str],
    windows: int,
    use_bf16: bool,
) -> None:
    import torch

    from nsa_lab.evaluate.conversion import CONVERSION, evaluate_conversion

    dtype = torch.bfloat16 if use_bf16 else torch.float32
    options: dict[str, Any] = {"blocks": blocks, "texts": texts, "windows": windows, "control": control}
    evaluate_conversion(run_dir, out=out, step=step, dtype=dtype, log=echo, **options)
    echo((out or run_dir) / CONVERSION)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Approximate duration in seconds")] = 120.0,
    picture: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            parser=parse_path,
            callback=check_picture_option,
            help="Write the plot to FILE: png, jpg, pdf or svg; needs nsa-lab[notebooks]",
        ),
    ] = Path("nsa-lab-demo.png"),
) -> None:
    """Compare decoding with dense attention on this CPU. Shows the time by context length, live in the terminal."""
    from nsa_lab.bench.demo import run_demo

    run_demo(seconds, picture)


def _parse_length(text: str) -> tuple[int, int | None]:
    """Parse `131072:10` to (131072, 10), and `131072` to (131072, None)."""
    length, _, count = text.partition(":")
    if not _is_integer(length, 64) or (count and not _is_integer(count, 1)):
        raise ConfigError(
            f"--length {shorten(text)}: expected 64 to {MAX_TOKENS} bytes, and 1 to {MAX_TOKENS} sequences; for example "
            "--length 32768 or --length 131072:10"
        )
    return int(length), int(count) if count else None


def _is_integer(text: str, low: int) -> bool:
    """Return whether a text is an integer from `low` to `MAX_TOKENS`. Python does not parse one of thousands of digits."""
    return text.isdecimal() and len(text) <= len(str(MAX_TOKENS)) and low <= int(text) <= MAX_TOKENS


def _parse_named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--text {text}: expected a name and a path, for example --text long=texts/long.parquet")
    return name, path


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is None:
        text = "\n" if prompt is None else prompt
        # Python decodes invalid UTF-8 in arguments to lone surrogates.
        if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
            try:
                return os.fsencode(text).decode("utf-8")  # the locale is ASCII, and the bytes are UTF-8
            except UnicodeError:
                raise ConfigError(f"--prompt {text!r}: expected valid UTF-8; remove the invalid bytes") from None
        return text
    if prompt is not None:
        raise typer.BadParameter(
            "expected one prompt; give --prompt or --prompt-file, not both", param_hint="--prompt-file"
        )
    return _read_text(file, "--prompt-file")


def _read_text(file: Path, option: str) -> str:
    if file.is_dir():
        raise ConfigError(f"{option} {file}: expected UTF-8 text in a file, got a folder; give a file in it")
    try:
        # Read bytes: text mode would change line ends, which are part of the prompt.
        return read_bounded(file, MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {file}: expected UTF-8 text in a file: {reason}") from None
