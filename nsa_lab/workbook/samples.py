"""What a model writes, before training and after it, and where its selection looks on a real text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from nsa_lab.config import RunConfig
from nsa_lab.data import load_tokenizer
from nsa_lab.figures import plot_selection_by_layer
from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.inference import Decoder, NoCheckpoint, Sampling, complete_prompt, continue_text, find_checkpoint, load_model
from nsa_lab.model import NSATransformer
from nsa_lab.workbook.examples import read_standard_library

TEMPERATURE = 0.8
MAX_PLOTTED_LAYERS = 4
N_DECODED_TOKENS = 32  # tokens that the check of decoding takes one by one


def build_untrained_model(config: RunConfig) -> NSATransformer:
    """The model with the weights that training starts from, on the CPU."""
    return NSATransformer(config.model_at(0), seed=config.train.seed).eval()


def sample_model(config: RunConfig, model: NSATransformer, prompt: str, n_tokens: int) -> str:
    """The prompt and what a model that is not in a run directory makes of it."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return make_printable(prompt + "".join(continue_text(model, tokenizer, prompt, n_tokens, Sampling(TEMPERATURE))))


def sample_run(run: Path, prompt: str, n_tokens: int) -> str:
    """The prompt and what the run's newest checkpoint makes of it, or in a line why there is none to ask."""
    try:
        return make_printable(prompt + "".join(complete_prompt(run, prompt, n_tokens, Sampling(TEMPERATURE))))
    except NoCheckpoint as error:
        return f"no sample: {error}"


def check_decoding(run: Path, limits: Limits = LIMITS) -> Verdict:
    """Is cached decoding the model? The newest checkpoint's logits, with a text's last tokens taken one by one, against
    those of one pass over all of it, in float64. Not known where there is no checkpoint to ask.
    """
    name, limit = "decoding is the model", limits.decode_error
    try:
        checkpoint = find_checkpoint(run)
        model = load_model(checkpoint, dtype=torch.float64)
    except NoCheckpoint as error:
        return Verdict(name, None, None, limit, str(error))
    tokens = _tokenize_library_text(RunConfig.from_yaml(Path(run) / "config.yaml"), None)
    begin = tokens.shape[1] - min(N_DECODED_TOKENS, tokens.shape[1] // 2)
    decoder = Decoder(model, capacity=tokens.shape[1])
    parts = [tokens[:, :begin], *tokens[:, begin:].split(1, dim=1)]
    stepped = torch.cat([decoder.append(part) for part in parts], dim=1)
    with torch.no_grad():
        whole = model(tokens)
    error = ((stepped - whole).abs().max() / whole.abs().max()).item()
    return Verdict(
        name,
        error <= limit,
        error,
        limit,
        f"{checkpoint.name}: logits differ by {error:.2g} of the largest at most ({begin:,} tokens at "
        f"once, {tokens.shape[1] - begin} one by one; {limit:g} allowed)",
    )


def count_selected_keys(run: Path) -> tuple[float, int]:
    """Keys that the selected branch reads, mean over queries, layers and groups, and the most of one query.

    Counted in the blocks that the newest checkpoint chooses on a real text. Raises `NoCheckpoint` where there is none.
    """
    nsa = RunConfig.from_yaml(Path(run) / "config.yaml").nsa
    counts = []
    for blocks in observe_blocks(run):
        query = torch.arange(blocks.shape[1]).view(1, -1, 1, 1)
        keys = (query + 1 - blocks * nsa.l_sel).clamp(0, nsa.l_sel).where(blocks >= 0, 0)
        counts.append(keys.sum(-1))
    found = torch.stack(counts)
    return found.double().mean().item(), int(found.max())


def make_printable(text: str) -> str:
    """The text with control characters as dots: an untrained model draws any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else "·" for c in text)


def plot_run_selection(run: Path, length: int | None = None, group: int = 0) -> Figure:
    """Which blocks the run's newest checkpoint selects at several depths, on the text of a standard-library module.

    `length` in tokens, by default the length that the run was trained at. Raises `NoCheckpoint` where there is none.
    """
    config = RunConfig.from_yaml(Path(run) / "config.yaml")
    blocks = observe_blocks(run, length)
    layers = sorted({round(n * (len(blocks) - 1) / max(MAX_PLOTTED_LAYERS - 1, 1)) for n in range(MAX_PLOTTED_LAYERS)})
    return plot_selection_by_layer(
        {layer: blocks[layer][0, :, group] for layer in layers},
        config.nsa,
        f"{Path(run).name}, group {group}, on argparse.py",
    )


def observe_blocks(run: Path, length: int | None = None, step: int | None = None) -> list[Tensor]:
    """Blocks selected by each layer, int32 [1, T, G, n_sel], of the run's checkpoint of `step` (default: the newest)."""
    return _observe_checkpoint(find_checkpoint(run, step), length)


@lru_cache(maxsize=8)
def _observe_checkpoint(checkpoint: Path, length: int | None) -> list[Tensor]:
    tokens = _tokenize_library_text(RunConfig.from_yaml(checkpoint.parents[1] / "config.yaml"), length)
    return [seen["blocks"] for seen in load_model(checkpoint).observe(tokens)]


def _tokenize_library_text(config: RunConfig, length: int | None) -> Tensor:
    """The beginning of a standard-library module, int64 [1, `length`], by default as long as the run's sequences."""
    length = length or config.train.longest_stage.seq_len
    tokens = load_tokenizer(config.data.tokenizer).encode(read_standard_library(4 * length, "argparse.py"))[:length]
    return torch.as_tensor([list(map(int, tokens))])
