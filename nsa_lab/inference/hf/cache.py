"""Key/value cache of `generate`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from nsa_lab.inference.decode import Decoder
from nsa_lab.inference.hf.inputs import PaddingPermutation
from nsa_lab.model import NSATransformer

MIN_CACHE_TOKENS = 256  # initial capacity; a full cache grows to twice the tokens needed


class NSALabCache(TransformersCache):
    """Cache of the sequences being generated: a `Decoder` that grows when it is full."""

    def __init__(self, model: NSATransformer) -> None:
        super().__init__(layers=[])
        self._model, self._n_columns = model, 0
        self._n_last_columns = 0  # columns at the end without padding
        self.decoder: Decoder | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NSALabCache:
        """Copy the cached tokens, but share the model, so that several generations can continue from one prompt."""
        memo[id(self._model)] = self._model
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

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
        self._n_columns += n_columns
        if permutation is None:
            self._n_last_columns += n_columns
        elif permutation.n_last_columns < n_columns:
            self._n_last_columns = permutation.n_last_columns
        if with_hidden:
            return self.decoder.append_with_hidden(tokens, counts, embeddings=embeddings)
        return self.decoder.append(tokens, counts, embeddings=embeddings), ()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._n_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.decoder is not None:
            self.decoder.cache.reorder(beam_idx.tolist())

    def reset(self) -> None:
        self.decoder, self._n_columns, self._n_last_columns = None, 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns: -n removes n, and n (before transformers 5.24) keeps the first n.

        Raises NotImplementedError for columns with padding, and for more than the rings of the cache can restore.
        """
        n_removed = -tokens_to_remove if tokens_to_remove <= 0 else max(self._n_columns - tokens_to_remove, 0)
        if not n_removed or self.decoder is None:
            return
        if n_removed > self._n_last_columns:
            raise NotImplementedError(
                f"NSALabCache.crop: expected at most {self._n_last_columns} columns, which have no padding, got "
                f"{n_removed}; use a new cache"
            )
        self.decoder.crop(n_removed)
        self._n_columns -= n_removed
        self._n_last_columns -= n_removed

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("NSALabCache: a cache cannot be repeated; repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("NSALabCache: the batch size is fixed; create a new cache for another batch size")

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
        return self.decoder.cache.batch if self.decoder else -1
