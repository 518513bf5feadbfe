"""Queries, keys and values to look at: a random toy, a real text seen by heads made by hand, and by those of a model.

Layout as everywhere: q [1, T, H, D], keys and values [1, T, G, D]; keys already carry their rotary angle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from sysconfig import get_path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nsa_lab.config import RecallConfig
from nsa_lab.data.recall import make_needle_task
from nsa_lab.model import Block, NSATransformer, SelectionInputs, SparseAttention, get_rotary_table, rotate


@dataclass(frozen=True)
class Example:
    """What NSA takes in, before compression. `about` says honestly where the numbers come from."""

    description: str
    text: str  # one character a token; empty for a random toy
    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    indexer_scoring: SelectionInputs | None = None  # an indexer's; None: q and k_cmp choose

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.k_sel.shape[2]

    def slice_document(self, first: int, last: int) -> Example:
        """Tokens first .. last-1 by themselves, as a document in a row: what stands before them is not there."""
        if self.indexer_scoring is not None:
            raise ValueError("document: an indexer's keys are compressed already, and cannot be cut to a document")
        tensors = {name: value[:, first:last] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, text=self.text[first:last], **tensors)


def make_random_example(
    length: int, *, heads: int = 4, groups: int = 2, head_dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Example:
    """Independent normal numbers everywhere: nothing to find, every formula to check."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(1, length, n, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    q = normal(heads)
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (normal(groups) for _ in range(6))
    return Example(f"independent normal numbers, seed {seed}", "", q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)


def read_standard_library(length: int, module: str = "textwrap.py") -> str:
    """The first `length` characters of a module of the running Python's standard library: real text on every machine."""
    text = (Path(get_path("stdlib")) / module).read_text(encoding="utf-8")
    if len(text) < length:
        raise ValueError(f"{module} has {len(text)} characters, and {length} are asked for; name a longer module")
    return text[:length]


def insert_fact_in_library(length: int, depth: float, module: str, *, seed: int = 0) -> tuple[bytes, bytes]:
    """A passage of a module of the standard library, told a fact at `depth`, a share of it, and asked for that at its end:
    what stands before the answer, and the answer, `length` bytes together."""
    source = np.frombuffer(read_standard_library(4 * length, module).encode(), np.uint8).astype(np.int64)
    asked = make_needle_task(length, depth, RecallConfig(), np.random.default_rng(seed), source)
    text, end = bytes(asked.tokens.tolist()), int(asked.answers[0, 0])
    return text[:end], text[end:]


def make_text_example(
    text: str, *, groups: int = 2, heads_per_group: int = 2, head_dim: int = 64, sharpness: float = 96.0, seed: int = 0
) -> Example:
    """A text seen by heads made by hand: a query looks for what came after passages that read like its own past.

    The query at t is the normed sum of a random vector for each of the characters t, t-1, ... with falling weights; the
    key at s is the same of the characters before s. Groups differ in how far back they look (4, then 12 characters),
    heads of a group in how sharply. All three branches share keys and values, so that their reads can be compared.
    Nothing here is trained.
    """
    generator = torch.Generator().manual_seed(seed)
    characters = torch.tensor([min(ord(c), 255) for c in text])
    keys, queries = [], []
    for group in range(groups):
        reach = 4 + 8 * group
        table = torch.randn(reach, 256, head_dim, generator=generator, dtype=torch.float64)
        past = torch.zeros(len(text), head_dim, dtype=torch.float64)
        for back in range(min(reach, len(text))):
            past[back:] += (1 - back / reach) * table[back, characters[: len(text) - back]]
        past = past / past.norm(dim=-1, keepdim=True)
        keys.append(torch.cat([torch.zeros_like(past[:1]), past[:-1]]))
        queries += [past * sharpness * (1 + head / heads_per_group) for head in range(heads_per_group)]
    k, q = torch.stack(keys, dim=1)[None], torch.stack(queries, dim=1)[None]
    rotary = get_rotary_table(len(text), head_dim, 1e6, torch.device("cpu"))
    k, q = rotate(k, rotary), rotate(q, rotary)
    v = torch.randn(k.shape, generator=generator, dtype=torch.float64)
    about = "standard-library text; hand-made heads that look for passages like the last few characters; not trained"
    return Example(about, text, q, k, v, k, v, k, v)


@torch.no_grad()
def make_layer_examples(model: NSATransformer, tokens: Tensor, text: str, description: str) -> list[Example]:
    """What attention is given in every layer of `model` on tokens int64 [1, T]; `text` has a character for each of them.

    Raises ValueError for a dense model, and for a `phi` with weights: pictures are drawn with the mean.
    """
    if model.config.attention != "nsa" or model.config.nsa.phi != "avg":
        raise ValueError(
            f"attention = {model.config.attention}, nsa.phi = {model.config.nsa.phi}: the explorer shows NSA with phi avg"
        )
    x, rotary = model.prepare_inputs(tokens)
    found = []
    for layer, block in enumerate(cast("list[Block]", list(model.blocks))):
        attention, normed = cast(SparseAttention, block.attention), block.attention_norm(x)
        heads = attention.project_heads(normed, rotary)
        (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = heads.keys, heads.values
        chosen_by = (
            attention.project_selection_inputs(normed, attention.project(normed, rotary), rotary)
            if attention.indexer
            else None
        )
        where = f"{description}, layer {layer}"
        found.append(Example(where, text, heads.q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, chosen_by))
        x, _ = block(x, rotary)
    return found


def make_byte_examples(model: NSATransformer, text: bytes, description: str) -> list[Example]:
    """`layer_examples` of a model whose tokens are bytes, on a text; a byte outside ASCII is shown as one character."""
    return make_layer_examples(model, torch.tensor([list(text)]), text.decode("latin-1"), description)
