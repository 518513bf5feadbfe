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
from nsa_lab.inference.hf.inputs import PADDED_AT_END, PaddingPermutation, find_end_offsets, find_ends
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
        self._column_offset: Tensor | None = None  # position minus column of the last token, [B, 1]
        self._rotary: dict[torch.device, Rotary] = {}

    @property
    def tokens(self) -> Cache | None:
        return self._tokens

    def _drop_tokens(self) -> None:
        self._tokens = self._column_offset = None
        self._rotary.clear()

    def check_positions(self, positions: Tensor, mask: Tensor | None) -> None:
        """Raise ValueError unless positions [B, n] of new columns continue the positions of the cached tokens.

        New tokens are rotated by them. They count up from token to token, or from column to column, padding included.
        mask: [B, n], None without padding.
        """
        is_token = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.to(positions.device).bool()
        is_text, ends = is_token.any(1, keepdim=True), find_ends(is_token)
        n_cached = torch.tensor(self._tokens.starts if self._tokens else (0,), device=positions.device)[:, None]
        offset, last_offset = (x - n_cached for x in find_end_offsets(positions, mask))
        column_offset, last_column_offset = (positions.gather(1, end) - end - self._n_columns for end in ends)
        if self._offset is None or self._column_offset is None:
            self._offset, self._column_offset = offset, column_offset
        is_equal = offset.eq(self._offset) | column_offset.eq(self._column_offset) | ~is_text | n_cached.eq(0)
        if not bool(is_equal.all()):
            restarts = ~self.make_mask(len(is_equal))[:, -1:].to(offset.device) & positions[:, :1].eq(1)
            if bool((is_equal | restarts).all()):  # as in `find_continued`
                raise ValueError(PADDED_AT_END)
            row = int(is_equal[:, 0].byte().argmin())
            expected = int((self._offset + n_cached)[row])
            raise ValueError(
                f"position_ids: expected {expected} for the first new token of row {row}, after cached tokens, got "
                f"{int((offset + n_cached)[row])}; omit position_ids, or pass them in every call"
            )
        self._offset = torch.where(is_text, last_offset, self._offset)
        self._column_offset = torch.where(is_text, last_column_offset, self._column_offset)

    def make_positions(self, n_columns: int, device: torch.device) -> Tensor:
        """Return positions [B, n] or [1, n] of new columns: they count up from the last cached token, padding included."""
        columns = torch.arange(self._n_columns, self._n_columns + n_columns, device=device)[None]
        return columns if self._column_offset is None else columns + self._column_offset.to(device)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self._column_offset is not None:
            self._column_offset = self._column_offset[beam_idx.to(self._column_offset.device)]

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
