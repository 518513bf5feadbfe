"""Key/value cache of a converted model."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nsa_lab.convert.settings import ConversionSettings
from nsa_lab.inference import kv_cache_size
from nsa_lab.inference.cache import Cache, Step
from nsa_lab.inference.hf.cache import ColumnCache
from nsa_lab.inference.hf.inputs import PaddingPermutation
from nsa_lab.model import NSATransformer, Rotary
from nsa_lab.model.placement import find_placement

MIN_FREE_TOKENS = 256  # free rows of a new cache; a full cache grows to twice the tokens needed


class SparseCache(ColumnCache):
    """Cache of a converted model: keys, values and index keys of the tokens without padding.

    `base`: the converted model without its head. `settings`: of its conversion.
    """

    def __init__(self, base: PreTrainedModel, settings: ConversionSettings) -> None:
        super().__init__(base)
        self.settings = settings
        self._tokens: Cache | None = None
        self._rotary: dict[torch.device, Rotary] = {}

    @property
    def tokens(self) -> Cache | None:
        return self._tokens

    def _drop_tokens(self) -> None:
        self._tokens = None
        self._rotary.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: the attention function stores them, together with index keys."""
        return key_states, value_states

    def make_steps(self, counts: Sequence[int]) -> list[Step]:
        """Return the steps for `counts` new tokens of each sequence, and make room for them.

        One step at prefill, otherwise steps of at most `MAX_STEP_TOKENS` tokens.
        """
        n_new, tokens = max(counts), self._tokens
        if not n_new:
            raise ValueError("attention_mask: expected a token in at least one row, got only padding")
        if tokens is not None and len(counts) != tokens.batch:
            raise ValueError(
                f"cache: expected {tokens.batch} rows, got {len(counts)}; use a new cache for another batch size"
            )
        n_tokens = (max(tokens.starts) if tokens else 0) + n_new
        if tokens is None:
            stack = cast(NSATransformer, _LayerStack(self._model, self.settings))
            tokens = self._tokens = Cache(stack, n_tokens + MIN_FREE_TOKENS, len(counts))
        elif n_tokens > tokens.capacity:
            tokens.grow(2 * n_tokens)
            self._rotary.clear()
        width = kv_cache_size.MAX_STEP_TOKENS if any(tokens.starts) else n_new
        return list(_split_step(tokens, counts, [*range(0, n_new, width), n_new]))

    def finish(self, counts: Sequence[int], n_columns: int, permutation: PaddingPermutation | None) -> None:
        """Count the new tokens, after all layers have stored them."""
        assert self._tokens is not None
        self._tokens.advance(counts, width=max(counts))
        self._add_columns(n_columns, permutation)

    def get_rotary(self, device: torch.device) -> Rotary:
        """Return the RoPE tables of all positions, [capacity, R/2], for the indexer."""
        assert self._tokens is not None
        if device not in self._rotary:
            positions = torch.arange(self._tokens.capacity, device=device)
            self._rotary[device] = compute_index_rotary(cast(Any, self._model), positions)
        return self._rotary[device]


def compute_index_rotary(base: Any, positions: Tensor) -> Rotary:
    """Return cos and sin of the dense model's RoPE at int64 positions [T], float32 [T, R/2]."""
    tables = base.rotary_emb(torch.empty(0, device=positions.device), position_ids=positions[None])
    cos, sin = (table[0, :, : table.shape[-1] // 2].float() for table in tables)
    return cos, sin


class _LayerStack(nn.Module):
    """The layers of a model, their configuration and their backends: all that a `Cache` needs of it."""

    def __init__(self, base: nn.Module, settings: ConversionSettings) -> None:
        super().__init__()
        self.blocks = cast(Any, base).layers
        self.config, self.backends = settings.model, settings.resolve_backends(*find_placement(base))


def _split_step(tokens: Cache, counts: Sequence[int], edges: list[int]) -> Iterator[Step]:
    """Yield the step of new tokens edges[i] .. edges[i+1]-1 of every sequence."""
    for begin, end in pairwise(edges):
        # Sequences without further tokens stay where they are: padding may overwrite only a step in their rings.
        starts = tuple(start + min(begin, count) for start, count in zip(tokens.starts, counts, strict=True))
        lengths = torch.tensor(starts, dtype=torch.int32).to(tokens.lengths.device)
        own_counts = torch.tensor([min(max(count - begin, 0), end - begin) for count in counts]).to(lengths.device)
        yield Step(starts, lengths, end - begin, own_counts, torch.arange(len(counts), device=lengths.device)[:, None])
