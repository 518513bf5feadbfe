"""Batches as a pure function of (seed, step).

Invariants
* `batch(step)` depends only on the tokens, `seq_len`, `sequences_per_step`, `seed` and `step`. There is no state to save or
  restore, and every split into ranks and micro-batches gives the same global batch.
* An epoch reads each row once, in the order of a pseudorandom permutation that is computed and not stored. The next epoch
  uses another permutation; `StreamPacking` also shifts all windows by a new offset.
* The output of an inserter depends only on the window and the sequence number.
* With a `separator`, a batch records where documents start in its rows, and padding has weight 0.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nsa_lab.data.document_starts import locate_documents, split_documents
from nsa_lab.data.sequence_packing import RowPacking, StreamPacking, check_length
from nsa_lab.data.shards import TokenStore

# (window int64 [T + 1], sequence number) -> (window with inserted facts int64 [T + 1], loss weights float32 [T + 1]).
Inserter = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Batch(NamedTuple):
    """Rows of a step's batch."""

    inputs: torch.Tensor
    """int64 [rows, T]"""
    targets: torch.Tensor
    """int64 [rows, T], the inputs one token later."""
    weights: torch.Tensor | None = None
    """Loss weight of each target, float32 [rows, T]; None: all weights are equal."""
    documents: torch.Tensor | None = None
    """Document starts in all rows, and the end: int32 [documents + 1], on the CPU, as from `locate_documents`. Attention
    stays within a document. None: each row is one document."""

    def split(self, size: int) -> list[Batch]:
        """Split into batches of `size` rows, in order."""
        inputs, targets = self.inputs.split(size), self.targets.split(size)
        weights = [None] * len(inputs) if self.weights is None else self.weights.split(size)
        documents = [None] * len(inputs)
        if self.documents is not None:
            documents = split_documents(self.documents, size * self.inputs.shape[1])
        return [Batch(*parts) for parts in zip(inputs, targets, weights, documents, strict=True)]


class Batches:
    """Training batches of rows of `tokens`. Raises `DataError` if there are fewer than `seq_len` + 1 tokens.

    `inserter`: inserts facts into each window; None: plain text.
    `packing`: how the text is cut into rows; None: `StreamPacking`.
    `separator`: the token between documents, if batches are to record document starts; None: each row is one document.
    """

    def __init__(
        self,
        tokens: TokenStore,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        inserter: Inserter | None = None,
        *,
        packing: RowPacking | None = None,
        separator: int | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.sequences_per_step = sequences_per_step
        self._tokens = tokens
        self._seed = seed
        self._inserter = inserter
        self._packing = packing or StreamPacking(tokens, seq_len, separator)
        self._separator = separator
        self.windows_per_epoch = self._packing.rows_per_epoch

    def batch(self, step: int, start: int = 0, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 `[count, seq_len]` each: sequences `start` to `start + count` of a step.

        Default: the whole batch. Targets are the inputs one token later.
        """
        return self.weighted_batch(step, start, count)[:2]

    def weighted_batch(self, step: int, start: int = 0, count: int | None = None) -> Batch:
        """Return `batch` with loss weights and document starts."""
        windows, weights = zip(
            *(self._read_sequence(number) for number in self._get_sequence_numbers(step, start, count)), strict=True
        )
        inputs, targets = _split_inputs_and_targets(np.stack(windows))
        target_weights = None if weights[0] is None else torch.from_numpy(np.stack(weights)[:, 1:].copy())
        if self._separator is None:
            return Batch(inputs, targets, target_weights)
        documents = locate_documents(inputs.numpy(), self._separator)
        return Batch(inputs, targets, torch.ones(targets.shape) if target_weights is None else target_weights, documents)

    def find_documents(self, step: int) -> torch.Tensor | None:
        """Return the document starts of all rows of the step, as `weighted_batch` does, without inserting facts."""
        if self._separator is None:
            return None
        rows = map(self._get_row, self._get_sequence_numbers(step, 0, None))
        return locate_documents((self._packing.read_window(row)[:-1] for row in rows), self._separator)

    @functools.cached_property
    def max_documents_per_row(self) -> int:
        """Maximum number of documents in a row, over all rows of the text."""
        return self._packing.count_max_documents()

    def count_document_lengths(self) -> Mapping[int, int]:
        """Return {document length: count} over the rows of the first epoch. Parts of documents count, padding does not.

        Without a `separator`, each row counts as one document.
        """
        return (
            {self.seq_len: 1} if self._separator is None else self._packing.count_document_lengths(self._make_epoch_key(0))
        )

    def summarize_packing(self) -> dict[str, Any]:
        """Return the number of rows, documents, cut documents and padding tokens of the first epoch."""
        return self._packing.summarize(self._make_epoch_key(0))

    def get_text_positions(self, step: int, start: int = 0, count: int | None = None) -> list[int]:
        """Return the index of the first token of each of these sequences in the text."""
        return [self._packing.get_position(self._get_row(n)) for n in self._get_sequence_numbers(step, start, count)]

    def _get_sequence_numbers(self, step: int, start: int, count: int | None) -> range:
        """Return sequence numbers, which count over all steps."""
        count = self.sequences_per_step - start if count is None else count
        if step < 0 or start < 0 or count < 1 or start + count > self.sequences_per_step:
            raise ValueError(
                f"batch(step={step}, start={start}, count={count}): "
                f"expected step >= 0 and sequences within 0..{self.sequences_per_step}"
            )
        first = step * self.sequences_per_step + start
        return range(first, first + count)

    def compute_hash(self, step: int) -> str:
        """Return sixteen hex digits of a hash over the tokens of the global batch, for diagnosis."""
        digest = hashlib.sha256()
        for number in self._get_sequence_numbers(step, 0, None):
            digest.update(self._read_sequence(number)[0].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _read_sequence(self, sequence: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the window of a sequence, int64 [T + 1], and its loss weights, float32 [T + 1] or None for all ones."""
        row = self._get_row(sequence)
        window, weights = self._packing.read_window(row), self._packing.get_weights(row)
        if self._inserter is None:
            return window, weights
        window, inserted_weights = self._inserter(window, sequence)
        return window, inserted_weights if weights is None else inserted_weights * weights

    def _get_row(self, sequence: int) -> int:
        epoch, index = divmod(sequence, self.windows_per_epoch)
        return self._packing.get_row(index, self._make_epoch_key(epoch))

    def _make_epoch_key(self, epoch: int) -> str:
        return f"{self._seed}:{epoch}"


class EvalBatches(Sequence):
    """`n_windows` fixed, disjoint windows of `tokens` (fewer if the tokens hold fewer), in batches of `batch_size`.

    The tokens are divided into `n_windows` equal segments, and the first window of each segment is read. Each document is
    therefore represented in proportion to its length. The windows depend only on the tokens, `seq_len` and `n_windows`;
    `batch_size` only groups them.

    Item i is (inputs, targets), int64 `[<= batch_size, seq_len]`. Only the last batch may be smaller, so weight a mean over
    batches by their rows. With a `separator`, `find_documents` returns the document starts.
    """

    def __init__(
        self, tokens: TokenStore, seq_len: int, n_windows: int, batch_size: int, separator: int | None = None
    ) -> None:
        check_length(tokens, seq_len)
        self._tokens = tokens
        self._separator = separator
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._n_available = (len(tokens) - 1) // seq_len
        self.n_windows = min(n_windows, self._n_available)

    def __len__(self) -> int:
        return -(-self.n_windows // self._batch_size)

    @functools.cached_property
    def identity(self) -> str:
        """Sixteen hex digits of a hash over the windows' tokens; independent of `batch_size`."""
        digest = hashlib.sha256()
        for window in range(self.n_windows):
            digest.update(self._tokens.read(self._get_position(window), self._seq_len + 1).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def find_documents(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the document starts in the inputs of an item; None without a `separator`."""
        return None if self._separator is None else locate_documents(inputs.numpy(), self._separator)

    def _get_position(self, window: int) -> int:
        return window * self._n_available // self.n_windows * self._seq_len

    # Slices are not supported: a slice of batches would hold all of them in memory.
    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"evaluation batch {index} of {len(self)}")
        return _read_windows(
            self._tokens, [self._get_position(window) for window in self.get_window_range(index)], self._seq_len
        )

    def get_window_range(self, index: int) -> range:
        """Return the window numbers of a batch; windows are numbered from 0 in text order."""
        first = index * self._batch_size
        return range(first, min(first + self._batch_size, self.n_windows))


def _read_windows(tokens: TokenStore, positions: list[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _split_inputs_and_targets(np.stack([tokens.read(position, seq_len + 1) for position in positions]))


def _split_inputs_and_targets(windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Split windows [rows, T + 1] into inputs and targets, [rows, T] each."""
    both = torch.from_numpy(windows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
