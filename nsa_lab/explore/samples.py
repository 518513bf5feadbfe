"""What a model writes, before training and after it, and where its selection looks on a real text."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.config import RunConfig
from nsa_lab.data import load_tokenizer
from nsa_lab.explore.examples import standard_library_text
from nsa_lab.explore.pictures import selection_by_layer
from nsa_lab.generate import NoCheckpoint, complete, find_checkpoint, generate, load_model
from nsa_lab.model import NSATransformer

TEMPERATURE = 0.8
PICTURED_LAYERS = 4


def untrained(config: RunConfig) -> NSATransformer:
    """The model with the weights that training starts from, on the CPU."""
    return NSATransformer(config.model, seed=config.train.seed).eval()


def sample_before(config: RunConfig, model: NSATransformer, prompt: str, tokens: int) -> str:
    """The prompt and what a model that is not in a run directory makes of it."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    begin = [tokenizer.separator, *map(int, tokenizer.encode(prompt))]
    drawn = generate(model, begin, tokens, TEMPERATURE, vocab_size=tokenizer.vocab_size)
    return printable(prompt + tokenizer.decode(drawn))


def sample_after(run: Path, prompt: str, tokens: int) -> str:
    """The prompt and what the run's newest checkpoint makes of it, or in a line why there is none to ask."""
    try:
        return printable(prompt + "".join(complete(run, prompt, tokens, temperature=TEMPERATURE)))
    except NoCheckpoint as error:
        return f"no sample: {error}"


def printable(text: str) -> str:
    """The text with control characters as dots: an untrained model draws any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else "·" for c in text)


def selection_maps(run: Path, length: int | None = None, group: int = 0) -> Figure:
    """Which blocks the run's newest checkpoint selects at several depths, on the text of a standard-library module.

    `length` in tokens, by default the length that the run was trained at. Raises `NoCheckpoint` where there is none.
    """
    config = RunConfig.from_yaml(Path(run) / "config.yaml")
    blocks = observed_blocks(run, length)
    layers = sorted({round(n * (len(blocks) - 1) / max(PICTURED_LAYERS - 1, 1)) for n in range(PICTURED_LAYERS)})
    return selection_by_layer({layer: blocks[layer][0, :, group] for layer in layers}, config.nsa,
                              f"{Path(run).name}, group {group}, on argparse.py")


def observed_blocks(run: Path, length: int | None = None, step: int | None = None) -> list[Tensor]:
    """Blocks selected by each layer, int32 [1, T, G, n_sel], of the run's checkpoint of `step` (default: the newest)."""
    model = load_model(find_checkpoint(run, step))
    config = RunConfig.from_yaml(Path(run) / "config.yaml")
    length = length or config.train.seq_len
    tokens = load_tokenizer(config.data.tokenizer).encode(standard_library_text(4 * length, "argparse.py"))[:length]
    return [seen["blocks"] for seen in model.observe(torch.as_tensor([list(map(int, tokens))]))]
