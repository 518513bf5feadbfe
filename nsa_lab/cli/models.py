"""Commands that ask a run's model, or hand it on: generate, export-hf, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_lab.cli.common import Outputs, Run
from nsa_lab.config import ConfigError
from nsa_lab.runs import names

app = typer.Typer()


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str | None, typer.Option(help="the text to go on from [a new line]")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="a file with that text")] = None,
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
    """Let a run's model go on from a prompt; how fast it does comes last, on stderr."""
    run_dir = names.find_run(run, names.outputs_folder(outputs))
    text = _prompt(prompt, prompt_file)

    from nsa_lab.inference import Pace, Sampling, complete

    try:
        chosen = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ConfigError(f"nsa-lab generate: {error}") from None
    pace = Pace()
    for piece in complete(run_dir, text, tokens, chosen, seed=seed, step=step, pace=pace):
        typer.echo(piece, nl=False)
    typer.echo()
    typer.echo(pace, err=True)


@app.command("export-hf")
def export_hf(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder")],
    step: Annotated[int | None, typer.Option(help="which checkpoint [the newest]")] = None,
    outputs: Outputs = None,
) -> None:
    """Write a run's model and tokenizer as transformers' from_pretrained loads them; needs nsa-lab[hf]."""
    run_dir = names.find_run(run, names.outputs_folder(outputs))

    from nsa_lab.inference import hf

    typer.echo(hf.export(run_dir, folder, step=step))


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


def _prompt(prompt: str | None, file: Path | None) -> str:
    if file is None:
        return "\n" if prompt is None else prompt
    if prompt is not None:
        raise typer.BadParameter("one text to go on from: --prompt or --prompt-file, not both", param_hint="--prompt-file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {file}: expected a UTF-8 text: {error}") from None
