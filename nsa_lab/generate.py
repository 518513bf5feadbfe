"""Text from a trained model: load a checkpoint, go on from a prompt.

Reads `model.safetensors` and `config.yaml` alone; nothing here loads the trainer or unpickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from nsa_lab.config import RunConfig
from nsa_lab.data import load_tokenizer
from nsa_lab.decode import Decoder
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoints, directory

WEIGHTS = "model.safetensors"


class NoCheckpoint(RuntimeError):
    """A run has no checkpoint that can be used. The message says what there is instead."""


def find_checkpoint(run_dir: str | Path, step: int | None = None) -> Path:
    """The folder of the checkpoint of `step`, by default of the newest. Raises `NoCheckpoint`."""
    folder = checkpoints.folder_of(directory.check(run_dir))
    there = checkpoints.steps(folder)
    if not there:
        raise NoCheckpoint(f"{folder}: no checkpoint here; train the run, or copy its checkpoints beside it")
    if step is not None and step not in there:
        raise NoCheckpoint(f"{folder}: no checkpoint of step {step}; there is {', '.join(map(str, there))}")
    return checkpoints.path_of(folder, there[-1] if step is None else step)


def load_model(
    checkpoint: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, backend: str = "auto"
) -> NSATransformer:
    """The model of a checkpoint folder inside a run directory, ready to be asked.

    Raises `NoCheckpoint` if its files are not what its manifest says, `ConfigError` for a foreign config.yaml.
    """
    folder = Path(checkpoint).resolve()
    problems = checkpoints.verify(folder)
    if problems:
        raise NoCheckpoint(f"{folder}: {', '.join(problems)}; use another checkpoint of the run")
    config = RunConfig.from_yaml(folder.parents[1] / directory.CONFIG)
    model = NSATransformer(config.model, backend=backend, device=device, dtype=dtype, seed=0)
    model.load_state_dict(load_file(folder / WEIGHTS, device=str(device)), strict=True)
    return model.to(dtype).eval()


def generate(
    model: NSATransformer,
    prompt_tokens: Iterable[int] | Tensor,
    n: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    *,
    vocab_size: int | None = None,
) -> list[int]:
    """The `n` tokens that follow `prompt_tokens` (at least one).

    Drawn from softmax(logits / temperature) over the `top_k` likeliest tokens, by a generator of its own seeded with
    `seed`; temperature 0 takes the likeliest. Ids from `vocab_size` on, padding of a model, are never drawn.
    """
    return list(stream(model, prompt_tokens, n, temperature, top_k, seed, vocab_size=vocab_size))


def stream(
    model: NSATransformer,
    prompt_tokens: Iterable[int] | Tensor,
    n: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    *,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """As `generate`, each token as soon as it is drawn. Raises ValueError for an empty prompt, ArithmeticError for a model
    whose logits are not finite."""
    prompt = torch.as_tensor([int(token) for token in prompt_tokens], dtype=torch.int64)
    if not len(prompt):
        raise ValueError("generate: the prompt is empty; give at least one token, for example the tokenizer's separator")
    device = model.head.weight.device
    draw = torch.Generator().manual_seed(seed)
    decoder = Decoder(model, capacity=len(prompt) + n)
    logits = decoder.append(prompt[None].to(device))[0, -1]
    for index in range(n):
        token = _choose(logits[:vocab_size].float().cpu(), temperature, top_k, draw)
        yield token
        if index + 1 < n:
            logits = decoder.append(torch.tensor([[token]], device=device))[0, -1]


def complete(
    run_dir: str | Path,
    prompt: str,
    n: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    step: int | None = None,
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, taken as the beginning of a document, from a run's checkpoint.

    Raises `NoCheckpoint`, also for one whose weights are broken, and `DataError` if the run's tokenizer is gone.
    """
    folder = find_checkpoint(run_dir, step)
    config = RunConfig.from_yaml(directory.check(run_dir) / directory.CONFIG)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = load_model(folder, device="cuda" if torch.cuda.is_available() else "cpu")
    # In training a separator stands before every document.
    begin = [tokenizer.separator, *map(int, tokenizer.encode(prompt))]
    drawn: list[int] = []
    said = ""
    try:
        for token in stream(model, begin, n, temperature, top_k, seed, vocab_size=tokenizer.vocab_size):
            drawn.append(token)
            text = tokenizer.decode(drawn)
            # Half a character shows as U+FFFD until its other half is drawn.
            if not text.endswith("\ufffd"):
                yield text[len(said) :]
                said = text
    except ArithmeticError as error:
        raise NoCheckpoint(f"{folder}: {error}; use an earlier checkpoint of the run") from None
    yield tokenizer.decode(drawn)[len(said) :]


def _choose(logits: Tensor, temperature: float, top_k: int | None, draw: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise ArithmeticError("the model's logits are not finite")
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        floor = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw))
