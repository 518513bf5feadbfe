"""Commands that ask a model, of a run or one that ships, or hand it on: generate, export-hf, ship, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_lab.cli.common import Model, Outputs, Run
from nsa_lab.config import ConfigError
from nsa_lab.runs import resolve

app = typer.Typer()
MAX_SEED = 2**63 - 1  # that torch takes


@app.command()
def generate(
    run: Model,
    prompt: Annotated[str | None, typer.Option(help="the text to go on from [a new line]")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a file with that text, its last line's end included")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens to add")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="draw from this many likeliest tokens")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="draw from the likeliest tokens that have this probability together"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the draw")] = 0,
    step: Annotated[int | None, typer.Option(help="which checkpoint [the newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Let a model go on from a prompt; how fast it does comes last, on stderr."""
    run_dir = resolve.find_model(run, resolve.get_outputs_dir(outputs))
    text = _read_prompt(prompt, prompt_file)

    from nsa_lab.inference import Sampling, SpeedMeter, complete_prompt

    try:
        chosen = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(f"nsa-lab generate: {error}") from None
    pace = SpeedMeter()
    for piece in complete_prompt(run_dir, text, tokens, chosen, seed=seed, step=step, speed_meter=pace):
        typer.echo(piece, nl=False)
    typer.echo()
    typer.echo(pace, err=True)


@app.command("export-hf")
def export_hf(
    run: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder")],
    step: Annotated[int | None, typer.Option(help="which checkpoint [the newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Write a model and its tokenizer as transformers' from_pretrained loads them; needs nsa-lab[hf]."""
    run_dir = resolve.find_model(run, resolve.get_outputs_dir(outputs))

    from nsa_lab.inference import hf

    typer.echo(hf.export(run_dir, folder, step=step))
    typer.echo("to load it: AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)", err=True)


@app.command()
def ship(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder, called as the model is to be")],
    about: Annotated[Path, typer.Option(metavar="FILE", help="Markdown: data, licence and limits, for the model card")],
    outputs: Outputs = None,
) -> None:
    """Write the model of a run that is done and evaluated as a folder to hand on: weights in bfloat16, and a model card."""
    run_dir = resolve.find_run(run, resolve.get_outputs_dir(outputs))
    text = _read_text(about, "--about")

    from nsa_lab import inference

    typer.echo(inference.ship(run_dir, folder, text))


@app.command()
def evaluate(
    run: Model,
    length: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BYTES[:N]",
            help="of a sequence with facts, and N at each depth; repeat [the run's own, and twice that]",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="needle, multi_key, multi_query, or a form of needles; all: every one [the first three]; repeat"),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="documents that losses are measured on: txt, jsonl, parquet; repeat"),
    ] = None,
    per_depth: Annotated[int, typer.Option(min=1, help="sequences at each length and depth")] = 20,
    windows: Annotated[int, typer.Option(min=1, help="windows of held-out text, for the loss by position")] = 16,
    intervened: Annotated[
        int,
        typer.Option(min=0, help="sequences at each length whose blocks are changed; most of the time on a CPU; 0: none"),
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the facts, and of random blocks")] = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="weights and attention in bfloat16, for speed [float32]")] = False,
    step: Annotated[int | None, typer.Option(help="which checkpoint [the newest]")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="where evaluation.json goes [into the run]")] = None,
    outputs: Outputs = None,
) -> None:
    """Ask a model for facts in long texts, and find out what its selection does; writes evaluation.json."""
    run_dir = resolve.find_model(run, resolve.get_outputs_dir(outputs))
    counts, texts = dict(map(_parse_length, length or ())), dict(map(_parse_named_path, text or ()))

    import torch

    from nsa_lab.evaluate import NEEDLE_FORMS, TASKS, evaluate_run
    from nsa_lab.runs.evaluation import EVALUATION

    tasks = [*TASKS, *NEEDLE_FORMS] if "all" in (task or []) else task or list(TASKS)
    evaluate_run(
        run_dir,
        out=out,
        step=step,
        lengths=list(counts),
        tasks=tasks,
        texts=texts,
        per_depth=per_depth,
        per_depth_at={length: count for length, count in counts.items() if count},
        windows=windows,
        ablation_sequences=intervened,
        seed=seed,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        log=typer.echo,
    )
    typer.echo((out or run_dir) / EVALUATION)


def _parse_length(text: str) -> tuple[int, int | None]:
    """`131072:10` -> (131072, 10)."""
    length, _, count = text.partition(":")
    if not length.isdecimal() or int(length) < 64 or (count and not (count.isdecimal() and int(count))):
        raise ConfigError(f"--length {text}: expected bytes, 64 at least, for example --length 32768 or --length 131072:10")
    return int(length), int(count) if count else None


def _parse_named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--text {text}: expected a name and a path, for example --text long=texts/long.parquet")
    return name, path


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is None:
        text = "\n" if prompt is None else prompt
        # The bytes of an argument that are no UTF-8 come as halves of characters.
        if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
            raise ConfigError(f"--prompt {text!r}: expected a UTF-8 text; leave out the bytes that are none")
        return text
    if prompt is not None:
        raise typer.BadParameter("one text to go on from: --prompt or --prompt-file, not both", param_hint="--prompt-file")
    return _read_text(file, "--prompt-file")


def _read_text(file: Path, option: str) -> str:
    try:
        # Bytes, not text mode: line ends are part of the text.
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file}: expected a UTF-8 text: {error}") from None
