"""Text that a model writes: a prompt taken as the beginning of a document, and the pieces of text that follow it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from nsa_lab.config import RunConfig
from nsa_lab.data import Tokenizer, load_tokenizer
from nsa_lab.inference.generate import generate_tokens
from nsa_lab.inference.load import NoCheckpoint, find_checkpoint, load_model
from nsa_lab.inference.sampling import Sampling
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory


class SpeedMeter:
    """How fast tokens come, the prompt's reading included in the time of the first."""

    def __init__(self) -> None:
        self.n_prompt_tokens = self.n_tokens = 0
        self.first_token_s = self.seconds = 0.0

    def measure(self, tokens: Iterable[int], prompt_tokens: int) -> Iterator[int]:
        """The same tokens, timed from the moment the first is asked for."""
        self.n_prompt_tokens, begin = prompt_tokens, time.perf_counter()
        for token in tokens:
            self.n_tokens, self.seconds = self.n_tokens + 1, time.perf_counter() - begin
            self.first_token_s = self.first_token_s or self.seconds
            yield token

    def __str__(self) -> str:
        told = f"{self.n_prompt_tokens:,} tokens read, the first drawn after {self.first_token_s:.2f} s"
        if self.n_tokens < 2:
            return told
        return f"{told}, then {(self.n_tokens - 1) / (self.seconds - self.first_token_s):,.1f} tokens/s"


def complete_prompt(
    run_dir: str | Path,
    prompt: str,
    n: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    step: int | None = None,
    speed_meter: SpeedMeter | None = None,
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, `n` tokens of them, from a run's checkpoint (of `step`; default: the newest).

    `pace` is told how fast they come.
    Raises `NoCheckpoint`, also for one whose weights are broken, and `DataError` if the run's tokenizer is gone.
    """
    folder = find_checkpoint(run_dir, step)
    config = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = load_model(folder, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        yield from continue_text(model, tokenizer, prompt, n, sampling, seed, speed_meter)
    except ArithmeticError as error:
        raise NoCheckpoint(f"{folder}: {error} of the run") from None


def continue_text(
    model: NSATransformer,
    tokenizer: Tokenizer,
    prompt: str,
    n: int,
    sampling: Sampling,
    seed: int = 0,
    speed_meter: SpeedMeter | None = None,
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, `n` tokens of them, each as soon as its characters are whole."""
    # In training a separator stands before every document.
    begin = torch.tensor([tokenizer.separator, *map(int, tokenizer.encode(prompt))], dtype=torch.int64)
    tokens = generate_tokens(model, begin, n, sampling, seed, sampled_vocab_size=tokenizer.vocab_size)
    yield from decode_whole_characters(tokenizer, speed_meter.measure(tokens, len(begin)) if speed_meter else tokens)


def decode_whole_characters(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens, in pieces that end with whole characters. Each is decoded behind the one before it alone."""
    prefix: list[int] = []  # told already; a tokenizer may decode a token by the one before it
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        piece = _decode_suffix(tokenizer, prefix, waiting)
        # Half a character shows as U+FFFD until its other half is drawn.
        if not piece.endswith("\ufffd"):
            yield piece
            prefix, waiting = waiting, []
    yield _decode_suffix(tokenizer, prefix, waiting)


def _decode_suffix(tokenizer: Tokenizer, prefix: list[int], tokens: list[int]) -> str:
    """What `tokens` add to the text of `prefix`."""
    return tokenizer.decode(prefix + tokens)[len(tokenizer.decode(prefix)) :]
