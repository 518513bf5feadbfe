"""Key/value cache of `generate`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache as TransformersCache

from nsa_lab.inference.cache import Cache
from nsa_lab.inference.decode import Decoder
from nsa_lab.inference.hf.inputs import PaddingPermutation, find_end_offsets
from nsa_lab.model import NSATransformer

MIN_CACHE_TOKENS = 256  # initial capacity; a full cache grows to twice the tokens needed
# The way out in the error for a cache of another class, which PEFT passes for prefix tuning.
GET_CACHE = (
    "omit it in the first call with use_cache=True, which returns one (prefix tuning, whose keys and values belong to no "
    "branch, is not supported: use prompt tuning)"
)


class PassesCacheToPeft:
    """Base of models that `generate`. A class lists it before its classes of `transformers`.

    Under the name of the cache since transformers 5.24, PEFT 0.21 does not find it: it adds the virtual tokens of prompt
    tuning again in every step, and the keys and values of prefix tuning are ignored.
    """

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` reads its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Pass the cache to PEFT as `past_key_values`. PEFT replaces this method of the instance, and calls it."""
        parent: Any = super()
        inputs = parent.prepare_inputs_for_generation(*args, **kwargs)
        if "cache" in inputs and "prepare_inputs_for_generation" in vars(self):
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs


def check_cache_implementation(generation_config: Any) -> None:
    """Raise NotImplementedError if the settings of a call of `generate` request another kind of cache than one that grows.

    The setting is removed from them: `transformers` refuses it next to a cache.
    """
    requested = generation_config.cache_implementation
    if requested not in (None, "dynamic", "dynamic_full"):  # the last: assisted generation, in older versions
        raise NotImplementedError(
            f"cache_implementation = {requested!r}: expected None or 'dynamic', because the model has its own cache, which "
            "grows with the text; omit it"
        )
    generation_config.cache_implementation = None


class ColumnCache(TransformersCache):
    """Cache of the columns of a batch, padding included. A subclass owns the `Cache` of their tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(layers=[])
        self._model, self._n_columns = model, 0
        self._mask: Tensor | None = None  # of all columns, bool [B, n] on the CPU; None without padding
        self._offset: Tensor | None = None  # position of the first token, [B, 1] or [1, 1]; None if unknown

    @property
    def tokens(self) -> Cache | None:
        """Cache of the tokens without padding; None before the first tokens."""
        raise NotImplementedError

    def _drop_tokens(self) -> None:
        """Remove the cache of the tokens."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> ColumnCache:
        """Copy the cached tokens, but share the model, so that several generations can continue from one prompt."""
        memo[id(self._model)] = self._model
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _add_columns(self, n_columns: int, permutation: PaddingPermutation | None) -> None:
        if permutation is not None or self._mask is not None:
            new = torch.ones(self.batch_size, n_columns) if permutation is None else permutation.mask.cpu()
            self._mask = torch.cat([self.make_mask(len(new)), new.bool()], 1)
        self._n_columns += n_columns

    def make_mask(self, n_rows: int) -> Tensor:
        """Return the mask of all columns, bool [B, n] on the CPU: True for a token, False for padding."""
        return torch.ones(n_rows, self._n_columns, dtype=torch.bool) if self._mask is None else self._mask

    def check_positions(self, positions: Tensor, mask: Tensor | None) -> None:
        """Raise ValueError unless positions [B, n] or [1, n] of new columns continue the positions of cached tokens.

        The positions count up by one in each row, as `build_layout` checks. mask: [B, n], None without padding.
        """
        starts = (0,) if self.tokens is None else self.tokens.starts
        n_cached = torch.tensor(starts, device=positions.device)[:, None]
        positions = positions.expand(max(len(positions), len(n_cached)), -1)
        offset, last_offset = (x - n_cached for x in find_end_offsets(positions, mask))
        if self._offset is None:
            # Cached tokens without positions and without padding have the positions from 0.
            self._offset = torch.zeros_like(offset) if self._n_columns and self._mask is None else offset
        elif self._mask is not None:
            restarts = ~self._mask[:, -1:].to(offset.device) & positions[:, :1].eq(1)  # as in `find_continued`
            self._offset = torch.where(restarts, offset, self._offset)
        is_equal = offset.eq(self._offset)
        is_text = torch.ones_like(is_equal)
        if mask is not None:
            is_text = mask.to(positions.device).bool().any(1, keepdim=True)
            is_equal |= ~is_text
        if not bool(is_equal.all()):
            row = int(is_equal[:, 0].byte().argmin())
            expected, got = (int(first.expand(len(is_equal), 1)[row]) + starts[row] for first in (self._offset, offset))
            raise ValueError(
                f"position_ids: expected {expected} for the first new token of row {row}, after cached tokens, got {got}; "
                "omit position_ids, or pass them in every call"
            )
        self._offset = torch.where(is_text, last_offset, self._offset)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._n_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def max_cache_len(self) -> int:
        return -1  # unlimited; PEFT reads it in `generate` with prefix tuning, whose cache `forward` then refuses

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.tokens is not None:
            self.tokens.reorder(beam_idx.tolist())
        self._mask = None if self._mask is None else self._mask[beam_idx.cpu()]
        if self._offset is not None and len(self._offset) > 1:
            self._offset = self._offset[beam_idx.to(self._offset.device)]

    def reset(self) -> None:
        self._drop_tokens()
        self._n_columns, self._mask, self._offset = 0, None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns: -n removes n, and n (before transformers 5.24) keeps the first n.

        Raises ValueError for more columns than there are, NotImplementedError for more than the rings of the cache can
        restore.
        """
        n_removed = -tokens_to_remove if tokens_to_remove <= 0 else max(self._n_columns - tokens_to_remove, 0)
        if not n_removed or self.tokens is None:
            return
        if n_removed > self._n_columns:
            raise ValueError(f"{type(self).__name__}.crop: expected at most {self._n_columns} columns, got {n_removed}")
        removed = self.make_mask(self.batch_size)[:, self._n_columns - n_removed :]
        self.tokens.crop(removed.sum(1).tolist())
        self._n_columns -= n_removed
        self._mask = None if self._mask is None else self._mask[:, : self._n_columns]

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(f"{type(self).__name__}: a cache cannot be repeated; repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: the batch size is fixed; create a new cache for another batch size"
        )

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # for all layers, which are not listed: the cache grows with the text

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first tokens."""
        return self.tokens.batch if self.tokens else -1


class NSALabCache(ColumnCache):
    """Cache of the sequences being generated: a `Decoder` that grows when it is full."""

    _model: NSATransformer

    def __init__(self, model: NSATransformer) -> None:
        super().__init__(model)
        self.decoder: Decoder | None = None

    @property
    def tokens(self) -> Cache | None:
        return self.decoder.cache if self.decoder else None

    def _drop_tokens(self) -> None:
        self.decoder = None

    def append(
        self,
        tokens: Tensor | None,
        embeddings: Tensor | None,
        permutation: PaddingPermutation | None,
        *,
        with_hidden: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Append tokens int64 [B, n], or their embeddings [B, n, C], with the tokens of each row first.

        Return logits [B, n', V], n' = the most tokens of a row, and, `with_hidden`, the hidden states [B, n', C] of
        `Decoder.append_with_hidden`. Raises ValueError if all columns are padding.
        """
        data = tokens if embeddings is None else embeddings
        assert data is not None
        n_columns = data.shape[1]
        counts = permutation.counts if permutation else [n_columns] * len(data)
        if not max(counts):
            raise ValueError("attention_mask: expected a token in at least one row, got only padding")
        tokens, embeddings = (None if x is None else x[:, : max(counts)] for x in (tokens, embeddings))
        n_tokens = (max(self.decoder.cache.starts) if self.decoder else 0) + max(counts)
        if self.decoder is None:
            self.decoder = Decoder(self._model, max(MIN_CACHE_TOKENS, 2 * n_tokens), len(data))
        elif n_tokens > self.decoder.cache.capacity:
            self.decoder.grow(2 * n_tokens)
        self._add_columns(n_columns, permutation)
        if with_hidden:
            return self.decoder.append_with_hidden(tokens, counts, embeddings=embeddings)
        return self.decoder.append(tokens, counts, embeddings=embeddings), ()
