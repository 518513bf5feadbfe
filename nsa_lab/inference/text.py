"""Text that a model writes: a prompt taken as the beginning of a document, and the pieces of text that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from nsa_lab.config import RunConfig
from nsa_lab.data import Tokenizer, load_tokenizer
from nsa_lab.inference.generate import tokens_after
from nsa_lab.inference.load import NoCheckpoint, find_checkpoint, load_model
from nsa_lab.inference.sampling import Sampling
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory


def complete(
    run_dir: str | Path,
    prompt: str,
    n: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    step: int | None = None,
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, `n` tokens of them, from a run's checkpoint (of `step`; default: the newest).

    Raises `NoCheckpoint`, also for one whose weights are broken, and `DataError` if the run's tokenizer is gone.
    """
    folder = find_checkpoint(run_dir, step)
    config = RunConfig.from_yaml(directory.check(run_dir) / directory.CONFIG)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = load_model(folder, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        yield from write_on(model, tokenizer, prompt, n, sampling, seed)
    except ArithmeticError as error:
        raise NoCheckpoint(f"{folder}: {error} of the run") from None


def write_on(
    model: NSATransformer, tokenizer: Tokenizer, prompt: str, n: int, sampling: Sampling, seed: int = 0
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, `n` tokens of them, each as soon as its characters are whole."""
    # In training a separator stands before every document.
    begin = torch.tensor([tokenizer.separator, *map(int, tokenizer.encode(prompt))], dtype=torch.int64)
    drawn: list[int] = []
    said = ""
    for token in tokens_after(model, begin, n, sampling, seed, drawable=tokenizer.vocab_size):
        drawn.append(token)
        text = tokenizer.decode(drawn)
        # Half a character shows as U+FFFD until its other half is drawn.
        if not text.endswith("\ufffd"):
            yield text[len(said) :]
            said = text
    yield tokenizer.decode(drawn)[len(said) :]
