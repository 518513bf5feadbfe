"""Queries, keys and values for the notebooks: random numbers, a real text with hand-made heads, or a real text in a model.

The layout is as everywhere: q [1, T, H, D], keys and values [1, T, G, D]. RoPE is already applied to queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from sysconfig import get_path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nsa_lab.config import BRANCHES, RecallConfig
from nsa_lab.data.recall import make_needle_task
from nsa_lab.model import Block, NSATransformer, SelectionInputs, SparseAttention, get_rotary_table, rotate


@dataclass(frozen=True)
class Example:
    """The inputs of NSA before compression. `description` states where the numbers come from."""

    description: str
    text: str  # one character per token; empty for random numbers
    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    scoring: SelectionInputs | None = None  # of an indexer or mean keys; None: q and k_cmp select the blocks

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.k_sel.shape[2]

    def slice_document(self, first: int, last: int) -> Example:
        """Return tokens first .. last-1 as a separate document, without the tokens before them."""
        if self.scoring is not None:
            raise ValueError("slice_document: the keys of an indexer are already compressed and cannot be sliced")
        tensors = {name: value[:, first:last] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, text=self.text[first:last], **tensors)


def make_random_example(
    length: int, *, heads: int = 4, groups: int = 2, head_dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Example:
    """Return independent normal random numbers. They contain nothing to find, but test every formula."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(1, length, n, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    q = normal(heads)
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (normal(groups) for _ in range(6))
    return Example(f"independent normal numbers, seed {seed}", "", q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)


def read_standard_library(length: int, module: str = "textwrap.py") -> str:
    """Return the first `length` characters of a module of Python's standard library, a real text on every machine."""
    text = (Path(get_path("stdlib")) / module).read_text(encoding="utf-8")
    if len(text) < length:
        raise ValueError(f"{module}: expected at least {length} characters, got {len(text)}; name a longer module")
    return text[:length]


def insert_fact_in_library(length: int, depth: float, module: str, *, seed: int = 0) -> tuple[bytes, bytes]:
    """Insert a fact into a passage of a standard-library module and ask for it at the end.

    `depth` is the position of the fact as a fraction of the text. Returns (prompt, answer), together `length` bytes.
    """
    source = np.frombuffer(read_standard_library(4 * length, module).encode(), np.uint8).astype(np.int64)
    task = make_needle_task(length, depth, RecallConfig(), np.random.default_rng(seed), source)
    text, end = bytes(task.tokens.tolist()), int(task.answers[0, 0])
    return text[:end], text[end:]


def make_text_example(
    text: str, *, groups: int = 2, heads_per_group: int = 2, head_dim: int = 64, sharpness: float = 96.0, seed: int = 0
) -> Example:
    """Return a text with hand-made heads: a query matches the token after an earlier passage like its own past.

    The query at t is the normalized sum of one random vector for each of the characters t, t-1, ..., with decreasing
    weights. The key at s is the same sum for the characters before s. Groups differ in how many characters they encode
    (4, then 12), heads of a group in sharpness. All three branches share keys and values, so that their attention can be
    compared. Nothing is trained.
    """
    generator = torch.Generator().manual_seed(seed)
    characters = torch.tensor([min(ord(c), 255) for c in text])
    keys, queries = [], []
    for group in range(groups):
        n_encoded = 4 + 8 * group
        table = torch.randn(n_encoded, 256, head_dim, generator=generator, dtype=torch.float64)
        past = torch.zeros(len(text), head_dim, dtype=torch.float64)
        for offset in range(min(n_encoded, len(text))):
            past[offset:] += (1 - offset / n_encoded) * table[offset, characters[: len(text) - offset]]
        past = past / past.norm(dim=-1, keepdim=True)
        keys.append(torch.cat([torch.zeros_like(past[:1]), past[:-1]]))
        queries += [past * sharpness * (1 + head / heads_per_group) for head in range(heads_per_group)]
    k, q = torch.stack(keys, dim=1)[None], torch.stack(queries, dim=1)[None]
    rotary = get_rotary_table(len(text), head_dim, 1e6, torch.device("cpu"))
    k, q = rotate(k, rotary), rotate(q, rotary)
    v = torch.randn(k.shape, generator=generator, dtype=torch.float64)
    description = "standard-library text; hand-made heads that match passages like the last few characters; not trained"
    return Example(description, text, q, k, v, k, v, k, v)


@torch.no_grad()
def make_layer_examples(model: NSATransformer, tokens: Tensor, text: str, description: str) -> list[Example]:
    """Return the attention inputs of every layer of `model` on tokens int64 [1, T]. `text` has one character per token.

    Raises ValueError for a dense model, for one without some branch, for scores that are not sums, and for a `phi` with
    parameters, because the plots compress with the mean.
    """
    config, nsa = model.config, model.config.nsa
    if config.attention != "nsa" or nsa.phi != "avg":
        raise ValueError(f"attention = {config.attention}, nsa.phi = {nsa.phi}: the explorer shows NSA with phi avg")
    if set(config.branches) != set(BRANCHES) or (nsa.head_reduction, nsa.block_reduction) != ("sum", "sum"):
        raise ValueError(
            f"model.branches = {list(config.branches)}, nsa.head_reduction = {nsa.head_reduction}, nsa.block_reduction = "
            f"{nsa.block_reduction}: the explorer shows models with all three branches, and sums of scores"
        )
    x, rotary = model.prepare_inputs(tokens)
    layer_inputs: list[Example] = []
    scoring: SelectionInputs | None = None
    selected: Tensor | None = None
    for layer, block in enumerate(cast("list[Block]", list(model.blocks))):
        attention, normalized = cast(SparseAttention, block.attention), block.attention_norm(x)
        heads = attention.project_heads(normalized, rotary)
        # Branches may share keys and values.
        kv = {
            f"{kind}_{branch}": tensors[config.get_kv_set(branch) or 0]
            for branch in BRANCHES
            for kind, tensors in (("k", heads.keys), ("v", heads.values))
        }
        # A layer without an indexer has the blocks of the last layer with one.
        is_selecting = config.has_indexer_in(layer) or not config.has_indexer
        if config.scores != "compressed" and is_selecting:
            scoring = attention.project_selection_inputs(normalized, attention.project(normalized, rotary), rotary)
        label = f"{description}, layer {layer}"
        layer_inputs.append(Example(label, text, heads.q, **kv, scoring=scoring))
        x, selection = block(x, rotary, blocks=None if is_selecting else selected)
        selected = selection.blocks
    return layer_inputs


def make_byte_examples(model: NSATransformer, text: bytes, description: str) -> list[Example]:
    """Return `make_layer_examples` of a byte-level model on a text. Bytes outside ASCII are shown as one character."""
    return make_layer_examples(model, torch.tensor([list(text)]), text.decode("latin-1"), description)
